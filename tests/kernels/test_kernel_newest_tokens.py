"""`newest_tokens` against Python lists, by whichever implementation runs here."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from freedraft_kernels import newest_tokens
from hypothesis import given, settings
from hypothesis import strategies as st


def check(lengths: list[int], slots: list[int], length: int, backend: Literal["triton", "reference"], at: str) -> None:
    texts = [[100 * slot + i for i in range(known)] for slot, known in enumerate(lengths)]
    tokens = torch.full((len(texts), 41), -7, dtype=torch.int32)[:, :40]
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    gained = torch.arange(len(slots), dtype=torch.int32) % (length + 2)
    out = torch.full((len(slots), length + 3), -1, dtype=torch.int32, device=at)
    drafts = torch.full((len(slots), length), -1, device=at)
    where = torch.tensor(slots, dtype=torch.int32, device=at)
    known = torch.tensor(lengths, dtype=torch.int32, device=at)
    newest_tokens(tokens.to(at), known, where, gained.to(at), out, drafts, backend=backend)
    for b, slot in enumerate(slots):
        padded = [texts[slot][0]] * (length + 1) + texts[slot]
        assert out[b].tolist() == [int(gained[b]), lengths[slot], *padded[-length - 1 :]]
        assert drafts[b].tolist() == [texts[slot][-1]] * length


cases = st.lists(st.integers(1, 40), min_size=1, max_size=6).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.permutations(range(len(lengths))), st.integers(1, 17))
)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_is_what_lists_give(case: tuple[list[int], list[int], int]) -> None:
    lengths, slots, length = case
    check(lengths, slots, length, "reference", "cpu")


@pytest.mark.parametrize(
    "name, value",
    [
        ("tokens", torch.zeros(2, 5)),
        ("lengths", torch.zeros(3, dtype=torch.int32)),
        ("slots", torch.zeros(1)),
        ("gained", torch.zeros(2, dtype=torch.int32)),
        ("out", torch.zeros(1, 4, dtype=torch.int32)),
    ],
)
def test_wrong_arguments(name: str, value: torch.Tensor) -> None:
    ints = torch.int32
    good = {"tokens": torch.zeros(2, 5, dtype=ints), "lengths": torch.ones(2, dtype=ints)}
    good |= {"slots": torch.zeros(1, dtype=ints), "gained": torch.zeros(1, dtype=ints)}
    good |= {"out": torch.zeros(1, 5, dtype=ints), "drafts": torch.zeros(1, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=name):
        newest_tokens(**good | {name: value})
