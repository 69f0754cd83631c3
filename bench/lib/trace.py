"""Traces: recorded prompts and answers, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Row = tuple[NDArray[np.int32], NDArray[np.int32]]


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer.json at or in `path`.

    Raises:
        ValueError: there is none.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer: {file} does not exist; name a model folder that holds tokenizer.json")
    return Tokenizer.from_file(str(file))


@dataclass(frozen=True)
class Trace:
    """Tokens of a trace.

    Attributes:
        rows: (prompt, output), int32 each, in file order.
        sha256: of the file.
        vocab_size: of the tokenizer.
    """

    rows: list[Row]
    sha256: str
    vocab_size: int

    @classmethod
    def load(cls, path: Path, tokenizer: Path) -> Trace:
        """Read and tokenize `path` (JSONL with "prompt" and "output") with the tokenizer.json at or in `tokenizer`.

        Raises:
            ValueError: a missing or malformed file, named with its line.
        """
        encoder = load_tokenizer(tokenizer)
        if not path.is_file():
            raise ValueError(f"trace: {path} does not exist")
        raw = path.read_bytes()
        prompts, outputs = [], []
        for number, line in enumerate(raw.decode().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompts.append(str(row["prompt"]))
                outputs.append(str(row["output"]))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f'trace: {path} line {number} is no JSON object with "prompt" and "output"') from None
        encoded = [
            [np.array(e.ids, np.int32) for e in encoder.encode_batch(texts, add_special_tokens=False)]
            for texts in (prompts, outputs)
        ]
        return cls(list(zip(*encoded, strict=True)), hashlib.sha256(raw).hexdigest(), encoder.get_vocab_size())
