"""Prompts: four kinds of work for the demo, three prompts each, in prompts.json; and questions about long texts."""

import json
import sysconfig
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

# A model of 135 M parameters follows only simple instructions, like these.
PROMPTS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BY_KIND = [prompt for prompts in PROMPTS.values() for prompt in prompts]
WARM_UP = "Write one sentence about the sea, then write the same sentence again."
LONG = (
    ("pydoc_data/topics.py", "Which statements of Python does this text describe? Explain the first one."),
    ("doctest.py", "Explain what this module is for and how its parts work together."),
    ("turtle.py", "List the classes of this module and what each is for."),
    ("email/_header_value_parser.py", "Summarise how this code parses a header."),
    ("asyncio/base_events.py", "Which methods does the main class have, and what do they do?"),
    ("_pydecimal.py", "Write a short introduction to this module for a user."),
)
"""Files of Python's standard library, and a question about each."""


def chats(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text as a chat of one turn in the model's template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    turns = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]


def long_chats(model: Path, context: int, count: int = len(LONG)) -> list[list[int]]:
    """Return `count` prompts of `context` token ids: the files of `LONG` in rotation, cut, each before its question."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = []
    for name, question in islice(cycle(LONG), count):
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8", errors="replace")
        chat = [{"role": "user", "content": f"TEXT\n\n{question}"}]
        templated = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        start, end = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in templated.split("TEXT"))
        ids = tokenizer(text[: 12 * context], add_special_tokens=False)["input_ids"]
        prompts.append([*start, *ids[: context - len(start) - len(end)], *end])
    return prompts
