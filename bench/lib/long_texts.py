"""Long prompts of real text, and answers that copy or edit a part of them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.scoring.long_contexts import edit
from sssd_plugin.trace import Row

COPIED = 600
BEGUN = 8
KINDS = {
    "copy": ("replace", 0.0),
    "copy under way": ("replace", 0.0),  # its first 8 tokens end the prompt
    "replace": ("replace", 0.05),
    "insert": ("insert", 0.05),
    "delete": ("delete", 0.05),
}
"""Kind of edit, and the share of tokens that it meets."""


def library(tokenizer: Path, tokens: int) -> NDArray[np.int32]:
    """Return the first `tokens` tokens of Python's own library, its modules in order of their names.

    Raises:
        ValueError: there is no tokenizer, or the library is shorter than that.
    """
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        raise ValueError(f"tokenizer: {file} does not exist; name a model folder that holds tokenizer.json")
    encoder = Tokenizer.from_file(str(file))
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
    made: list[Row] = []
    for i in range(number):
        rng = np.random.default_rng(i)
        start = (len(text) - length) * i // max(1, number - 1) if number > 1 else 0
        prompt = text[start : start + length]
        part = prompt[length // 5 : length // 5 + COPIED]
        if kind == "copy under way":
            prompt, part = np.concatenate([prompt, part[:BEGUN]]), part[BEGUN:]
        made.append((prompt, edit(part, *KINDS[kind], prompt, rng)))
    return made
