"""Long prompts of real text, and answers that copy or edit a part of them."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.lib.trace import Row
from bench.scorer.long_contexts import edit

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COPIED = 600
KINDS = {
    "copy": ("replace", 0.0, 0),
    "copy under way": ("replace", 0.0, 8),
    "replace": ("replace", 0.05, 0),
    "insert": ("insert", 0.05, 0),
    "delete": ("delete", 0.05, 0),
}
"""Kind of edit, the share of tokens that it meets, and how many tokens of the answer end the prompt already."""


def python_sources(encoder: Tokenizer, tokens: int) -> NDArray[np.int32]:
    """Return the first `tokens` tokens of Python's own library, its modules in order of their names.

    Raises:
        ValueError: the library is shorter than that.
    """
    parts: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(parts) < tokens:
            parts += encoder.encode(path.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False).ids
    if len(parts) < tokens:
        raise ValueError(f"this Python's library has {len(parts)} tokens, not {tokens}")
    return np.array(parts[:tokens], np.int32)


def rows(text: NDArray[np.int32], length: int, kind: str, number: int) -> list[Row]:
    """Make (prompt, answer) rows: `length` tokens of the text, then 600 of them, from a fifth of it on, edited.

    The prompts begin at different places of the text, as far as it has them.
    """
    how, share, begun = KINDS[kind]
    made: list[Row] = []
    for i in range(number):
        rng = np.random.default_rng(i)
        start = (len(text) - length) * i // max(1, number - 1) if number > 1 else 0
        prompt = text[start : start + length]
        part = prompt[length // 5 : length // 5 + COPIED]
        prompt, part = np.concatenate([prompt, part[:begun]]), part[begun:]
        made.append((prompt, edit(part, how, share, prompt, rng)))
    return made
