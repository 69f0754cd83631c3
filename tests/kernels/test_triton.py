"""Triton: the tests of all operations in its interpreter, what a warm-up compiles, and compiling for real GPUs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from freedraft_kernels import KVPool, TreeBatch, top_tokens, tree_inputs, verify, warm_up
from freedraft_kernels.dispatch import interpreting
from implementations import DEVICE, GPU, runs_triton

from tests.support.random_trees import on, random_batch
from tests.support.triton_launches import record_launches

pytest.importorskip("triton")


@pytest.mark.skipif(GPU or interpreting(), reason="the tests of Triton run in this process")
def test_in_the_interpreter() -> None:
    """All tests of this folder that run Triton; skipped are this one, that which needs a GPU, and compiling."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton and not without"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([*command, Path(__file__).parent], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert "13 passed, 4 skipped" in run.stdout, run.stdout[-2000:]


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
            tree_inputs(tree, lengths, int(lengths.sum()), cached=batch % 2 == 0)
            logits = torch.randn(batch, nodes, vocab)
            top_tokens(logits.view(-1, vocab), 4)
            verified = verify(tree, logits.argmax(-1))
            pool.compact(torch.randperm(400)[: batch * nodes].view(batch, nodes), verified)
    assert len({name for name, _ in launched}) >= 4
    assert launched <= warm, launched - warm


@runs_triton
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_no_operation_synchronises() -> None:
    rng = np.random.default_rng(0)
    drafts = random_batch(rng, 4, 8, 50)
    tree, seq_lens = on(DEVICE, drafts), torch.tensor([5, 6, 7, 8], device=DEVICE)
    targets = torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
    pool, slots = KVPool([torch.zeros(64, 2, 8, device=DEVICE)]), torch.arange(32, device=DEVICE).view(4, 8)

    def step(backend: str) -> None:
        tree_inputs(tree, seq_lens, 26, backend=backend)  # type: ignore[arg-type]
        pool.compact(slots, verify(tree, targets, backend=backend), backend=backend)  # type: ignore[arg-type]

    for backend in ("triton", "reference"):
        step(backend)  # compiles, and copies the pool's table to the device once
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Of arguments by name, unless a case says otherwise; all others are int32 numbers.
TYPES = {"size": "i64", "stride": "i64", "scale": "fp32", "mask": "*u8"}
TYPES |= dict.fromkeys(("parts", "bounds", "maxima", "sums", "log_probs"), "*fp32")
TYPES |= dict.fromkeys(("positions", "input_ids", "targets", "table", "drafts", "node_masks", "masks"), "*i64")
TYPES |= dict.fromkeys(("slots", "places", "of_nodes"), "*i64")
TYPES |= dict.fromkeys(("tokens", "parents", "depths", "counts", "accepted", "lengths", "new_tokens"), "*i32")
TYPES |= dict.fromkeys(("gained", "starts", "trees", "pages", "seq_lens", "prefixes", "prompts"), "*i32")
Case = tuple[Any, dict[str, int | None], int, dict[str, str]]


def cases() -> dict[str, Case]:
    """Kernel, compile-time arguments, warps, types: as launched at 32 nodes, and at the largest sizes."""
    from freedraft_kernels.device.extend_drafts import extend_drafts_kernel
    from freedraft_kernels.device.inputs import tree_inputs_kernel
    from freedraft_kernels.device.kv_pool import compact_kernel
    from freedraft_kernels.device.newest_tokens import newest_tokens_kernel
    from freedraft_kernels.device.top_tokens import block_maxima_kernel, top_tokens_kernel
    from freedraft_kernels.device.tree_attention import sum_parts_kernel, tree_attention_kernel
    from freedraft_kernels.device.tree_pages import tree_pages_kernel
    from freedraft_kernels.device.tree_queries import tree_queries_kernel
    from freedraft_kernels.device.verification import verify_kernel

    mask, long = {"BATCH_BLOCK": 64, "NODE_BLOCK": 32, "COLUMN_BLOCK": 1024}, {"seq_lens": "*i64"}
    eight = {"COUNT": 8, "COUNT_BLOCK": 8, "BLOCK": 64, "BLOCKS": 2048, "SPANS": 32}
    roots = {"NODE_BLOCK": 1, "nodes": 1}  # the launcher turns an argument of 1 into a constant
    dense = dict.fromkeys(("starts", "places", "slots"))
    chains = dict.fromkeys(("parents", "counts", "places", "slots"))
    sizes = {"SIZE": 128, "SIZE_BLOCK": 128, "SEGMENTS": 4, "TREES_ONLY": False}
    attended = sizes | {"HEADS": 32, "GROUP": 4, "PAGE": 16, "ROWS": 128, "TILE": 64}
    flash = long | {"rows": "*i64", "table": "*i32", "stride": "i32"}
    flash |= dict.fromkeys(("ends", "past_lengths", "past_ends", "past_pages"), "*i32")
    extended = {"drafts": "*i64", "ngrams": "*i64", "slots": "*i32"}
    extended |= dict.fromkeys(("inputs", "ends", "rows"), "*i32")
    less = {"ROWS": 64, "TILE": 32}  # at once, of more bytes

    def attends(dtype: str, **constants: int) -> Case:
        types = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
        return tree_attention_kernel, attended | constants, 4, types

    def maxima(dtype: str) -> Case:
        return block_maxima_kernel, {"SPAN": 4096, "BLOCK": 64}, 4, {"logits": f"*{dtype}"}

    def top(dtype: str) -> Case:
        return top_tokens_kernel, eight, 4, {"logits": f"*{dtype}"}

    return {
        "newest tokens": (newest_tokens_kernel, {"BLOCK": 16}, 1, dict.fromkeys(("slots", "rejected", "out"), "*i32")),
        "extend drafts": (extend_drafts_kernel, {"BLOCK": 16}, 1, extended),
        "attention": attends("bf16"),
        "attention, all keys at once": attends("fp16", SEGMENTS=1, TREES_ONLY=True),
        "attention, float32": attends("fp32", SEGMENTS=16, **less),
        "attention, heads of 80": attends("bf16", SIZE=80),
        "attention, heads of 64": attends("fp32", SIZE=64, SIZE_BLOCK=64, GROUP=1, **less | {"ROWS": 16, "TILE": 64}),
        "attention, heads of 256": attends("bf16", SIZE=256, SIZE_BLOCK=256, **less),
        "attention, heads of 256, float32": attends("fp32", SIZE=256, SIZE_BLOCK=256, **less | {"ROWS": 16}),
        "sum of parts": (sum_parts_kernel, sizes, 1, {"out": "*bf16"}),
        "sum of many parts": (sum_parts_kernel, sizes | {"SEGMENTS": 64}, 4, {"out": "*bf16"}),
        "queries of trees": (tree_queries_kernel, {"NODE_BLOCK": 128, "BLOCK": 256}, 4, {"nodes": "*i32"}),
        "pages of trees": (tree_pages_kernel, {"NODE_BLOCK": 256, "BLOCK": 1024}, 4, flash),
        "maxima": maxima("fp32"),
        "maxima, bfloat16": maxima("bf16"),
        "top tokens": top("fp32"),
        "top tokens, bfloat16": top("bf16"),
        "mask": (tree_inputs_kernel, mask, 4, long),
        "mask of int32 lengths": (tree_inputs_kernel, mask, 4, {}),
        "mask of roots": (tree_inputs_kernel, mask | roots | {"BATCH_BLOCK": 1}, 4, long | {"size": "i32"}),
        "verify": (verify_kernel, dense | {"NODE_BLOCK": 32}, 1, {}),
        "verify, int32": (verify_kernel, dense | {"NODE_BLOCK": 128}, 1, {"targets": "*i32"}),
        "verify of roots": (verify_kernel, dense | roots, 1, {}),
        "verify rows of chains": (verify_kernel, chains | {"NODE_BLOCK": 16}, 1, {"new_tokens": "*i64"}),
        "verify rows of trees": (verify_kernel, {"NODE_BLOCK": 16}, 1, {"new_tokens": "*i64"}),
        "compact": (compact_kernel, {"BLOCK": 256}, 4, {}),
        "compact, short rows": (compact_kernel, {"BLOCK": 1}, 1, {"slots": "*i32"}),
    }


@pytest.mark.skipif(interpreting(), reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    """To machine code of real GPUs, which needs none: Triton ships the assembler."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    for name, (kernel, constants, warps, types) in cases().items():
        names = kernel.arg_names
        assert {*constants, *types} <= set(names), name
        given = TYPES | types | dict.fromkeys(constants, "constexpr")
        places = {(names.index(arg),): value for arg, value in constants.items()}
        source = ASTSource(kernel, {arg: given.get(arg, "i32") for arg in names}, constexprs=places)
        attends = name.startswith("attention")
        options = {"num_warps": warps} | ({"num_stages": 2 if "bf16" in given["query"] else 1} if attends else {})
        built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert built.asm["cubin"], name
        # What every GPU gives a program without asking for more; Triton asks for attention, as engines' kernels do.
        limit = 99 if attends else 48
        assert built.metadata.shared <= limit * 1024, f"{name}: {built.metadata.shared} bytes of shared memory"
