"""Questions about Python's own library: long documents, turns of an agent.

They are the same on every machine with the same Python.

    python -m bench.lib.made_questions spec-bench long agent --concurrency 1 256

needs nothing but Python, and prints what keeps bench/serve.py from asking these: files and numbers of questions.
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

from bench.lib.questions import Question, QuestionError, blocks, download, load

LENGTHS = (16_000, 32_000, 64_000, 100_000)
"""Characters of the long documents, of which three or four make a token."""
OF_EACH_LENGTH = 8
AGENT_TURNS = 64
"""Two rounds of 32 requests at a time."""
NOT_EVERYWHERE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "tkinter"}
"""Folders of the library that some distributions leave out, or fill with packages."""


def read(name: str) -> list[Question]:
    """The questions of one of the names that are made here, of Spec-Bench, which is downloaded, or of a file. Raises
    QuestionError: a file that cannot be had or used."""
    match name:
        case "long":
            return long_documents()
        case "agent":
            return agent_turns()
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


def problems(names: list[str], concurrency: list[int], limit: int | None, least_rounds: int) -> list[str]:
    """A line for each file that cannot be used, and for more requests at a time than there are questions."""
    asked, said = [], []
    for name in names:
        try:
            asked += read(name)
        except QuestionError as error:
            said.append(str(error))
    try:
        if not said:
            blocks(asked, max(concurrency), 1, limit, least_rounds)
    except QuestionError as error:
        said.append(str(error))
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether bench/serve.py can ask these questions.")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--least-rounds", type=int, default=0)
    args = parser.parse_args()
    said = problems(args.names, args.concurrency, args.limit, args.least_rounds)
    print("\n".join(said), end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
