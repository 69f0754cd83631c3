"""Triton kernels against the references, bit for bit: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from freedraft_kernels import (
    KVPool,
    TreeBatch,
    Verification,
    target_probs,
    top_tokens,
    tree_inputs,
    verify_greedy,
    verify_sampled,
    warm_up,
)
from freedraft_kernels.dispatch import use_triton
from freedraft_kernels.probs import keep_likeliest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_triton import DEVICE, GPU, run_in_interpreter, runs_triton, starts_interpreter
from random_trees import batches, on, random_batch, random_probs
from test_kernel_kv_pool import accepted_paths, paged_slots, random_buffers
from test_kernel_newest_tokens import cases, check
from test_kernel_top_tokens import random_logits
from test_kernel_verification import chi_square

from freedraft.draft import DraftBatch
from tests.support.triton_launches import record_launches

pytest.importorskip("triton")


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, skipped=2)


def same(ours: Verification, reference: Verification) -> None:
    for field in ("accepted", "lengths", "tokens", "bonus"):
        got, want = getattr(ours, field), getattr(reference, field)
        assert got.dtype == want.dtype and torch.equal(got, want), (field, got, want)


@runs_triton
@pytest.mark.skipif(GPU, reason="records launches in the interpreter")
def test_a_warm_up_compiles_what_steps_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = record_launches(monkeypatch, run=False)  # what comes out is not looked at
    vocab, widths, max_batch = 40, (1, 2, 4, 6, 8), 9
    buffers = [torch.zeros(400, 2, 8) for _ in range(2)]
    pool = KVPool(buffers)
    warm_up(widths, max_batch, torch.zeros(1, vocab), top=4, pool=pool)
    warm, rng = set(launched), np.random.default_rng(0)
    launched.clear()
    for batch in range(1, max_batch + 1):
        for nodes in widths:
            parents = np.maximum(np.arange(nodes) - 1, 0)[None].repeat(batch, 0).astype(np.int32)
            parents[:, 0] = -1
            depths = np.arange(nodes, dtype=np.int32)[None].repeat(batch, 0)
            counts = rng.integers(1, nodes + 1, batch).astype(np.int32)
            tree = TreeBatch.from_numpy(parents + 2, parents, depths, counts)
            lengths = torch.from_numpy(rng.integers(1, 30, batch))
            tree_inputs(tree, lengths, layout="full", seq_lens_sum=int(lengths.sum()))
            logits = torch.randn(batch, nodes, vocab)
            top_tokens(logits.view(-1, vocab), 4)
            verified = verify_greedy(tree, logits.argmax(-1))
            probs = target_probs(
                logits,
                torch.full((batch,), 0.8),
                top_ks=torch.full((batch,), 30, dtype=torch.int32),
                top_ps=torch.full((batch,), 0.9),
                min_ps=torch.full((batch,), 0.1),
                counts=tree.counts,
            )
            verify_sampled(tree, probs, lengths, lengths)
            pool.compact(torch.randperm(400)[: batch * nodes].view(batch, nodes), verified)
    assert len({name for name, _ in launched}) >= 6
    assert launched <= warm, launched - warm


# Many ties, some and none; in the interpreter, which takes half a minute for each, not all of them together.
SIZES, VALUES = (7, 4096, 9001), (3, 60, 100_000)
SIZES_AND_TIES = list(itertools.product(SIZES, VALUES) if GPU else zip(SIZES, VALUES, strict=True))


@runs_triton
def test_dispatch() -> None:
    assert use_triton(torch.device(DEVICE)) and not use_triton(torch.device(DEVICE), "reference")


@runs_triton
@pytest.mark.parametrize("vocab, values", SIZES_AND_TIES)
def test_keep_likeliest(vocab: int, values: int) -> None:
    rng = np.random.default_rng(vocab + values)
    logits = torch.from_numpy(rng.integers(0, values, (6, 2, vocab)) * 12.0 / values).to(DEVICE)
    probs = torch.softmax(logits.float(), -1)
    probs[5, 0, 3] = torch.nan
    counts = torch.tensor([2, 1, 2, 2, 2, 1], dtype=torch.int32, device=DEVICE)
    filters = (
        torch.tensor([0, 5, 1, vocab // 2, 0, 3], device=DEVICE),
        torch.tensor([0.9, 0.5, 1.0, 0.3, 0.99999, 0.999], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.05, 0.0], device=DEVICE),
    )
    for chosen in (filters, (filters[0], None, None), (None, filters[1], None), (None, None, filters[2])):
        ours, theirs = probs.clone(), probs.clone()
        masses = keep_likeliest(ours, counts, *chosen, backend="triton")
        assert torch.equal(masses, keep_likeliest(theirs, counts, *chosen, backend="reference"))
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))


@runs_triton
@pytest.mark.parametrize("rows, vocab, values", [(3, 9000, 40), (2, 4096, 10_000), (5, 8, 3), (0, 50, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_tokens(rows: int, vocab: int, values: int, dtype: torch.dtype) -> None:
    logits = random_logits(rows, vocab, values, vocab).to(DEVICE, dtype)
    if rows:
        logits[0, 1] = torch.nan if values > 3 else torch.inf
    for count in (1, 5, 8):
        ours, reference = (top_tokens(logits, count, backend=name) for name in ("triton", "reference"))
        assert torch.equal(ours[0], reference[0])
        torch.testing.assert_close(ours[1], reference[1], rtol=0, atol=2e-5)


@runs_triton
@settings(max_examples=25, deadline=None)
@given(cases)
def test_newest_tokens(case: tuple[list[int], list[int], int]) -> None:
    lengths, slots, length = case
    check(lengths, slots, length, "triton", DEVICE)


@runs_triton
@settings(max_examples=25, deadline=None)
@given(batches(max_batch=4))
def test_tree_inputs(case: tuple[DraftBatch, int, int]) -> None:
    drafts, _, seed = case
    tree = on(DEVICE, drafts)
    lengths = [(seed >> (3 * b)) % 1200 for b in range(drafts.batch_size)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32 if seed % 2 else torch.int64, device=DEVICE)
    query = [tree_inputs(tree, seq_lens, layout="query", backend=b) for b in ("triton", "reference")]
    room = sum(lengths)
    full = [tree_inputs(tree, seq_lens, layout="full", seq_lens_sum=room, backend=b) for b in ("triton", "reference")]
    bound = seed % (2 * room + 1)
    other = [tree_inputs(tree, seq_lens, layout="full", seq_lens_sum=bound, backend=b) for b in ("triton", "reference")]
    size = full[0].mask.numel()
    for ours, reference in (query, full, other):
        for field in ("input_ids", "positions", "mask"):
            got, want = getattr(ours, field)[:size], getattr(reference, field)[:size]
            assert got.dtype == want.dtype and torch.equal(got, want), field


@runs_triton
@settings(max_examples=60, deadline=None)
@given(batches(max_nodes=20, max_vocab=4))
def test_greedy(case: tuple[DraftBatch, int, int]) -> None:
    drafts, vocab, seed = case
    rng = np.random.default_rng(seed)
    tree = on(DEVICE, drafts)
    targets = torch.from_numpy(rng.integers(0, vocab, drafts.tokens.shape)).to(DEVICE)
    targets = targets.int() if seed % 2 else targets
    same(*(verify_greedy(tree, targets, backend=b) for b in ("triton", "reference")))


@runs_triton
@settings(max_examples=40, deadline=None)
@given(batches(max_nodes=16))
def test_sampled(case: tuple[DraftBatch, int, int]) -> None:
    drafts, vocab, seed = case
    rng = np.random.default_rng(seed)
    tree = on(DEVICE, drafts)
    probs = random_probs(rng, *drafts.tokens.shape, vocab).to(DEVICE)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, drafts.batch_size)).to(DEVICE)
    positions = torch.from_numpy(rng.integers(0, 2**31 - 1, drafts.batch_size)).to(DEVICE)
    positions = positions.int() if seed % 2 else positions
    same(*(verify_sampled(tree, probs, seeds, positions, backend=b) for b in ("triton", "reference")))


@runs_triton
@pytest.mark.parametrize("vocab", [1023, 1024, 1025, 49_152, 152_064])
def test_sampled_over_large_vocabularies(vocab: int) -> None:
    """Several chunks, the last one cut short, rejected children in the first, the last and the same chunk."""
    rng = np.random.default_rng(vocab)
    batch, nodes = 6, 5
    drafts = random_batch(rng, batch, nodes, vocab, [5, 5, 5, 1, 0, 5])
    drafts.tokens[:3, 1:] = [vocab - 1, vocab - 2, 0, vocab // 2]
    drafts.parents[:3, 1:], drafts.depths[:3, 1:] = 0, 1
    drafts.check()
    logits = torch.from_numpy(
        rng.normal(size=(batch, nodes, vocab)) * rng.choice([0.1, 2.0], (batch, nodes, 1))
    ).float()
    probs = torch.softmax(logits, -1)
    probs[2] = 0.0  # all the mass on the children
    probs[2, 0, drafts.tokens[2, 1:].astype(np.int64)] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    probs = probs.to(DEVICE)
    tree = on(DEVICE, drafts)
    for trial in range(2):
        seeds = torch.from_numpy(rng.integers(0, 2**62, batch)).to(DEVICE)
        positions = torch.full((batch,), trial, device=DEVICE)
        same(*(verify_sampled(tree, probs, seeds, positions, backend=b) for b in ("triton", "reference")))


@runs_triton
def test_sampled_with_tokens_outside_the_vocabulary_and_rows_that_are_no_distribution() -> None:
    rng = np.random.default_rng(1)
    drafts = random_batch(rng, 8, 6, 9, [6] * 8)
    drafts.tokens[0, 1:4] = [9, 2**31 - 1, 4096]
    probs = random_probs(rng, 8, 6, 9)
    probs[1], probs[2], probs[3], probs[4] = 0.0, float("nan"), -1.0, float("inf")
    probs[5, :, 2] = 1.0 + 1e-6
    probs, tree = probs.to(DEVICE), on(DEVICE, drafts)
    for trial in range(5):
        seeds = torch.arange(8, device=DEVICE) + 100 * trial
        same(*(verify_sampled(tree, probs, seeds, seeds, backend=b) for b in ("triton", "reference")))


@runs_triton
def test_sampled_passes_a_chi_square() -> None:
    """Few draws in the slow interpreter: test_sampled has the reference's outputs, and those are tested exactly."""
    rng = np.random.default_rng(100)
    drafts = random_batch(rng, 1, 6, 4, [6])
    probs = torch.softmax(torch.from_numpy(rng.normal(size=(1, 6, 4))), -1).float()
    assert chi_square(drafts, probs, 100_000 if GPU else 100, "triton", DEVICE) > 1e-4


