"""docs/results.md: results of a GPU have sections of their own, should there be any, and what is strange is refused."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from results import blocks

from bench import forward_times, kernels
from bench.lib import results, serving

SCRIPT = Path(results.__file__).resolve().parents[2] / "docs" / "make_results.py"


@pytest.fixture
def make_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with an empty folder of results."""
    spec = importlib.util.spec_from_file_location("make_results", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def serve(path: Path, names: dict[str, str], **of_arms: Any) -> None:
    arms = {name: serving.asdict(serving.PRESETS[name]) | of_arms for name in names.values()}
    settings = {"model": "m", "device": "cuda", "dtype": "bfloat16", "eager": False, "max_tokens": 8, "arms": arms}
    settings |= {"in_turns": True, "questions": {"files": ["q.jsonl"], "count": 8, "sha256": "0"}}
    measured = [b | {"arm": names[b["arm"]]} for b in blocks() if b["arm"] in names]
    serving.Report(path, settings, measured).write()


def test_without_any_the_page_is_of_cpus(make_results: ModuleType) -> None:
    assert make_results.page() == f"{make_results.HEAD}\n{make_results.EARLIER}"


def test_serving_on_a_gpu(tmp_path: Path, make_results: ModuleType) -> None:
    serve(tmp_path / "serve-vllm.json", {"plain": "plain", "sssd": "sssd", "ngram": "ngram"})
    versions = {"python": "3.12", "sglang": "0.5.23"}
    serve(tmp_path / "serve-sglang.json", {"plain": "sglang", "sssd": "sglang-sssd"}, versions=versions)
    page = make_results.page()
    assert 'All but what is titled "On a GPU" ran on CPUs: 2 cores' in page
    vllm, sglang = page.split("\n## ")[1:-1]
    assert vllm.startswith("On a GPU: vLLM\n") and "| 1 | QA | 10.0 | **2.00** | 0.80 |" in vllm
    assert "One server at a time" in vllm and "below plain: sssd 0 of 6, ngram 6 of 6." in vllm
    assert sglang.startswith("On a GPU: SGLang\n") and "| 1 | QA | 10.0 | **2.00** |" in sglang
    assert "Versions in the engine's environment: python 3.12, sglang 0.5.23." in sglang
    assert "[serve-sglang.json](../bench/results/serve-sglang.json)" in sglang


def test_kernels(tmp_path: Path, make_results: ModuleType) -> None:
    timed, checked = ("verify greedy", "8x16", True, 2_000_000, 90.0, 3.0, 0.25), ("compact KV", "8x16", False, 1, 1.0)
    rows = [dict(itertools.zip_longest(kernels.FIELDS, row)) for row in (timed, checked)]
    figures = {"device": "a GPU", "copy_bytes_per_s": 2.7e12, "rows": rows}
    results.write_json(tmp_path / "kernels.json", figures)
    page = make_results.page()
    assert "| verify greedy | 8x16 | yes | 2.0 | 3 | 30.0 | 25% |" in page
    assert "| compact KV | 8x16 | **no** | 0.0 | - | - | - |" in page and "a copy moves 2,700 GB/s" in page


def test_forward_times(tmp_path: Path, make_results: ModuleType) -> None:
    path = tmp_path / "forward-times.json"
    arguments = "--shape 32 2 4 2 8 48 64 --dtype float32 --batches 1 2 --contexts 16 --query-tokens 1 2 4 --seconds 0"
    assert forward_times.main([*arguments.split(), "--json", str(path)]) == 0
    page = make_results.page()
    assert "| batch | context | ms | 1 tokens | 2 tokens | 4 tokens |" in page
    first, second = (line for line in page.splitlines() if line.startswith(("| 1 | 16 |", "| 2 | 16 |")))
    assert first.split(" | ")[3] == "1.00 (1.00)" and second.split(" | ")[3:5] == ["", "1.00 (1.00)"]
    assert "growth over predicted" in page and "did not fit" not in page


def test_what_no_section_shows_is_refused(tmp_path: Path, make_results: ModuleType) -> None:
    results.write_json(tmp_path / "strange.json", {})
    with pytest.raises(ValueError, match=r"no section shows strange\.json"):
        make_results.page()
    (tmp_path / "strange.json").rename(tmp_path / "kernels.json")
    with pytest.raises(ValueError, match=r"kernels\.json has no manifest"):
        make_results.page()
