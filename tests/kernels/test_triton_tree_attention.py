"""Triton's attention of draft trees against plain Python: on a GPU, or in the interpreter, in a process of its own."""

from __future__ import annotations

import pytest
import torch
from freedraft_kernels.tree_attention import scratch_size, split_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from in_triton import DEVICE, GPU, run_in_interpreter, runs_triton, starts_interpreter
from test_kernel_tree_attention import check, queries_of, random_cache, random_case

pytest.importorskip("triton")


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, skipped=1)


@runs_triton
@settings(max_examples=100 if GPU else 25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 16, 64]))
def test_what_tokens_read(seed: int, width: int) -> None:
    case = random_case(seed, width)
    (ours, rest), (reference, others) = (queries_of(case, DEVICE, backend) for backend in ("triton", "reference"))
    for name in ("prefixes", "masks", "trees"):
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name
    assert all(torch.equal(a, b) for a, b in zip(rest, others, strict=True))


@runs_triton
@settings(max_examples=60 if GPU else 6, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(2, 2, 64), (6, 2, 80), (4, 1, 128), (3, 1, 256)]),
    st.sampled_from([16, 48]),
    st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]),  # numpy has no bfloat16
    st.booleans(),
)
def test_attention(seed: int, shape: tuple[int, int, int], page: int, dtype: torch.dtype, trees_only: bool) -> None:
    case = random_case(seed, width=12, requests=3)
    check(case, random_cache(case, *shape, page, dtype, seed), trees_only, DEVICE, "triton")


@runs_triton
def test_attention_with_keys_in_parts() -> None:
    case = random_case(5, width=64, requests=3)
    long = case.seq_lens + 400
    more = case._replace(
        seq_lens=long,
        masks=type(case.masks)(case.masks.masks, case.masks.prompts + 400),
        sees=[torch.nn.functional.pad(torch.from_numpy(s), (400, 0), value=True).numpy() for s in case.sees],
        stands=[at + 400 for at in case.stands],
    )
    assert split_keys(len(long), 4, 2, 65, int(long.max())) > 1
    check(more, random_cache(more, 4, 2, 64, 16, torch.float32, 1), False, DEVICE, "triton")


def test_keys_are_split_where_that_fills_a_gpu() -> None:
    assert split_keys(1, 32, 8, 33, 1 << 17) == 16
    assert split_keys(8, 32, 8, 33, 1 << 17) == 2
    assert split_keys(64, 32, 8, 33, 1 << 17) == 1
    assert split_keys(1, 32, 8, 33, 100) == 1, "a short context is read at once"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(32, 8), (28, 4), (64, 8), (8, 1), (4, 2), (9, 3)]),
    st.integers(1, 300),
    st.integers(2, 65),
    st.integers(1, 1 << 17),
    st.data(),
)
def test_scratch_is_enough_for_all_smaller_steps(
    heads: tuple[int, int], requests: int, queries: int, keys: int, data: st.DataObject
) -> None:
    """Of fewer queries keys are split further, as in CUDA graphs of K/2 and K/4 draft tokens."""
    size = scratch_size(requests, *heads, 128, queries, keys)
    n, q, k = (data.draw(st.integers(1, most)) for most in (requests, queries, keys))
    parts = split_keys(n, *heads, q, k)
    rows = n * q * heads[0] * parts  # each of what a head reads, its maximum and its sum
    assert parts == 1 or rows * (128 + 2) <= size
