"""Answers over long prompts: built from recorded ones for training, which traces of short chats lack, and from Python's
library for replay."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.trace import Row

Tokens = NDArray[np.int32]

EDITS = ("replace", "insert", "delete", "mixed")
COPIED = 600
COPY_KINDS = {"copy": ("replace", 0.0, 0), "copy under way": ("replace", 0.0, 8), "replace": ("replace", 0.05, 0)}
COPY_KINDS |= {"insert": ("insert", 0.05, 0), "delete": ("delete", 0.05, 0)}
"""Of `copies`: kind of edit, share of edited tokens, number of the answer's tokens that already end the prompt."""


def edit(tokens: Tokens, kind: str, share: float, others: Tokens, rng: np.random.Generator) -> Tokens:
    """Copy `tokens` with about `share` of them edited, with tokens drawn from `others`. kind: "replace", "insert" or
    "delete" one token per edit, or "mixed": any of these, of one to three tokens."""
    pieces: list[Tokens] = []
    at = 0
    while at < len(tokens):
        until = min(len(tokens), at + int(rng.geometric(share)) - 1) if share > 0 else len(tokens)
        pieces.append(tokens[at:until])
        at = until
        if at == len(tokens):
            break
        how = EDITS[rng.integers(3)] if kind == "mixed" else kind
        size = int(rng.integers(1, 4)) if kind == "mixed" else 1
        if how != "delete":
            pieces.append(rng.choice(others, size))
        if how != "insert":
            at += size
    return np.concatenate(pieces).astype(np.int32) if pieces else tokens[:0]


def extract(tokens: Tokens, glue: Tokens, length: int, rng: np.random.Generator) -> Tokens:
    """Quote passages of `tokens` in random order, with a few tokens of `glue` between them."""
    pieces: list[Tokens] = []
    while sum(map(len, pieces)) < length:
        start = int(rng.integers(len(tokens)))
        pieces.append(tokens[start : start + int(rng.integers(10, 80))])
        start = int(rng.integers(max(1, len(glue) - 40)))
        pieces.append(glue[start : start + int(rng.integers(3, 40))])
    return np.concatenate(pieces)[:length]


def long_rows(
    rows: Sequence[Row], number: int, *, max_prompt: int = 16_384, output: int = 300, seed: int = 0
) -> list[Row]:
    """Build `number` (prompt, output) rows with prompts of 512 tokens or more, joined from several recorded rows. A
    fifth of the answers copies a part of the prompt, two fifths edit one, a fifth quotes several, and the last fifth is
    a recorded answer with its own prompt last, since long contexts are not always copied."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(number):
        target = int(np.exp(rng.uniform(np.log(512), np.log(max_prompt))))
        answered = int(rng.integers(len(rows)))
        texts: list[Tokens] = []
        while sum(map(len, texts)) < target:
            other = int(rng.integers(len(rows)))
            if other != answered or len(rows) == 1:
                texts += rows[other]
        prompt = np.concatenate(texts)[:target]
        start = int(rng.integers(max(1, target - output)))
        part, glue = prompt[start : start + output], rows[answered][1]
        match i % 5:
            case 0:
                answer = part
            case 1 | 2:
                answer = edit(part, EDITS[rng.integers(4)], float(rng.uniform(0.01, 0.12)), prompt, rng)
            case 3:
                answer = extract(prompt, glue, output, rng)
            case _:
                prompt, answer = np.concatenate([prompt, rows[answered][0]]), glue[:output]
        made.append((prompt.astype(np.int32), answer.astype(np.int32)))
    return [(prompt, answer) for prompt, answer in made if len(answer)]


def python_sources(encoder: Any, number: int) -> Tokens:
    """Return the first `number` tokens of Python's library, modules in alphabetical order. Raises ValueError: the
    library is shorter."""
    parts: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(parts) < number:
            parts += encoder.encode(path.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False).ids
    if len(parts) < number:
        raise ValueError(f"this Python's library has {len(parts)} tokens, not {number}")
    return np.array(parts[:number], np.int32)


def copies(text: Tokens, length: int, kind: str, number: int) -> list[Row]:
    """Build (prompt, answer) rows: `length` tokens of the text, from different positions, then 600 of these, edited."""
    how, share, begun = COPY_KINDS[kind]
    made: list[Row] = []
    for i in range(number):
        start = (len(text) - length) * i // max(1, number - 1)
        prompt = text[start : start + length]
        part = prompt[length // 5 : length // 5 + COPIED]
        prompt, part = np.concatenate([prompt, part[:begun]]), part[begun:]
        made.append((prompt, edit(part, how, share, prompt, np.random.default_rng(i))))
    return made


def edited_files(number: int, seed: int = 0) -> list[tuple[str, str]]:
    """Files of Python's library of 100 to 300 lines, each with what it is once one to five of its lines are changed:
    replaced by a line of another file, deleted, or followed by one."""
    rng, found = np.random.default_rng(seed), []
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text("utf-8", "ignore").splitlines(keepends=True) for path in paths]
    texts = [lines for lines in texts if 100 <= len(lines) <= 300]
    for i in rng.permutation(len(texts))[:number].tolist():
        lines, others = [*texts[i]], texts[i - 1]
        for at in sorted(rng.choice(len(lines), rng.integers(1, 6), replace=False).tolist(), reverse=True):
            new = [] if (how := EDITS[rng.integers(3)]) == "delete" else [others[rng.integers(len(others))]]
            lines[at : at + (how != "insert")] = new
        found.append(("".join(texts[i]), "".join(lines)))
    return found
