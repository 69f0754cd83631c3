"""Questions of a benchmark: from files in Spec-Bench's format, one JSON object with "category" and "turns" per line;
built from Python's standard library, identical with the same Python; and turns of recorded sessions.

    python -m bench.lib.questions spec-bench long agent quotes --concurrency 1 256

needs nothing but Python, and prints why bench/serve.py cannot use these questions, if so.
"""

import argparse
import ast
import hashlib
import json
import math
import random
import re
import sys
import sysconfig
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from bench.lib import jsonl

SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/refs/heads/main/data/spec_bench/question.jsonl"
# The first of Spec-Bench's six groups (Xia et al., 2024) has ten questions of each of MT-Bench's eight categories.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
FORM = 'Spec-Bench\'s format, which is {"question_id": 1, "category": "qa", "turns": ["..."]} on every line'
LENGTHS, OF_EACH_LENGTH = (16_000, 32_000, 64_000, 100_000), 8  # characters of long documents, 3 or 4 to a token
AGENT_TURNS = 64
QUOTES, OF_A_TEXT = 32, 4_000  # maximum number of passages; characters of text for each
TURNS, OF_A_PROMPT = 4, 17_000  # per session, evenly spaced; characters of each, up to 6,000 tokens
# Folders of the library that some distributions omit, or fill with packages.
NOT_EVERYWHERE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "tkinter"}


class QuestionError(ValueError):
    """Questions that cannot be obtained or used. The message is one line."""


@dataclass(frozen=True)
class Question:
    """A question, and the messages before it as (role, content)."""

    name: str
    group: str
    text: str
    before: tuple[tuple[str, str], ...] = ()

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in (*self.before, ("user", self.text))]


def load(path: Path) -> list[Question]:
    """Return first turns, in file order. Raises jsonl.FileError: the file is missing, empty, or in another format."""

    def parse(number: int, row: Any) -> Question:
        category, text = row["category"], row["turns"][0]
        if not (isinstance(category, str) and isinstance(text, str) and text.strip()):
            raise TypeError("no text")
        group = "mt_bench" if category in MT_BENCH else category
        return Question(f"{path.stem}:{row.get('question_id', number)}", group, text)

    return jsonl.read(path, FORM, parse)


