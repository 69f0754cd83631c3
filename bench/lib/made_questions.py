"""Questions about Python's own library: long documents, turns of an agent, quotes; and turns of recorded sessions.

They are the same on every machine with the same Python.

    python -m bench.lib.made_questions spec-bench long agent quotes --concurrency 1 256

needs nothing but Python, and prints what keeps bench/serve.py from asking these.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from bench.lib.questions import Question, QuestionError, blocks, download, load

LENGTHS = (16_000, 32_000, 64_000, 100_000)
"""Characters of the long documents, of which three or four make a token."""
OF_EACH_LENGTH = 8
AGENT_TURNS = 64
"""Two rounds of 32 requests at a time."""
QUOTES, OF_A_TEXT = 32, 4_000  # most passages; characters of the text of each
OF_A_PROMPT = 17_000  # characters of a session's turn at most: up to 6,000 tokens
TURNS = 4  # of a session at most, as far apart as they can be: each begins with the one before
NOT_EVERYWHERE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "tkinter"}
"""Folders of the library that some distributions leave out, or fill with packages."""


def read(name: str) -> list[Question]:
    """The questions of one of the names that are made here, of Spec-Bench, which is downloaded, of recorded sessions
    (`sessions:FILE`), or of a file. Raises QuestionError: a file that cannot be had or used."""
    if name.startswith("sessions:"):
        return session_turns(Path(name.removeprefix("sessions:")))
    match name:
        case "long":
            return long_documents()
        case "agent":
            return agent_turns()
        case "quotes":
            return quotes()
        case "spec-bench":
            return load(download(Path("build/questions")))
    return load(Path(name))


def long_documents() -> list[Question]:
    """Questions about modules of 16,000 to 100,000 characters, answered by much that stands in them."""
    # Tables of data have nothing to list, and twice the tokens.
    made, sources = [], [(name, text) for name, text in modules() if text.count("def ") >= 10]
    for length in LENGTHS:
        fitting = [(name, text) for name, text in sources if 0.7 * length <= len(text) <= length]
        for name, text in fitting[:OF_EACH_LENGTH]:
            ask = (
                "List every public class and function of this module in the order of the source: its signature exactly "
                "as it stands there, and the first line of its docstring."
            )
            made.append(Question(f"long:{name}:{length}", "long", f"# {name}.py\n\n{text}\n\n{ask}"))
    return made


def agent_turns() -> list[Question]:
    """The turn of a coding agent that has read a file, and now writes it with a function renamed."""
    made = []
    for name, text in modules():
        if 2_000 <= len(text) <= 10_000 and (function := renamed(text)) is not None:
            calls = [{"tool": "list_files", "path": "lib"}, {"tool": "read_file", "path": f"lib/{name}.py"}]
            ask = (
                "You are a coding agent. Answer with one tool call as JSON and nothing else. Tools: "
                "list_files(path), read_file(path), write_file(path, content), done().\n\n"
                f"Task: in lib/{name}.py rename the function {function} to {function}_checked, everywhere.\n"
                f"Call: {json.dumps(calls[0])}\nResult: lib/{name}.py\n"
                f"Call: {json.dumps(calls[1])}\nResult:\n{text}\nCall:"
            )
            made.append(Question(f"agent:{name}", "agent", ask))
        if len(made) == AGENT_TURNS:
            break
    return made


def quotes() -> list[Question]:
    """Questions that are answered by quoting a passage of 300 to 1,000 characters from a text of Python's manual."""
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
    """What an agent's model was asked in recorded sessions, with all before it; the group has the file's name. Longer
    messages than a prompt may be are left out, and what tools said is the user's, as not every template knows them."""
    made = []
    try:
        for row in map(json.loads, filter(str.strip, path.read_text(encoding="utf-8").splitlines())):
            said = [(str(m["role"]).replace("tool", "user"), str(m["content"])) for m in row["messages"]]
            said = [message for message in said if len(message[1]) <= OF_A_PROMPT]
            asked = [i for i in range(1, len(said)) if (said[i - 1][0], said[i][0]) == ("user", "assistant")]
            fitting = [said[:i] for i in asked if sum(len(text) for _, text in said[:i]) <= OF_A_PROMPT]
            made += [
                Question(f"{path.stem}:{row['session']}:{len(turn)}", path.stem, turn[-1][1], tuple(turn[:-1]))
                for turn in fitting[:: -(-len(fitting) // TURNS) or 1]
            ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuestionError(f"sessions {path}: not as bench/lib/sessions.py reads them ({error!r})") from None
    if not made:
        raise QuestionError(f"sessions {path}: no turn of at most {OF_A_PROMPT} characters")
    return made


def modules() -> Iterator[tuple[str, str]]:
    """Names and sources of the modules of Python's library, those of its packages too, in alphabetical order."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if NOT_EVERYWHERE.isdisjoint(place.parts):
            yield place.with_suffix("").as_posix(), path.read_text(encoding="utf-8")


def renamed(text: str) -> str | None:
    """The first function of a module that it uses itself; None where there is none."""
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return next((name for name in names if len(re.findall(rf"\b{name}\b", text)) > 2), None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether bench/serve.py can ask these questions.")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", required=True)
    args = parser.parse_args()
    try:
        blocks([question for name in args.names for question in read(name)], max(args.concurrency))
    except QuestionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
