"""Questions that we make, of Python's own library and documentation: quotes, long documents, turns of an agent.

They are the same on every machine with the same Python.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from bench.lib.questions import Question

LENGTHS = (16_000, 32_000, 64_000, 100_000)
"""Characters of the long documents, of which three or four make a token."""
AGENT_TURNS = 24


def quotes(model: Path) -> list[Question]:
    """Questions that are answered by quoting 400 tokens of a prompt of 4,000 to 7,500, of Python's own documentation.

    Small models cannot quote from so far, so a grammar makes them (structured output).

    Args:
        model: folder of the model, for its tokenizer.
    """
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(model / "tokenizer.json"))
    source = encoder.encode("\n".join(topics[name] for name in sorted(topics)), add_special_tokens=False).ids
    made = []
    for i, length in enumerate(range(4000, 7501, 700)):
        part = source[9_000 * i : 9_000 * i + length]
        text, answer = encoder.decode(part), encoder.decode(part[length // 5 : length // 5 + 400])
        answer = answer[answer.index("\n") + 1 :]
        ask = "Repeat the text above word for word, beginning with this line:\n" + answer.partition("\n")[0]
        made.append(Question(f"quotes:{length}", "quotes", f"{text}\n\n{ask}", answer))
    return made


def long_documents() -> list[Question]:
    """Questions about modules of 16,000 to 100,000 characters, answered by much that stands in them."""
    made, sources = [], list(modules())
    for length in LENGTHS:
        fitting = [(name, text) for name, text in sources if 0.7 * length <= len(text) <= length][:6]
        for name, text in fitting:
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
        if 2_000 <= len(text) <= 6_000 and (function := renamed(text)) is not None:
            calls = [{"tool": "list_files", "path": "lib"}, {"tool": "read_file", "path": f"lib/{name}.py"}]
            made.append(
                Question(
                    f"agent:{name}",
                    "agent",
                    "You are a coding agent. Answer with one tool call as JSON and nothing else. Tools: "
                    "list_files(path), read_file(path), write_file(path, content), done().\n\n"
                    f"Task: in lib/{name}.py rename the function {function} to {function}_checked, everywhere.\n"
                    f"Call: {json.dumps(calls[0])}\nResult: lib/{name}.py\n"
                    f"Call: {json.dumps(calls[1])}\nResult:\n{text}\nCall:",
                )
            )
        if len(made) == AGENT_TURNS:
            break
    return made


def modules() -> Iterator[tuple[str, str]]:
    """Names and sources of the modules of Python's library, in alphabetical order."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.stem, path.read_text(encoding="utf-8")


def renamed(text: str) -> str | None:
    """The first function of a module that it uses itself; None where there is none."""
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return next((name for name in names if len(re.findall(rf"\b{name}\b", text)) > 2), None)
