"""Recorded text, one JSON object per line: prompts with answers, and sessions of agents."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bench.lib import jsonl
from sssd_plugin.datastore import tokenizer as tokenizers
from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex

Row = tuple[NDArray[np.int32], NDArray[np.int32]]
MAX_OUTPUT, MIN_PROMPT, MIN_OUTPUT = 512, 4, 9
STORE_ROWS = 605  # first rows of a trace: their outputs are the datastore; the others are replayed
MIN_TURN, MIN_BEFORE = 4, 4  # tokens of a turn in a session, and before it


def replayed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to replay: without the shortest ones, long outputs truncated."""
    return [(p, o[:MAX_OUTPUT]) for p, o in rows if len(p) >= MIN_PROMPT and len(o) >= MIN_OUTPUT]


def store_of(documents: Sequence[NDArray[np.int32]], vocab_size: int) -> Snapshot:
    """Build a store of documents, with a separator after each."""
    if not documents:
        return ()
    tokens = np.concatenate([np.append(document, SEPARATOR) for document in documents]).astype(np.int32)
    return (SubIndex.build(tokens, vocab_size),)


@dataclass(frozen=True)
class Trace:
    """Tokens of a trace: rows of (prompt, output), int32 each, in file order."""

    rows: list[Row]
    vocab_size: int

    @classmethod
    def load(cls, path: Path, tokenizer: Path) -> Self:
        """Read JSONL with "prompt" and "output", and tokenize both. Raises ValueError: no file or no tokenizer."""
        encoder = tokenizers.load(tokenizer)
        form = 'an object with "prompt" and "output"'
        texts = jsonl.read(path, form, lambda _, row: (str(row["prompt"]), str(row["output"])))
        encoded = [encoder.encode_batch(list(each), add_special_tokens=False) for each in zip(*texts, strict=True)]
        rows = [(np.array(p.ids, np.int32), np.array(o.ids, np.int32)) for p, o in zip(*encoded, strict=True)]
        return cls(rows, encoder.get_vocab_size())

    @property
    def documents(self) -> list[NDArray[np.int32]]:
        """Outputs that drafters may learn from before the replay."""
        return [output for _, output in self.rows[:STORE_ROWS]]

    @property
    def test_rows(self) -> list[Row]:
        return replayed(self.rows[STORE_ROWS:])


@dataclass(frozen=True)
class Sessions:
    """Tokens of agents' sessions. turns: by session and in file order, (prompt, answer) of each assistant turn; the
    prompt is all text before it, and the answer ends with the end-of-turn token."""

    turns: dict[str, list[Row]]
    vocab_size: int

    @classmethod
    def load(cls, path: Path, tokenizer: Path) -> Self:
        """Read JSONL with "session" and "messages", which get ChatML markers. Raises ValueError: as `Trace.load`."""
        encoder = tokenizers.load(tokenizer)
        turns: dict[str, list[Row]] = {}

        def encode(text: str) -> NDArray[np.int32]:
            return np.array(encoder.encode(text, add_special_tokens=False).ids, np.int32)

        def parse(number: int, row: Any) -> None:
            own, context = turns.setdefault(str(row["session"]), []), encode("")
            for role, content in [(str(m["role"]), str(m["content"])) for m in row["messages"]]:
                prompt = np.append(context, encode(f"<|im_start|>{role}\n"))
                text = encode(f"{content}<|im_end|>")
                if role == "assistant" and len(prompt) >= MIN_BEFORE and len(text) >= MIN_TURN:
                    own.append((prompt, text))
                context = np.concatenate([prompt, text, encode("\n")])

        jsonl.read(path, 'an object with "session" and "messages" of "role" and "content"', parse)
        found = {name: own for name, own in turns.items() if own}
        if not found:
            raise jsonl.FileError(f"{path}: no answer of an assistant in it")
        return cls(found, encoder.get_vocab_size())
