"""Writes the matrix of compatibility.md from compatibility.toml.

python docs/make_compatibility.py     # --check only reports whether it is up to date
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pages
from pages import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
MARKS = "<!-- matrix: written by docs/make_compatibility.py -->\n", "<!-- end of matrix -->"
WORDS = {word: word for word in ("yes", "refused", "by backend", "off", "starts", "-")}
WORDS |= {
    "chains only": "chains",
    "not tested": "untested",
    "earlier version": "earlier",
    "by the engine": "engine",
}  # as the page has it


def matrix() -> str:
    """Return the tables, one for each part. Raises ValueError: a cell has another word."""
    features = tomllib.loads(PAGE.with_suffix(".toml").read_text(encoding="utf-8"))["feature"]
    text = ""
    for part in dict.fromkeys(feature["part"] for feature in features):
        rows = [feature for feature in features if feature["part"] == part]
        columns = [name for name in rows[0] if name not in ("part", "name")]
        text += f"\n| {part} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        for row in rows:
            said = [row[column][0] for column in columns]
            if strange := set(said) - WORDS.keys():
                raise ValueError(f"{row['name']}: {', '.join(sorted(strange))}: not a word of the matrix")
            text += f"| {row['name']} | {' | '.join(WORDS[word] for word in said)} |\n"
    return f"{text}\n"


def files() -> dict[Path, str]:
    return {PAGE: pages.between(PAGE.read_text(encoding="utf-8"), *MARKS, matrix())}


if __name__ == "__main__":
    sys.exit(pages.main(files))
