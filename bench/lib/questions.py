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
from dataclasses import dataclass
from pathlib import Path

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/refs/heads/main/data/spec_bench/question.jsonl"
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


class QuestionError(ValueError):
    """A question file that cannot be used. The message is one line: the file, the line, the remedy."""


@dataclass(frozen=True)
class Question:
    """One question. Only its first turn is asked: the second one depends on the answer.

    Attributes:
        answer: what the answer must begin with, by a grammar; None for whatever the model says.
    """

    name: str
    group: str
    text: str
    answer: str | None = None


def load(path: Path) -> list[Question]:
    """Questions in the order of the file.

    Raises:
        QuestionError: the file is missing, empty, or in another format; the first wrong line is named.
    """
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
    """Spec-Bench's own file, kept in `folder`.

    Raises:
        QuestionError: it is not there yet and cannot be had.
    """
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


def blocks(questions: Sequence[Question], size: int, limit: int | None = None) -> list[tuple[Question, ...]]:
    """Blocks of about `size` questions of one group each, as equal as can be, the groups taking turns.

    Args:
        limit: questions of each group at most.
    """
    cut = []
    for members in groups(questions).values():
        members = members[:limit]
        each = math.ceil(len(members) / max(1, int(len(members) / size + 0.5)))
        cut.append([tuple(members[i : i + each]) for i in range(0, len(members), each)])
    longest = max(map(len, cut), default=0)
    return [parts[i] for i in range(longest) for parts in cut if i < len(parts)]