def spec_bench() -> list[Question]:
    """Return the questions of Spec-Bench's own file, downloaded once. Raises QuestionError: the download failed."""
    path = Path("build/questions/spec_bench.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not path.is_file():
            with urllib.request.urlopen(SPEC_BENCH, timeout=60) as answer:
                path.write_bytes(answer.read())
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise QuestionError(f"questions spec-bench: cannot be downloaded ({reason}); give a file instead") from None
    return load(path)


def digest(questions: Sequence[Question]) -> str:
    """Return a fingerprint of the questions."""
    return hashlib.sha256("\0".join(f"{q.name}\0{q.group}\0{q.chat}" for q in questions).encode()).hexdigest()[:16]


def groups(questions: Iterable[Question]) -> dict[str, list[Question]]:
    by_group: dict[str, list[Question]] = {}
    for question in questions:
        by_group.setdefault(question.group, []).append(question)
    return by_group


def blocks(
    questions: Sequence[Question], concurrency: int, rounds: int = 8, limit: int | None = None
) -> list[tuple[Question, ...]]:
    """Split questions into blocks of about `concurrency * rounds`, as equal as possible, in a fixed order that mixes
    groups evenly and keeps the order of each group. limit: maximum per group, but at least one block in all.

    Raises QuestionError: there are fewer than two questions per concurrent request."""
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


def read(name: str) -> list[Question]:
    """Return the questions of a name or file. Raises QuestionError, jsonl.FileError: they cannot be had or used."""
    if name.startswith("sessions:"):
        return session_turns(Path(name.removeprefix("sessions:")))
    made = {"long": long_documents, "agent": agent_turns, "quotes": quotes, "spec-bench": spec_bench}
    return made[name]() if name in made else load(Path(name))


def long_documents() -> list[Question]:
    """Return questions about modules of 16,000 to 100,000 characters that are answered mostly by quoting."""
    # Data tables have nothing to list, and twice the tokens per character.
    made = list[Question]()
    sources = [(name, text) for name, text in modules() if text.count("def ") >= 10]
    ask = (
        "List every public class and function of this module in the order of the source: its signature exactly as it "
        "stands there, and the first line of its docstring."
    )
    for length in LENGTHS:
        fitting = [(name, text) for name, text in sources if 0.7 * length <= len(text) <= length]
        for name, text in fitting[:OF_EACH_LENGTH]:
            made.append(Question(f"long:{name}:{length}", "long", f"# {name}.py\n\n{text}\n\n{ask}"))
    return made


def agent_turns() -> list[Question]:
    """Return turns of a coding agent that has read a file and rewrites it with a function renamed."""
    made = list[Question]()
    for name, text in modules():
        if len(made) < AGENT_TURNS and 2_000 <= len(text) <= 10_000 and (function := renamed(text)) is not None:
            calls = [{"tool": "list_files", "path": "lib"}, {"tool": "read_file", "path": f"lib/{name}.py"}]
            ask = (
                "You are a coding agent. Answer with one tool call as JSON and nothing else. Tools: "
                "list_files(path), read_file(path), write_file(path, content), done().\n\n"
                f"Task: in lib/{name}.py rename the function {function} to {function}_checked, everywhere.\n"
                f"Call: {json.dumps(calls[0])}\nResult: lib/{name}.py\n"
                f"Call: {json.dumps(calls[1])}\nResult:\n{text}\nCall:"
            )
            made.append(Question(f"agent:{name}", "agent", ask))
    return made


def quotes() -> list[Question]:
    """Return questions that ask for a passage of 300 to 1,000 characters from a text of Python's manual."""
    made, text = [], "\n".join(topics[name] for name in sorted(topics))
    for start in range(0, len(text), len(text) // QUOTES)[:QUOTES]:
        part = text[start : start + OF_A_TEXT]
        passages = [p for p in part.split("\n\n")[1:-1] if 300 <= len(p.strip()) <= 1_000]
        if not passages:
            continue
        begin = " ".join(passages[len(passages) // 2].split()[:6])
        ask = f'Quote the passage of this text that begins with "{begin}", word for word, and nothing else.'
        made.append(Question(f"quotes:{start}", "quotes", f"{part}\n\n{ask}"))
    return made


def session_turns(path: Path) -> list[Question]:
    """Return the turns of an agent's model in recorded sessions, with all messages before; the group is the file's
    name. Messages longer than a prompt may be are dropped; tool results become the user's, since some templates lack
    tools."""

    def parse(number: int, row: Any) -> list[Question]:
        said = [(str(m["role"]).replace("tool", "user"), str(m["content"])) for m in row["messages"]]
        said = [message for message in said if len(message[1]) <= OF_A_PROMPT]
        asked = [i for i in range(1, len(said)) if (said[i - 1][0], said[i][0]) == ("user", "assistant")]
        fitting = [said[:i] for i in asked if sum(len(text) for _, text in said[:i]) <= OF_A_PROMPT]
        return [
            Question(f"{path.stem}:{row['session']}:{len(turn)}", path.stem, turn[-1][1], tuple(turn[:-1]))
            for turn in fitting[:: -(-len(fitting) // TURNS) or 1]
        ]

    form = 'an object with "session" and "messages" of "role" and "content"'
    made = [question for of_session in jsonl.read(path, form, parse) for question in of_session]
    if not made:
        raise QuestionError(f"sessions {path}: no turn of at most {OF_A_PROMPT} characters")
    return made


def modules() -> Iterator[tuple[str, str]]:
    """Yield names and sources of the modules of Python's library, including its packages, in alphabetical order."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if NOT_EVERYWHERE.isdisjoint(place.parts):
            yield place.with_suffix("").as_posix(), path.read_text(encoding="utf-8")


def renamed(text: str) -> str | None:
    """Return the first function of a module that the module uses itself; None if there is none."""
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return next((name for name in names if len(re.findall(rf"\b{name}\b", text)) > 2), None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Whether bench/serve.py can ask these questions.")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", required=True)
    args = parser.parse_args()
    try:
        blocks([question for name in args.names for question in read(name)], max(args.concurrency))
    except (QuestionError, jsonl.FileError) as error:
        sys.exit(str(error))
