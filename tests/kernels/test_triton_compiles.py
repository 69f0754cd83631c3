"""Every kernel compiles to machine code of real GPUs. That needs no GPU: Triton ships the assembler."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from freedraft_kernels.dispatch import interpreting  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="interpreted kernels are not compiled")

# Of arguments by name, unless a case says otherwise; all others are int32 numbers.
TYPES = {"size": "i64", "stride": "i64", "scale": "fp32", "mask": "*u8"}
TYPES |= dict.fromkeys(("parts", "bounds"), "*fp32")
TYPES |= dict.fromkeys(("positions", "input_ids", "targets", "table", "drafts", "node_masks", "masks"), "*i64")
TYPES |= dict.fromkeys(("sums", "keys", "slots"), "*i64")
TYPES |= dict.fromkeys(("tokens", "parents", "depths", "counts", "accepted", "lengths", "new_tokens", "bonus"), "*i32")
TYPES |= dict.fromkeys(("gained", "starts", "trees", "pages", "seq_lens", "prefixes", "prompts"), "*i32")
Case = tuple[Any, dict[str, int], int, dict[str, str]]


def cases() -> dict[str, Case]:
    """Kernel, compile-time arguments, warps, types: as launched at 32 nodes, and at the largest sizes."""
    from freedraft_kernels.device.inputs import tree_inputs_kernel
    from freedraft_kernels.device.kv_pool import compact_kernel
    from freedraft_kernels.device.newest_tokens import newest_tokens_kernel
    from freedraft_kernels.device.top_tokens import top_keys_kernel
    from freedraft_kernels.device.tree_attention import sum_parts_kernel, tree_attention_kernel
    from freedraft_kernels.device.tree_queries import tree_queries_kernel
    from freedraft_kernels.device.verification import verify_kernel

    query = {"FULL": False, "BATCH_BLOCK": 64, "NODE_BLOCK": 32, "COLUMN_BLOCK": 1024}
    full, long = query | {"FULL": True}, {"seq_lens": "*i64"}
    eight = {"COUNT": 8, "COUNT_BLOCK": 8, "BLOCK": 4096}
    roots = {"NODE_BLOCK": 1, "nodes": 1}  # the launcher turns an argument of 1 into a constant
    sizes = {"SIZE": 128, "SIZE_BLOCK": 128, "SEGMENTS": 4, "TREES_ONLY": False}
    attended = sizes | {"HEADS": 32, "GROUP": 4, "PAGE": 16, "ROWS": 128, "TILE": 64}
    less = {"ROWS": 64, "TILE": 32}  # at once, of more bytes

    def attends(dtype: str, **constants: int) -> Case:
        types = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
        return tree_attention_kernel, attended | constants, 4, types

    def top(dtype: str) -> Case:
        return top_keys_kernel, eight, 4, {"logits": f"*{dtype}", "sums": "*fp32"}

    return {
        "newest tokens": (newest_tokens_kernel, {"BLOCK": 16}, 1, {"slots": "*i32", "out": "*i32"}),
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
        "top tokens": top("fp32"),
        "top tokens, bfloat16": top("bf16"),
        "query mask": (tree_inputs_kernel, query, 1, long),
        "full mask": (tree_inputs_kernel, full, 4, long),
        "full mask of int32 lengths": (tree_inputs_kernel, full, 4, {}),
        "full mask of roots": (tree_inputs_kernel, full | roots | {"BATCH_BLOCK": 1}, 4, long | {"size": "i32"}),
        "verify": (verify_kernel, {"NODE_BLOCK": 32}, 1, {}),
        "verify, int32": (verify_kernel, {"NODE_BLOCK": 128}, 1, {"targets": "*i32"}),
        "verify of roots": (verify_kernel, roots, 1, {}),
        "compact": (compact_kernel, {"BLOCK": 256}, 4, {}),
        "compact, short rows": (compact_kernel, {"BLOCK": 1}, 1, {"slots": "*i32"}),
    }


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
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
