"""Prompts for real and for tiny models."""

from collections.abc import Sequence

import numpy as np

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


def random_ids(lengths: Sequence[int], vocab_size: int, *, first: int = 3, seed: int = 5) -> list[list[int]]:
    """Random token ids from `first` on, which leaves out the special ones."""
    rng = np.random.default_rng(seed)
    return [rng.integers(first, vocab_size, length).tolist() for length in lengths]