@runs_triton
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 12), st.sampled_from([1, 4, 16]))
def test_compaction(seed: int, batch: int, nodes: int, page_size: int) -> None:
    rng = np.random.default_rng(seed)
    slots, total = paged_slots(rng, batch, nodes, page_size)
    paths = accepted_paths(rng, batch, nodes, int(rng.integers(1, nodes + 1)))
    paths = Verification(paths.accepted.to(DEVICE), paths.lengths.to(DEVICE), paths.tokens, paths.bonus)
    # Rows that several programs share.
    wide = [torch.from_numpy(rng.normal(size=(total, 5, 130))).half()] if seed % 4 == 0 else []
    buffers = [b.to(DEVICE) for b in random_buffers(rng, total, 2, 4) + wide]
    copies = [b.clone() for b in buffers]
    slots = (slots.int() if seed % 2 else slots).to(DEVICE)
    KVPool(buffers).compact(slots, paths, backend="triton")
    KVPool(copies).compact(slots, paths, backend="reference")
    for i, (got, want) in enumerate(zip(buffers, copies, strict=True)):
        assert torch.equal(got.float(), want.float()), i


@runs_triton
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_no_operation_synchronises() -> None:
    rng = np.random.default_rng(0)
    drafts = random_batch(rng, 4, 8, 50)
    tree, seq_lens = on(DEVICE, drafts), torch.tensor([5, 6, 7, 8], device=DEVICE)
    probs, targets = random_probs(rng, 4, 8, 50).to(DEVICE), torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
    pool, slots = KVPool([torch.zeros(64, 2, 8, device=DEVICE)]), torch.arange(32, device=DEVICE).view(4, 8)

    def step(backend: str) -> None:
        tree_inputs(tree, seq_lens, layout="query", backend=backend)  # type: ignore[arg-type]
        tree_inputs(tree, seq_lens, layout="full", seq_lens_sum=26, backend=backend)  # type: ignore[arg-type]
        pool.compact(slots, verify_greedy(tree, targets, backend=backend), backend=backend)  # type: ignore[arg-type]
        verify_sampled(tree, probs, seq_lens, seq_lens, backend=backend)  # type: ignore[arg-type]

    for backend in ("triton", "reference"):
        step(backend)  # compiles, and copies the pool's table to the device once
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
