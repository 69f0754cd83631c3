"""The hash chains of `RequestIndex`: against dicts of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.request_index import LENGTH, RequestIndex, find, find_gram, request_at
from tests.support.stores import int32

SEED = 7


def colliding() -> list[int]:
    """Ids that land on the same entries of a table of 64: these fill up and probing wraps around the table's end."""
    index = RequestIndex(1, SEED)
    index.replace("r", int32([]))
    request = request_at(index.slots, index.slot_ids(["r"])[0])
    assert len(request.heads) == 64
    return [t for t in range(4_000) if find(request, t) in (0, 62, 63)][:60]


def append(index: RequestIndex, name: str, tokens: list[int]) -> None:
    """Append to a request; an unknown one starts."""
    if name in index:
        contexts = int32([len(index.tokens(name)) + len(tokens)])
        stale = index.update(index.slot_ids([name]), int32(tokens), np.array([0]), np.array([len(tokens)]), contexts)
        assert stale == []
    else:
        index.replace(name, int32(tokens))


def check(index: RequestIndex, name: str, expected: list[int]) -> None:
    """Tokens, counts and every chain of occurrences, newest first."""
    assert index.tokens(name).tolist() == expected
    slot = index.slot_ids([name])[0]
    request = request_at(index.slots, slot)
    assert index.slots[slot, LENGTH] == len(index.tokens(name)) == len(expected)
    occurrences: dict[int, list[int]] = {}
    grams: dict[tuple[int, ...], list[int]] = {}
    for i, token in enumerate(expected):
        occurrences.setdefault(token, []).insert(0, i)
        if i >= 3:
            grams.setdefault(tuple(expected[i - 3 : i + 1]), []).insert(0, i)
    assert np.count_nonzero(request.heads >= 0) == len(occurrences)
    for token, places in occurrences.items():
        entry = find(request, token)
        assert request.counts[entry] == min(len(places), 65535)
        assert chain(request.heads[entry], request.previous) == places
    found = 0
    for head in request.gram_heads.tolist():
        places = chain(head, request.gram_previous)
        found += len(places)
        assert places == sorted(places, reverse=True)
    assert found == sum(map(len, grams.values()))
    for gram, places in grams.items():
        linked = chain(request.gram_heads[find_gram(request, *gram)], request.gram_previous)
        assert [i for i in linked if tuple(expected[i - 3 : i + 1]) == gram] == places


def chain(at: int, previous: np.ndarray) -> list[int]:
    places = []
    while at >= 0:
        places.append(int(at))
        at = previous[at]
    return places


TOKENS = st.one_of(st.sampled_from(colliding()), st.integers(0, 2**31 - 1), st.integers(0, 3))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(TOKENS, max_size=90)), max_size=8))
@settings(max_examples=80, deadline=None)
def test_chains(steps: list[tuple[str, list[int]]]) -> None:
    index = RequestIndex(1, SEED)
    held: dict[str, list[int]] = {}
    for name, tokens in steps:
        append(index, name, tokens)
        held[name] = held.get(name, []) + tokens
        for other, expected in held.items():
            check(index, other, expected)


def test_a_count_does_not_wrap() -> None:
    index = RequestIndex()
    append(index, "r", [5] * 66_000 + [6, 5])
    check(index, "r", [5] * 66_000 + [6, 5])


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
