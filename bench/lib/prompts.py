"""Prompts of the demo: four kinds of work, three prompts each, written for it, in prompts.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A model of 135 M parameters follows simple instructions only; in each of these it does what is asked, more or less.
PROMPTS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BY_KIND = [prompt for prompts in PROMPTS.values() for prompt in prompts]

WARM_UP = "Write one sentence about the sea, then write the same sentence again."


def chats(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text as a chat of one turn in the model's template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    turns = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]
