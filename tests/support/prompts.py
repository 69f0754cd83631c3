"""Prompts for real and for tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

TEXT = (
    "The harbour master wrote in his log that three ships had arrived before noon: the Alder with timber, the Brook "
    "with salt and the Cedar with wool. The Alder left again the same evening, the Brook stayed for two days, and the "
    "Cedar waited for a new mast until the end of the week."
)
CODE = '''class Stack:
    """A last-in, first-out container."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
'''
# For a chat template.
CHAT = [
    f"Repeat this text word for word:\n{TEXT}",
    f"Rewrite this text with 'ships' replaced by 'boats':\n{TEXT}",
    f"Add a method `size` to this class and print the whole class:\n{CODE}",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python class for a queue with push, pop and peek.",
    "What is the capital of France, and what is it known for?",
    "Give me five tips for learning a new language.",
    "Explain to a child why the sky is blue.",
    "Tell me a story about a fox who wanted to fly.",
    "Write the first lines of a story set in a lighthouse.",
    "List the numbers from one to thirty, separated by commas.",
    "Translate 'good morning, my friend' into Spanish, French and German.",
]
# To be continued.
RAW = [TEXT + " " + TEXT[:120], CODE + "\n\nclass Queue:\n", "1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2,"]
ECHO = "one two three four five six seven eight nine ten " * 6
SHORT = [
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "Repeat after me: the quick brown fox. The quick brown fox. The quick",
    "1, 2, 3, 4, 5, 6,",
    "Water is made of",
    "Once upon a time",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "import os\nimport sys\nimport",
    "A list of fruits: apple, banana,",
    "Dear Sir or Madam,",
    "To be or not to be, that is",
]
_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu"]
# For a random model with a real tokenizer: each says the same four words three times.
REPETITIVE = [f"{word}: " + " ".join(_WORDS[i : i + 4] * 3) for i, word in enumerate(_WORDS[:12])]


def chat_and_raw_ids(model: Path) -> list[list[int]]:
    """Token ids of CHAT in the model's chat template, then of RAW."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in CHAT
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in [*chats, *RAW]]


def random_ids(lengths: Sequence[int], vocab_size: int, *, first: int = 3, seed: int = 5) -> list[list[int]]:
    """Random token ids from `first` on, which leaves out the special ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(first, vocab_size, length).tolist() for length in lengths]
