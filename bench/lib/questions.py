"""Questions of a benchmark: Spec-Bench's format, one JSON object with "category" and "turns" a line.

Spec-Bench (Xia et al., 2024) has six groups of 80; the first has ten questions of each of MT-Bench's eight categories.
"""

from __future__ import annotations

import hashlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/refs/heads/main/data/spec_bench/question.jsonl"
MIXED = "mixed"
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


class QuestionError(ValueError):
    """A question file that cannot be used. The message is one line: the file, the line, the remedy."""


@dataclass(frozen=True)
class Question:
    """One question. Only its first turn is asked: the second one depends on the answer."""

    name: str
    group: str
    text: str


def load(path: Path) -> list[Question]:
    """Questions in the order of the file. Raises QuestionError: the file is missing, empty, or in another format; the
    first wrong line is named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionError(f"questions {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            category, text = row["category"], row["turns"][0]
            if not (isinstance(category, str) and isinstance(text, str) and text.strip()):
                raise TypeError
        except (ValueError, KeyError, TypeError, IndexError):
            raise QuestionError(
                f"questions {path} line {number}: not Spec-Bench's format, "
                'which is {"question_id": 1, "category": "qa", "turns": ["..."]} on every line'
            ) from None
        group = "mt_bench" if category in MT_BENCH else category
        questions.append(Question(f"{path.stem}:{row.get('question_id', number)}", group, text))
    if not questions:
        raise QuestionError(f"questions {path}: no questions in it")
    return questions


def download(folder: Path) -> Path:
    """Spec-Bench's own file, kept in `folder`. Raises QuestionError: it is not there yet and cannot be had."""
    path = folder / "spec_bench.jsonl"
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(SPEC_BENCH, timeout=60) as answer:
            content = answer.read()
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise QuestionError(f"questions spec-bench: cannot be downloaded ({reason}); give a file instead") from None
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def digest(questions: Sequence[Question]) -> str:
    """A fingerprint that differs between two sets of questions."""
    return hashlib.sha256("\0".join(f"{q.name}\0{q.group}\0{q.text}" for q in questions).encode()).hexdigest()[:16]


def groups(questions: Iterable[Question]) -> dict[str, list[Question]]:
    by_group: dict[str, list[Question]] = {}
    for question in questions:
        by_group.setdefault(question.group, []).append(question)
    return by_group


def blocks(
    questions: Sequence[Question], concurrency: int, rounds: int = 1, limit: int | None = None, least_rounds: int = 0
) -> list[tuple[Question, ...]]:
    """Blocks of about `concurrency * rounds` questions of one group each, as equal as can be, the groups taking turns.

    Groups that cannot keep so many requests running for two rounds are put together as `MIXED`, in which their
    questions take turns, with the smallest of the others where they are too few by themselves.

    Args:
        rounds: questions for each request at a time. limit: questions of each group at most.
        least_rounds: but so many for each request at a time.

    Raises QuestionError: there are not as many questions as requests at a time.
    """
    most = None if limit is None else max(limit, least_rounds * concurrency)
    size, limited = concurrency * rounds, {name: members[:most] for name, members in groups(questions).items()}
    enough = 2 * concurrency if concurrency > 1 else 1
    small = [name for name, members in limited.items() if len(members) < enough]
    others = sorted(limited.keys() - small, key=lambda name: (len(limited[name]), name))
    while small and others and sum(len(limited[name]) for name in small) < concurrency:
        small.append(others.pop(0))
    if len(small) > 1:
        turns = zip_longest(*(limited.pop(name) for name in small))
        limited[MIXED] = [replace(q, group=MIXED) for turn in turns for q in turn if q is not None]
    if (fewest := min(map(len, limited.values()), default=concurrency)) < concurrency:
        raise QuestionError(
            f"{concurrency} requests at a time, but {fewest} questions: more questions, or a lower --concurrency"
        )
    cut = []
    for members in limited.values():
        number = max(1, min(int(len(members) / size + 0.5), len(members) // concurrency))
        ends = [math.ceil(len(members) * i / number) for i in range(number + 1)]
        cut.append([tuple(members[i:j]) for i, j in pairwise(ends)])
    longest = max(map(len, cut), default=0)
    return [parts[i] for i in range(longest) for parts in cut if i < len(parts)]
