"""What `RequestIndex` holds of a context. What is found in it: `test_drafter_equals_oracle.py`."""

from __future__ import annotations

import numpy as np
import pytest

from sssd_plugin.request_index import RequestIndex, find, request_at
from tests.support.stores import int32


def append(index: RequestIndex, name: str, tokens: list[int]) -> None:
    """Append to a request; an unknown one starts."""
    if name in index:
        contexts = int32([len(index.tokens(name)) + len(tokens)])
        stale = index.update(index.slot_ids([name]), int32(tokens), np.array([0]), np.array([len(tokens)]), contexts)
        assert stale == []
    else:
        index.replace(name, int32(tokens))


def test_a_count_does_not_wrap() -> None:
    index = RequestIndex()
    append(index, "r", [5] * 66_000 + [6, 5])
    request = request_at(index.slots, index.slot_ids(["r"])[0])
    assert [int(request.counts[find(request, token)]) for token in (5, 6)] == [65_535, 1]


@pytest.mark.parametrize("n", [8_192, 32_768])
@pytest.mark.parametrize("piece", [1, 100_000], ids=["token by token", "at once"])
def test_fourteen_bytes_a_token(n: int, piece: int) -> None:
    """A long context costs at most 14 bytes a token, tables and spare room included.

    Zipf and Mandelbrot's law, with as many distinct tokens as recorded chats have: a fifth of 8k, a seventh of 32k.
    """
    rng = np.random.default_rng(0)
    ranks = np.arange(1, 50_001)
    shares = 1 / (ranks + 2.7) ** 1.3
    text = rng.choice(50_000, n, p=shares / shares.sum()).tolist()
    index = RequestIndex()
    for start in range(0, n, piece):
        append(index, "r", text[start : start + piece])
    assert len(index.tokens("r")) == n
    assert 12 * n < index.nbytes() <= 14 * n
