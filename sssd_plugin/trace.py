"""Traces: recorded prompts and answers, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.method import TOP_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Row = tuple[NDArray[np.int32], NDArray[np.int32]]


class Recording(NamedTuple):
    """An answer with the likeliest tokens before each of its own, at temperature 1.

    Attributes:
        prompt: int32 [P]; output: int32 [T].
        top_tokens: int32 [T, TOP_TOKENS], likeliest first; top_log_probs: float32 [T, TOP_TOKENS].
    """

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    top_tokens: NDArray[np.int32]
    top_log_probs: NDArray[np.float32]


def load_recordings(path: Path) -> list[Recording]:
    """Read what `bench/record.py` writes: JSON objects of prompt, output, top_tokens, top_log_probs, one per line.

    Raises:
        ValueError: a missing or malformed file, named with its line.
    """
    if not path.is_file():
        raise ValueError(f"recorded: {path} does not exist")
    recordings = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, output, tokens = (np.array(row[name], np.int32) for name in ("prompt", "output", "top_tokens"))
            recording = Recording(prompt, output, tokens, np.array(row["top_log_probs"], np.float32))
            if any(array.shape != (len(output), TOP_TOKENS) for array in recording[2:]) or prompt.ndim != 1:
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError):
            raise ValueError(
                f"recorded: {path} line {number} is no JSON object with prompt, output, top_tokens and top_log_probs, "
                f"{TOP_TOKENS} for each token of the output"
            ) from None
        recordings.append(recording)
    return recordings


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
