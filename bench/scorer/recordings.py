"""Recordings: answers with the logits before each of their tokens, as `record.py` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.step import TOP_TOKENS


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
    """Read JSON objects of prompt, output, top_tokens and top_log_probs, one per line.

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
