"""The pages of evidence: what they name is there, pictures show every interval whole; results of a GPU become a page of
the same kind."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from freedraft.engines.sglang.guards import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
PICTURES = sorted(path for path in (DOCS / "img").glob("*.svg") if path.stem != "demo")  # a recorded terminal


def test_each_question_is_one_screen() -> None:
    sections = re.split(r"^## ", (DOCS / "results.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) == 11
    for section in sections:
        _title, answer, picture, _conditions, files = section.strip().split("\n\n")
        assert answer.startswith("**") and picture.startswith("![") and files.startswith("Files: "), section
        assert len(section.split()) <= 180 and "|" not in section, section


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_keep_their_marks_inside_and_their_text_readable(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text and len(text) < 20_000
    root = ET.fromstring(text)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    assert width == 800
    places = {"x": width, "x1": width, "x2": width, "cx": width, "y": height, "y1": height, "y2": height, "cy": height}
    for element in root.iter():
        assert float(element.attrib.get("font-size", 14)) >= 13, element.text
        for name, most in places.items():
            assert 0 <= float(element.attrib.get(name, 0)) <= most, element.attrib


def test_the_evidence_of_the_matrix_is_there() -> None:
    """A test, a result file, or words of the line that refuses; what is not tested has none."""
    for feature in tomllib.loads((DOCS / "compatibility.toml").read_text(encoding="utf-8"))["feature"]:
        for column, (word, *evidence) in (item for item in feature.items() if item[0] not in ("part", "name")):
            place = f"{feature['name']}, {column}"
            assert bool(evidence) == (word not in ("not tested", "-")), place
            for one in evidence:
                path, _, words = one.partition(": ")
                path, _, test = path.partition("::")
                source = (ROOT / path).read_text(encoding="utf-8")
                assert not test or f"def {test}(" in source, f"{place}: no test {one}"
                assert words in re.sub(r'"\n\s*f?"', "", source), f"{place}: nothing says {one}"


def test_attention_on_sglang_is_as_the_guards_say() -> None:
    page = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    shapes = {
        name: [str(one or "refused") for one in (able.full, able.mla, able.windows)] for name, able in BACKENDS.items()
    }
    rows = re.findall(r"^\| ([\w, ]+) \| (.*) \|$", page[page.index("| backend |") :], re.MULTILINE)
    found = {name: shape for names, shape in rows for name in names.split(", ") if name in shapes}
    assert found == {name: " | ".join(shape) for name, shape in shapes.items()}


def test_figures_of_the_page_on_gpus_are_those_of_the_results() -> None:
    page, shown = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("gpu", "results"))
    for figure in ("174 of 176", "39 of 44", "1.37", "2.21"):
        assert figure in page and figure in shown
    assert f"{(ROOT / 'tests' / 'gpu_findings.toml').read_text(encoding='utf-8').count('[[finding]]')} findings" in page


def test_draft_tokens_of_recurrent_models_are_those_of_the_results() -> None:
    """By model: draft tokens and GB per request, of few and of many requests of each engine."""
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    rows = json.loads((RESULTS / "recurrent-states.json").read_text(encoding="utf-8"))["rows"]
    for model in {row["model"] for row in rows}:
        found = {(row["engine"], row["requests"]): row for row in rows if row["model"] == model}
        shown = [found[engine, requests] for engine in ("vLLM", "SGLang") for requests in (8, 64)]
        cells = [text for row in shown for text in (row["draft_tokens"], f"{row['state_bytes_per_request'] / 1e9:.2f}")]
        assert f"| {model} | {shown[0]['ranks']} | {' | '.join(map(str, cells))} |" in page


def made(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCS / "make_results.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_results_of_a_gpu_become_a_page(tmp_path: Path) -> None:
    for folder in (RESULTS, RESULTS / "manifests"):
        (tmp_path / folder.relative_to(RESULTS)).mkdir(exist_ok=True)
        for old, new in (("serve-vllm-cpu", "serve-vllm"), ("kernels", "kernels"), ("first-hour", "first-hour")):
            shutil.copy(folder / f"{old}.json", tmp_path / folder.relative_to(RESULTS) / f"{new}.json")
    done = made(str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "How fast is vLLM on a GPU?" in page and "Cells more than 1 % below plain: ngram 4 of 22" in page
    assert "(kernels.csv)" in page and "8 draft tokens" in (tmp_path / "img" / "gpu.svg").read_text(encoding="utf-8")
    assert "ngram" in (tmp_path / "img" / "served-vllm.svg").read_text(encoding="utf-8")
    assert "1,all" in (tmp_path / "serve-vllm.csv").read_text(encoding="utf-8")
    (tmp_path / "serve-vllm.json").write_text("{}")
    done = made(str(tmp_path))
    assert done.returncode == 2 and "serve-vllm.json" in done.stderr and done.stderr.count("\n") == 1
