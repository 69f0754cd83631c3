"""`top_tokens` against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from freedraft_kernels import top_tokens
from hypothesis import given, settings
from hypothesis import strategies as st


def random_logits(rows: int, vocab: int, values: int, seed: int) -> torch.Tensor:
    """Of few different values, so that many are equal, with zeros of either sign and infinities among them."""
    rng = np.random.default_rng(seed)
    special = rng.choice([0.0, -0.0, -np.inf, -1e-45, 1e-45], (rows, vocab))
    logits = np.where(rng.random((rows, vocab)) < 0.2, special, rng.integers(-values, values, (rows, vocab)) / 3)
    return torch.tensor(logits, dtype=torch.float32)


def by_sorting(row: list[float], count: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    return [token if np.isfinite(row[token]) else -1 for token in order[:count]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(8, 700), st.integers(1, 1000), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_is_what_sorting_gives(rows: int, vocab: int, values: int, count: int, seed: int) -> None:
    logits = random_logits(rows, vocab, values, seed)
    tokens, log_probs = top_tokens(logits, count, backend="reference")
    assert tokens.tolist() == [by_sorting(row, count) for row in logits.tolist()]
    expected = torch.log_softmax(logits.double(), -1)
    for r in range(rows):
        for k, token in enumerate(tokens[r].tolist()):
            if token < 0:
                assert log_probs[r, k] == -torch.inf
            else:
                assert abs(log_probs[r, k] - expected[r, token]) < 1e-4


def test_a_row_without_finite_logits_has_none() -> None:
    logits = torch.tensor([[1.0] * 69 + [float("nan")], [float("-inf")] * 70, [float("-inf")] * 69 + [1.0]])
    tokens, log_probs = top_tokens(logits, 2)
    assert tokens.tolist() == [[-1, -1], [-1, -1], [69, -1]]
    assert log_probs[2].tolist() == [0.0, -torch.inf] and not torch.isfinite(log_probs[:2]).any()


def test_logits_of_half_precision() -> None:
    logits = random_logits(3, 500, 50, 1).to(torch.bfloat16)
    assert top_tokens(logits, 5)[0].tolist() == [by_sorting(row, 5) for row in logits.tolist()]


@pytest.mark.parametrize("shape, count", [((3,), 1), ((2, 4), 5), ((2, 4), 0)])
def test_wrong_shapes(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(ValueError, match="logits has shape"):
        top_tokens(torch.zeros(shape), count)
