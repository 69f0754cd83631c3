"""Triton kernels against the references, bit for bit: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from freedraft_kernels import KVPool, TreeBatch, Verification, top_tokens, tree_inputs, verify, warm_up
from freedraft_kernels.dispatch import use_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from in_triton import DEVICE, GPU, run_in_interpreter, runs_triton, starts_interpreter
from random_trees import batches, on, random_batch
from test_kernel_kv_pool import accepted_paths, paged_slots, random_buffers
from test_kernel_newest_tokens import cases, check
from test_kernel_top_tokens import random_logits

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
            verified = verify(tree, logits.argmax(-1))
            pool.compact(torch.randperm(400)[: batch * nodes].view(batch, nodes), verified)
    assert len({name for name, _ in launched}) >= 4
    assert launched <= warm, launched - warm


@runs_triton
def test_dispatch() -> None:
    assert use_triton(torch.device(DEVICE)) and not use_triton(torch.device(DEVICE), "reference")


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
    same(*(verify(tree, targets, backend=b) for b in ("triton", "reference")))


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
    targets = torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
    pool, slots = KVPool([torch.zeros(64, 2, 8, device=DEVICE)]), torch.arange(32, device=DEVICE).view(4, 8)

    def step(backend: str) -> None:
        tree_inputs(tree, seq_lens, layout="query", backend=backend)  # type: ignore[arg-type]
        tree_inputs(tree, seq_lens, layout="full", seq_lens_sum=26, backend=backend)  # type: ignore[arg-type]
        pool.compact(slots, verify(tree, targets, backend=backend), backend=backend)  # type: ignore[arg-type]

    for backend in ("triton", "reference"):
        step(backend)  # compiles, and copies the pool's table to the device once
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
