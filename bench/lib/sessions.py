"""Recorded sessions of agents, one JSON object per line: "session", "messages" of "role" and "content"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.results import sha256
from bench.lib.tables import markdown
from bench.lib.trace import Row
from sssd_plugin.datastore import tokenizer as tokenizers

MIN_ANSWER, MIN_PROMPT = 4, 3
END = "<|im_end|>"


@dataclass(frozen=True)
class Sessions:
    """Tokens of sessions.

    Attributes:
        turns: by session, in file order: (prompt, answer) of each turn of the assistant, where the prompt is all before
            it and the answer ends with the token that ends a turn; answers under 4 tokens are left out.
        sha256: of the file.
        vocab_size: of the tokenizer.
    """

    turns: dict[str, list[Row]]
    sha256: str
    vocab_size: int

    @classmethod
    def load(cls, path: Path, tokenizer: Path) -> Sessions:
        """Read and tokenize `path` with the tokenizer.json at or in `tokenizer`; messages are framed as ChatML. Raises
        ValueError: a missing or malformed file, named with its line."""
        encoder = tokenizers.load(tokenizer)
        if not path.is_file():
            raise ValueError(f"sessions: {path} does not exist")

        def encode(text: str) -> list[int]:
            ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
            return ids

        turns: dict[str, list[Row]] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                name, messages = str(row["session"]), [(str(m["role"]), str(m["content"])) for m in row["messages"]]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f'sessions: {path} line {number} is no JSON object with "session" and "messages" of "role" and '
                    '"content"'
                ) from None
            own, context = turns.setdefault(name, []), list[int]()
            for role, content in messages:
                head, text = encode(f"<|im_start|>{role}\n"), encode(f"{content}{END}")
                prompt = context + head
                if role == "assistant" and len(prompt) > MIN_PROMPT and len(text) >= MIN_ANSWER:
                    own.append((np.array(prompt, np.int32), np.array(text, np.int32)))
                context = prompt + text + encode("\n")
        return cls({name: own for name, own in turns.items() if own}, sha256(path), encoder.get_vocab_size())


def comparison(rows: Sequence[dict[str, Any]], limits: str) -> str:
    """A table of freedraft beside `suffix` with these limits: tokens per step, their ratio to those of `suffix` (of
    trees to its trees, where it has any), and the lowest ratio of chains in one session."""
    found = {(r["file"], r["drafter"], r["shape"], r["budget"]): r for r in rows if r["limits"] in (None, limits)}
    lines = []
    for (file, drafter, shape, budget), theirs in found.items():
        if drafter != "suffix" or shape != "chain":
            continue
        ours, our_tree, tree = (
            found.get((file, *key, budget)) for key in (("sssd", "chain"), ("sssd", "tree"), ("suffix", "tree"))
        )
        if ours is None or our_tree is None:
            continue
        rates = [r["tokens_per_step"] for r in (ours, our_tree, theirs, tree or theirs)]
        own = ours["sessions"]
        each = [own[name]["tokens_per_step"] / r["tokens_per_step"] for name, r in theirs["sessions"].items()]
        cells = [f"{rate:.2f}" for rate in (rates if tree else rates[:3])]
        ratios = [f"{a:.2f}" for a in (rates[0] / rates[2], rates[1] / rates[3], min(each))]
        name = file.removesuffix(".jsonl").removesuffix("_dev").replace("_", " ")
        lines.append([name, str(budget), *cells, *([] if tree else [""]), *ratios])
    head = ["sessions", "nodes", "chain", "tree", "`suffix`, chain", "its tree", "chain / its chain", "tree / its tree"]
    return markdown([*head, "lowest session, chains"], lines)
