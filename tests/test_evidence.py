"""The pages of evidence: short, in sentences that can be read, with one number in a cell and pictures in which every
interval is whole; results of a GPU become a page of the same kind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
WORDS = {"results": 1_300, "papers": 1_250}
PICTURES = sorted((DOCS / "img").glob("*.svg"))


def prose(page: Path) -> str:
    """The text without code blocks, comments, and what links and pictures point to."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


@pytest.mark.parametrize("name", WORDS)
def test_a_page_stays_short(name: str) -> None:
    """Bars of tables are no words."""
    words = (DOCS / f"{name}.md").read_text(encoding="utf-8").replace("|", " ").split()
    assert len(words) <= WORDS[name]


@pytest.mark.parametrize("name", WORDS)
def test_a_sentence_can_be_read_at_once(name: str) -> None:
    text = "\n".join(line for line in prose(DOCS / f"{name}.md").splitlines() if not line.startswith(("#", "Files:")))
    blocks = re.split(r"\n\s*\n|\n(?=[|\-\d])|\|", text)
    sentences = [one for block in blocks for one in re.split(r"(?<=[.!?:;])\s", " ".join(block.split()))]
    assert [one for one in sentences if len(one.split()) > 35] == []


def test_each_question_is_one_screen() -> None:
    sections = re.split(r"^## ", (DOCS / "results.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(sections) == 9
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


def made(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCS / "make_results.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_results_of_a_gpu_become_a_page(tmp_path: Path) -> None:
    for folder in (RESULTS, RESULTS / "manifests"):
        (tmp_path / folder.relative_to(RESULTS)).mkdir(exist_ok=True)
        for old, new in (("serve-vllm-cpu", "serve-vllm"), ("kernels", "kernels")):
            shutil.copy(folder / f"{old}.json", tmp_path / folder.relative_to(RESULTS) / f"{new}.json")
    done = made(str(tmp_path))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "How fast is vLLM on a GPU?" in page and "Cells more than 1 % below plain: ngram 4 of 22" in page
    assert "ngram" in (tmp_path / "img" / "served-vllm.svg").read_text(encoding="utf-8")
    assert "1,all" in (tmp_path / "serve-vllm.csv").read_text(encoding="utf-8")
    (tmp_path / "serve-vllm.json").write_text("{}")
    done = made(str(tmp_path))
    assert done.returncode == 2 and "serve-vllm.json" in done.stderr and done.stderr.count("\n") == 1
