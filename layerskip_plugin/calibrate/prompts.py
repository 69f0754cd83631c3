"""Calibration text: prompts from JSONL files, with the model's own answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerskip_plugin.calibrate.host_model import HostModel

PROMPT_KEYS = ("prompt", "question", "turns", "text")
MAX_PROMPT_TOKENS = 384


@dataclass(frozen=True)
class Prompts:
    """Prompts of one file."""

    texts: list[str]
    name: str  # of the file, without its folder and ending
    sha256: str  # of the file, 16 digits

    @classmethod
    def load(cls, path: Path) -> Prompts:
        """Read JSONL with "prompt", "question", "turns" (the first one counts) or "text" in each line; ValueError, with
        the line, for a missing or malformed file."""
        if not path.is_file():
            raise ValueError(f"data: {path} does not exist")
        raw = path.read_bytes()
        texts = []
        for number, line in enumerate(raw.decode().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                value = next(row[key] for key in PROMPT_KEYS if key in row)
            except (ValueError, TypeError, StopIteration):
                keys = ", ".join(f'"{key}"' for key in PROMPT_KEYS)
                raise ValueError(f"data: {path} line {number} is no JSON object with one of {keys}") from None
            texts.append(str(value[0] if isinstance(value, list) and value else value))
        return cls(texts, path.stem, hashlib.sha256(raw).hexdigest()[:16])


@dataclass(frozen=True)
class Answered:
    """A prompt with the model's greedy answer: the first `prompt` of `tokens` are the prompt."""

    tokens: list[int]
    prompt: int


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, text: str, max_tokens: int = MAX_PROMPT_TOKENS) -> list[int]:
    """The tokens of a prompt as a chat server would send them, the last `max_tokens` of them."""
    templated = bool(getattr(tokenizer, "chat_template", None))
    if templated:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=not templated)["input_ids"])[-max_tokens:]


def answer(
    model: HostModel,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    batch: int = 8,
    progress: Callable[[int], object] = lambda count: None,
) -> list[Answered]:
    """Each prompt with the model's greedy answer; `progress` is called with the number of prompts just answered."""
    encoded = [encode(tokenizer, text, max_prompt_tokens) for text in prompts]
    answers: list[Answered] = []
    for start in range(0, len(encoded), batch):
        group = encoded[start : start + batch]
        new = model.generate(group, max_new_tokens)
        answers += [Answered(prompt + more, len(prompt)) for prompt, more in zip(group, new, strict=True)]
        progress(len(group))
    return answers
