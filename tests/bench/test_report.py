"""The page: its figures and plots, and the files that it cannot read by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from results import blocks

from bench import report
from bench.lib import serving


def write(path: Path, problems: list[str], **changes: Any) -> None:
    """A file of results of three arms."""
    arms = {n: serving.asdict(serving.PRESETS[n]) for n in ("plain", "sssd", "ngram")}
    settings = {"model": "m", "device": "cpu", "dtype": "float32", "eager": True, "max_tokens": 8, "arms": arms}
    settings["questions"] = {"files": ["q.jsonl"], "count": 8, "sha256": "0"}
    serving.Report(path, settings | changes, blocks(), problems).write()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "serve-test.json", ["arm 'x' is left out"])
    (tmp_path / "other.json").write_text('{"something": "else"}')
    (tmp_path / "damaged.json").write_text('{"benchmark": "serve"')
    return tmp_path


def test_the_page_shows_figures_and_plots_and_names_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "page" / "index.md"
    monkeypatch.setattr("sys.argv", ["report.py", str(folder), "--out", str(out)])
    assert report.main() == 0
    page = out.read_text()
    linked = re.findall(r"\]\((.*?)\)", page)
    assert len(linked) == 2 and sorted(linked) == sorted(path.name for path in out.parent.glob("*.png"))
    assert "> problem: arm 'x' is left out" in page
    assert "## damaged.json" in page and "left out: JSONDecodeError" in page and "other.json" not in page
    assert "| 2.00 |" in page and "| 0.80 |" in page  # over plain
    assert "more than 1 % below plain: sssd 0 of 6, ngram 6 of 6." in page
    assert "sssd over ngram" in page and "| 2.50 |" in page and "ngram over" not in page
    assert "Arms took turns, block by block" in page


def test_a_result_that_was_changed_is_refused(folder: Path) -> None:
    path = folder / "serve-test.json"
    path.write_text(path.read_text().replace('"ratio": 2.0', '"ratio": 3.0'))
    page, plots = report.build(folder)
    assert "left out: ValueError: serve-test.json is not the file that its benchmark wrote" in page
    assert not plots and "3.00" not in page


def test_the_table_for_a_readme(folder: Path) -> None:
    lines = report.markdown(json.loads((folder / "serve-test.json").read_text())).splitlines()
    assert lines[0] == "| at a time | questions | plain, tokens/s | sssd | ngram |"
    assert lines[2] == "| 1 | QA | 10.0 | **2.00** | 0.80 |", "blocks that do not differ have no interval"
    assert report.bounds(1.104, 1.3) == " (1.10-1.30)"
    assert len(lines) == 2 + 2 * 3  # two concurrencies; two groups and all
