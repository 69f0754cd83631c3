"""Calibration text: prompts from JSONL files, with the model's own answers."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PROMPT_KEYS = ("prompt", "question", "turns", "text")
MAX_PROMPT_TOKENS = 384


@dataclass(frozen=True)
class Prompts:
    texts: list[str]
    name: str  # of the file, without its folder and ending
    sha256: str  # of the file, 16 digits

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read JSONL with one of `PROMPT_KEYS` in each line, of "turns" the first; raises ValueError with the line."""
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
                raise ValueError(f"data: {path} line {number} is not a JSON object with one of {keys}") from None
            texts.append(str(value[0] if isinstance(value, list) and value else value))
        return cls(texts, path.stem, hashlib.sha256(raw).hexdigest()[:16])


@dataclass(frozen=True)
class Answered:
    """A prompt with the model's greedy answer: the first `prompt` of `tokens` are the prompt."""

    tokens: list[int]
    prompt: int


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a prompt as a chat server would send them, the last `MAX_PROMPT_TOKENS` of them."""
    templated = bool(getattr(tokenizer, "chat_template", None))
    if templated:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=not templated)["input_ids"])[-MAX_PROMPT_TOKENS:]
