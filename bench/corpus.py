"""Text for the demo's datastore that every machine has: the sources and documentation of Python's standard library.

python bench/corpus.py build/corpus.jsonl
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests and data tables are half of the library, and nobody writes such code in a chat.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}


def documents() -> Iterator[str]:
    """Each module's source, then the language reference that `help()` shows, one topic at a time."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts) and path.parent.name != "pydoc_data":
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
    from pydoc_data.topics import topics

    yield from topics.values()


def write(out: Path) -> int:
    """Write one JSON line `{"text": ...}` per document; the number of characters."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    characters = 0
    with part.open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")
            characters += len(text)
    part.rename(out)
    return characters


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {write(Path(sys.argv[1])):,} characters")
