"""Every kernel compiles to machine code of real GPUs. That needs no GPU: Triton ships the assembler."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from freedraft_kernels.dispatch import interpreting  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="interpreted kernels are not compiled")

TREE = {"tokens": "*i32", "parents": "*i32", "counts": "*i32"}
OUT = {"accepted": "*i32", "lengths": "*i32", "new_tokens": "*i32"}
RANDOM = {"probs": "*fp32", "seeds": "*i64", "positions": "*i64"}


def cases() -> dict[str, tuple[object, dict[str, str], dict[str, int], int]]:
    """Kernel, argument types, compile-time arguments, warps: as launched at 32 nodes, and at the largest sizes."""
    from freedraft_kernels.device import filters, inputs, kv_pool, newest_tokens, top_tokens, verification

    rows = {
        **TREE,
        "depths": "*i32",
        "seq_lens": "*i64",
        "input_ids": "*i64",
        "positions": "*i64",
        "mask": "*u8",
        "nodes": "i32",
        "size": "i64",
    }
    query = {"FULL": False, "BATCH_BLOCK": 64, "NODE_BLOCK": 32, "COLUMN_BLOCK": 1024}
    greedy = {**TREE, "targets": "*i64", **OUT, "bonus": "*i32", "nodes": "i32"}
    ints = {"nodes": "i32", "vocab": "i32"}
    walk = {**TREE, **RANDOM, **OUT, "stops": "*i32", **ints}
    sums = {"probs": "*fp32", "stops": "*i32", "sums": "*i64", "nodes": "i32", "vocab": "i32"}
    bonus = {
        **TREE,
        **RANDOM,
        "stops": "*i32",
        "sums": "*i64",
        "lengths": "*i32",
        "new_tokens": "*i32",
        "bonus": "*i32",
    }
    compact = {"table": "*i64", "slots": "*i64", "accepted": "*i32", "lengths": "*i32", "nodes": "i32", "width": "i32"}
    block = {"CHUNK": 4096, "VOCAB_BLOCK": 1024}
    top = {"logits": "*fp32", "keys": "*i64", "vocab": "i32", "stride": "i64"}
    eight = {"COUNT": 8, "COUNT_BLOCK": 8, "BLOCK": 4096}
    likeliest = {
        "probs": "*fp32",
        "counts": "*i32",
        "ranks": "*i64",
        "masses": "*i64",
        "shares": "*fp32",
        "sums": "*i64",
    }
    newest = {"tokens": "*i32", "lengths": "*i32", "slots": "*i32", "gained": "*i32", "out": "*i32", "drafts": "*i64"}
    newest |= {"stride": "i64", "length": "i32"}
    return {
        "newest tokens": (newest_tokens.newest_tokens_kernel, newest, {"BLOCK": 16}, 1),
        "filters": (filters.keep_likeliest_kernel, {**likeliest, **ints}, {"BLOCK": 4096}, 8),
        "top tokens": (top_tokens.top_keys_kernel, top, eight, 4),
        "top tokens, bfloat16": (top_tokens.top_keys_kernel, {**top, "logits": "*bf16"}, eight, 4),
        "query mask": (inputs.tree_inputs_kernel, rows, query, 1),
        "full mask": (inputs.tree_inputs_kernel, rows, {**query, "FULL": True}, 4),
        "full mask of int32 lengths": (
            inputs.tree_inputs_kernel,
            {**rows, "seq_lens": "*i32"},
            {**query, "FULL": True},
            4,
        ),
        "greedy": (verification.verify_greedy_kernel, greedy, {"NODE_BLOCK": 32}, 1),
        "greedy, int32": (verification.verify_greedy_kernel, {**greedy, "targets": "*i32"}, {"NODE_BLOCK": 128}, 1),
        "walk": (verification.verify_sampled_kernel, walk, {"NODE_BLOCK": 32}, 1),
        "walk, int32": (verification.verify_sampled_kernel, {**walk, "positions": "*i32"}, {"NODE_BLOCK": 32}, 1),
        "chunk sums": (verification.chunk_sums_kernel, sums, block, 4),
        "bonus": (
            verification.bonus_kernel,
            {**bonus, **ints, "chunks": "i32"},
            {**block, "NODE_BLOCK": 32, "CHUNK_BLOCK": 64},
            4,
        ),
        "bonus, widest": (
            verification.bonus_kernel,
            {**bonus, **ints, "chunks": "i32", "positions": "*i32"},
            {**block, "NODE_BLOCK": 256, "CHUNK_BLOCK": 64},
            4,
        ),
        # The launcher turns an argument of 1 into a constant: one node per request, one chunk.
        "full mask of roots": (
            inputs.tree_inputs_kernel,
            {k: v for k, v in rows.items() if k != "nodes"} | {"size": "i32"},
            {**query, "FULL": True, "BATCH_BLOCK": 1, "NODE_BLOCK": 1, "nodes": 1},
            4,
        ),
        "greedy of roots": (
            verification.verify_greedy_kernel,
            {k: v for k, v in greedy.items() if k != "nodes"},
            {"NODE_BLOCK": 1, "nodes": 1},
            1,
        ),
        "walk of roots": (
            verification.verify_sampled_kernel,
            {k: v for k, v in walk.items() if k != "nodes"},
            {"NODE_BLOCK": 1, "nodes": 1},
            1,
        ),
        "bonus of roots": (
            verification.bonus_kernel,
            {**bonus, "vocab": "i32", "chunks": "i32"},
            {**block, "NODE_BLOCK": 1, "CHUNK_BLOCK": 1, "nodes": 1},
            4,
        ),
        "compact": (kv_pool.compact_kernel, compact, {"BLOCK": 256}, 4),
        "compact, short rows": (kv_pool.compact_kernel, {**compact, "slots": "*i32"}, {"BLOCK": 1}, 1),
    }


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    for name, (kernel, signature, constants, warps) in cases().items():
        assert set(signature) | set(constants) == set(kernel.arg_names), name  # type: ignore[attr-defined]
        full = {**signature, **dict.fromkeys(constants, "constexpr")}
        ordered = {arg: full[arg] for arg in kernel.arg_names}  # type: ignore[attr-defined]
        positions = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}  # type: ignore[attr-defined]
        source = ASTSource(kernel, ordered, constexprs=positions)
        built = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert built.asm["cubin"], name
        # What every GPU gives a program without asking for more.
        assert built.metadata.shared <= 48 * 1024, f"{name}: {built.metadata.shared} bytes of shared memory"
