"""Traces: recorded prompts and answers, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore import tokenizer as tokenizers
from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex

Row = tuple[NDArray[np.int32], NDArray[np.int32]]
MAX_OUTPUT, MIN_PROMPT, MIN_OUTPUT = 512, 4, 9


def replayed(rows: Sequence[Row]) -> list[Row]:
    """The rows that are replayed: not the shortest ones, and the beginnings of long outputs."""
    return [(p, o[:MAX_OUTPUT]) for p, o in rows if len(p) >= MIN_PROMPT and len(o) >= MIN_OUTPUT]


def store_of(documents: Sequence[NDArray[np.int32]], vocab_size: int) -> Snapshot:
    """A store of these documents, a separator after each."""
    if not documents:
        return Snapshot.empty()
    tokens = np.concatenate([np.append(document, SEPARATOR) for document in documents]).astype(np.int32)
    return Snapshot([SubIndex.build(tokens, vocab_size)])


@dataclass(frozen=True)
class Trace:
    """Tokens of a trace: rows of (prompt, output), int32 each, in the order of the file."""

    rows: list[Row]
    sha256: str
    vocab_size: int

    @classmethod
    def load(cls, path: Path, tokenizer: Path) -> Trace:
        """Read JSONL with "prompt" and "output", and tokenize both. Raises OSError, ValueError: a missing or malformed
        file, or no tokenizer."""
        encoder, raw = tokenizers.load(tokenizer), path.read_bytes()
        try:
            rows = [json.loads(line) for line in raw.decode().splitlines() if line.strip()]
            texts = [[str(row[name]) for row in rows] for name in ("prompt", "output")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'trace: {path}: not a JSON object with "prompt" and "output" a line ({error!r})'
            ) from None
        encoded = [
            [np.array(e.ids, np.int32) for e in encoder.encode_batch(each, add_special_tokens=False)] for each in texts
        ]
        return cls(list(zip(*encoded, strict=True)), hashlib.sha256(raw).hexdigest(), encoder.get_vocab_size())
