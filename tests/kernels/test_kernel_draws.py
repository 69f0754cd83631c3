"""The random draws: the published generator, keyed by request, position and node."""

from __future__ import annotations

import pytest
import torch
from freedraft_kernels import draws
from freedraft_kernels.draws import DRAW_BITS, philox, scale
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats


@pytest.mark.parametrize(
    "counter, key, output",
    [  # Random123's known answers for philox4x32-10
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox(counter: list[int], key: list[int], output: list[int]) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(w) for w in words] == output


@given(st.integers(0, 2**DRAW_BITS - 1), st.integers(0, 2**47 - 1))
def test_scale_is_exact(draw: int, total: int) -> None:
    assert int(scale(torch.tensor(draw), torch.tensor(total))) == (draw * total) >> DRAW_BITS


def test_uniform_and_independent() -> None:
    many = draws(torch.arange(2000) * 2**33, torch.full((2000,), 17), 8).double() / 2**DRAW_BITS
    assert many.min() >= 0 and many.max() < 1
    assert stats.kstest(many.flatten().numpy(), "uniform").pvalue > 1e-3
    correlation = torch.corrcoef(many.T) - torch.eye(8)
    assert correlation.abs().max() < 0.1


def test_every_part_of_the_key_counts() -> None:
    seeds = torch.tensor([1, 1 + 2**32, -1, 1, 1])
    positions = torch.tensor([5, 5, 5, 6, 2**31 + 5])
    values = draws(seeds, positions, 6).flatten().tolist()
    assert len(set(values)) == len(values)


def test_a_function_of_its_request_only() -> None:
    seeds, positions = torch.tensor([3, 4, 5]), torch.tensor([10, 20, 30], dtype=torch.int32)
    whole = draws(seeds, positions, 4)
    assert torch.equal(draws(seeds[2:], positions[2:].long(), 2), whole[2:, :2])
