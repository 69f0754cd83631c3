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
    from freedraft_kernels.device import (
        filters,
        inputs,
        kv_pool,
        newest_tokens,
        top_tokens,
        tree_attention,
        tree_queries,
        verification,
    )

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
    top = {"logits": "*fp32", "keys": "*i64", "sums": "*fp32", "vocab": "i32", "stride": "i64"}
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
    strides = {f"{name}_stride": "i32" for name in ("query", "query_head", "out", "out_head", "page", "token", "head")}
    strides |= {f"{name}_stride": "i32" for name in ("values_page", "values_token", "values_head", "pages")}
    heads = {"starts": "*i32", "trees": "*i32", "max_queries": "i32"}
    parts = {"parts": "*fp32", "bounds": "*fp32"}
    reads = {"pages": "*i32", "seq_lens": "*i32", "prefixes": "*i32", "masks": "*i64", "scale": "fp32"}
    attention = {**heads, **parts, **reads, **strides}
    sizes = {"SIZE": 128, "SIZE_BLOCK": 128, "SEGMENTS": 4, "TREES_ONLY": False}
    attended = {**sizes, "HEADS": 32, "GROUP": 4, "PAGE": 16, "ROWS": 128, "TILE": 64}
    less = {"ROWS": 64, "TILE": 32}  # at once, of more bytes

    def attends(dtype: str, **constants: int) -> tuple[object, dict[str, str], dict[str, int], int]:
        typed = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
        return tree_attention.tree_attention_kernel, {**attention, **typed}, {**attended, **constants}, 4

    queries = {"node_masks": "*i64", "prompts": "*i32", "slots": "*i64", "nodes": "*i32", "starts": "*i32"}
    queries |= {"seq_lens": "*i32", "prefixes": "*i32", "masks": "*i64", "trees": "*i32", "positions": "*i64"}
    queries |= {"parents": "*i32", "counts": "*i32", "width": "i32"}
    return {
        "newest tokens": (newest_tokens.newest_tokens_kernel, newest, {"BLOCK": 16}, 1),
        "attention": attends("bf16"),
        "attention, all keys at once": attends("fp16", SEGMENTS=1, TREES_ONLY=True),
        "attention, float32": attends("fp32", SEGMENTS=16, **less),
        "attention, heads of 80": attends("bf16", SIZE=80),
        "attention, heads of 64": attends("fp32", SIZE=64, SIZE_BLOCK=64, GROUP=1, **less | {"ROWS": 16, "TILE": 64}),
        "attention, heads of 256": attends("bf16", SIZE=256, SIZE_BLOCK=256, **less),
        "attention, heads of 256, float32": attends("fp32", SIZE=256, SIZE_BLOCK=256, **less | {"ROWS": 16}),
        "sum of parts": (
            tree_attention.sum_parts_kernel,
            {**heads, **parts, "out": "*bf16", "out_stride": "i32", "out_head_stride": "i32"},
            sizes,
            1,
        ),
        "sum of many parts": (
            tree_attention.sum_parts_kernel,
            {**heads, **parts, "out": "*bf16", "out_stride": "i32", "out_head_stride": "i32"},
            {**sizes, "SEGMENTS": 64},
            4,
        ),
        "queries of trees": (tree_queries.tree_queries_kernel, queries, {"NODE_BLOCK": 128, "BLOCK": 256}, 4),
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
        attends = name.startswith("attention")
        options = {"num_warps": warps} | ({"num_stages": 2 if "bf16" in signature["query"] else 1} if attends else {})
        built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert built.asm["cubin"], name
        # What every GPU gives a program without asking for more; Triton asks for attention, as engines' kernels do.
        limit = 99 if attends else 48
        assert built.metadata.shared <= limit * 1024, f"{name}: {built.metadata.shared} bytes of shared memory"
