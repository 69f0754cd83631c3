"""Questions of a benchmark: Spec-Bench's format, one JSON object with "category" and "turns" a line.

Spec-Bench (Xia et al., 2024) has six groups of 80; the first has ten questions of each of MT-Bench's eight categories.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/refs/heads/main/data/spec_bench/question.jsonl"
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


class QuestionError(ValueError):
    """A question file that cannot be used. The message is one line: the file, the line, the remedy."""


@dataclass(frozen=True)
class Question:
    """One question, and the messages before it as (role, content). Of Spec-Bench's only the first turn is asked: the
    second one depends on the answer."""

    name: str
    group: str
    text: str
    before: tuple[tuple[str, str], ...] = ()

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in (*self.before, ("user", self.text))]


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
    return hashlib.sha256("\0".join(f"{q.name}\0{q.group}\0{q.chat}" for q in questions).encode()).hexdigest()[:16]


def groups(questions: Iterable[Question]) -> dict[str, list[Question]]:
    by_group: dict[str, list[Question]] = {}
    for question in questions:
        by_group.setdefault(question.group, []).append(question)
    return by_group


def blocks(
    questions: Sequence[Question], concurrency: int, rounds: int = 8, limit: int | None = None
) -> list[tuple[Question, ...]]:
    """Blocks of about `concurrency * rounds` questions of all groups, as equal as can be, in a fixed order that mixes
    the groups evenly and keeps that of each group.

    Args:
        rounds: questions for each request at a time. limit: questions of each group at most, but a block in all.

    Raises QuestionError: there are less than two questions for each request at a time.
    """
    by_group, size, jitter = groups(questions), concurrency * rounds, random.Random(0)
    most = None if limit is None else max(limit, math.ceil(size / len(by_group)))
    limited = [members[:most] for members in by_group.values()]
    places = [((i + jitter.random()) / len(members), q) for members in limited for i, q in enumerate(members)]
    mixed = [question for _, question in sorted(places, key=lambda place: place[0])]
    if len(mixed) < 2 * concurrency:
        raise QuestionError(
            f"{concurrency} requests at a time, but {len(mixed)} questions: more questions, or a lower --concurrency"
        )
    number = max(1, int(len(mixed) / size + 0.5))
    ends = [math.ceil(len(mixed) * i / number) for i in range(number + 1)]
    return [tuple(mixed[i:j]) for i, j in pairwise(ends)]
