"""What the scripts that write pages share: result files, names of groups, text between marks, and `--check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.results import ROOT, checked

FOLDER = ROOT / "bench" / "results"
GROUPS = {"mt_bench": "MT-Bench", "qa": "QA", "rag": "RAG", "math_reasoning": "math", "summarization": "summaries"}


def nice(group: str) -> str:
    return GROUPS.get(group, group.replace("_", " "))


def result(name: str, folder: Path = FOLDER) -> Any:
    """Return the contents of a result file. Raises ValueError: it is not as its benchmark wrote it."""
    checked(folder / name)
    return json.loads((folder / name).read_text(encoding="utf-8"))


def between(text: str, begin: str, end: str, new: str) -> str:
    """Return the text with `new` between two marks. Raises ValueError: a mark is missing."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"the mark {(end if found else begin).strip()!r} is gone")
    return before + begin + new + end + after


def main(pages: Callable[[], dict[Path, str]]) -> int:
    """Write the files that `pages` returns; with --check, name those that are out of date. Returns the exit code."""
    script = Path(sys.argv[0]).name
    try:
        files = pages()
    except (ValueError, OSError, KeyError, TypeError, IndexError) as error:
        print(f"error: {script}: {error!r}", file=sys.stderr)
        return 2
    if "--check" in sys.argv:
        old = [path.name for path, text in files.items() if not path.is_file() or path.read_text("utf-8") != text]
        print(f"out of date: {', '.join(old)}: run python docs/{script}" if old else "", end="", file=sys.stderr)
        return 1 if old else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0
