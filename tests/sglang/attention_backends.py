"""SGLang's own attention backends with our trees, in a process of their own, which `test_attention_masks.py` starts
with TRITON_INTERPRET=1 and the folder of a model in TINY_MODEL.

Triton's kernels run in its interpreter, the backends on a real ModelRunner. The kernels of FA3 and FlashInfer are not
for this machine: what they are given is compared with the trees. No graph is captured.
"""

import itertools
import os
import sys
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from freedraft_kernels import tree_inputs
from sglang.benchmark.one_batch import load_model
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_context, publish
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch.overrides import TorchFunctionMode

from freedraft.draft import DraftBatch
from tests.support.random_trees import on, path_to, random_batch
from tests.support.triton_launches import interpret_quickly, record_launches

LENGTHS = [7, 1, 4]
BATCH, NODES, WINDOW, DIM = len(LENGTHS), 8, 6, 16
SIZES = (1, 2, 4, 8)  # batches that graphs are captured for


@pytest.fixture(scope="session")
def runner() -> ModelRunner:
    interpret_quickly()
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.flash_attn"] = MagicMock()
    load_plugins()
    on_cpu = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}
    sizes = {"max_total_tokens": 256, "max_running_requests": BATCH, "speculative_num_draft_tokens": NODES}
    folder = os.environ["TINY_MODEL"]
    args = ServerArgs(model_path=folder, skip_tokenizer_init=True, speculative_algorithm="sssd", **on_cpu, **sizes)
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


def random_trees(nodes: int, chain: bool = False) -> DraftBatch:
    """A whole tree, a root, all but one node."""
    return random_batch(np.random.default_rng(nodes), BATCH, nodes, 10**6, [nodes, 1, nodes - 1], chain)


def path_of(drafts: DraftBatch, row: int, node: int) -> list[int]:
    """The ancestors of a node, from the root on, and itself; padding has none."""
    return path_to(drafts, row, node) if node < drafts.counts[row] else [node]


def forward_of(
    drafts: DraftBatch, rows: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, padding: int = 0
) -> ForwardBatch:
    """A step that verifies trees. slots: where the KV of their nodes goes; padding: requests that fill up a graph,
    which have one token each, and row 0."""
    inputs = tree_inputs(on("cpu", drafts), lengths, int(lengths.sum()))
    tree = NgramVerifyInput(
        draft_token=inputs.input_ids,
        custom_mask=inputs.mask,
        positions=inputs.positions,
        draft_token_num=drafts.max_nodes,
    )
    lengths = torch.cat((lengths, torch.ones(padding, dtype=torch.int64)))
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(lengths),
        input_ids=inputs.input_ids,
        req_pool_indices=torch.cat((rows, torch.zeros(padding, dtype=torch.int64))),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=slots,
        positions=inputs.positions,
        spec_algorithm=SpeculativeAlgorithm.from_string("sssd"),
        spec_info=tree,
    )


def over_nodes(forward: ForwardBatch) -> torch.Tensor:
    """The mask of a step with nothing in it over cached tokens, but for the first cell."""
    nodes, rows = forward.spec_info.draft_token_num, len(forward.positions)
    lengths = forward.seq_lens.repeat_interleave(nodes)[:rows].tolist()
    cells = forward.spec_info.custom_mask.split([size for length in lengths for size in (length, nodes)])
    mask = torch.cat([part if i % 2 else torch.zeros_like(part) for i, part in enumerate(cells)])
    mask[0] = True
    return mask


def verification(runner: ModelRunner, drafts: DraftBatch, slots: Any) -> tuple[ForwardBatch, list[torch.Tensor]]:
    """A step of requests that have these KV slots, and of them those of each request's nodes."""
    rows, table, nodes = torch.arange(1, 1 + BATCH), runner.req_to_token_pool.req_to_token, drafts.max_nodes
    table[rows, : slots.shape[1]] = slots.to(table.dtype)
    windows = [table[row, n : n + nodes] for row, n in zip(rows.tolist(), LENGTHS, strict=True)]
    get_context().override("test", speculative_num_draft_tokens=nodes)
    return forward_of(drafts, rows, torch.tensor(LENGTHS), torch.cat(windows).to(torch.int64)), windows


def largest_error(drafts: DraftBatch, window: int, page: int = 1) -> float:
    """Of SGLang's Triton attention, against attention written out."""
    torch.manual_seed(0)
    batch, nodes = drafts.tokens.shape
    inputs = tree_inputs(on("cpu", drafts), torch.tensor(LENGTHS), sum(LENGTHS), backend="reference")
    q = torch.randn(batch * nodes, 4, DIM)
    k, v = torch.randn(2, batch * nodes, 2, DIM)
    pool_k, pool_v = torch.randn(2, 64, 2, DIM)
    slots = [torch.randperm(64)[:length] for length in LENGTHS]
    read = [row[-window:] if window > 0 else row for row in slots]
    starts = torch.tensor([0] + [len(row) for row in read]).cumsum(0).to(torch.int32)
    masks = torch.tensor([0] + [nodes * (length + nodes) for length in LENGTHS]).cumsum(0)
    out = torch.zeros_like(q)
    extend_attention_fwd(
        q, k, v, out, pool_k, pool_v,
        torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32), starts, torch.cat(read),
        inputs.mask, True, masks, nodes, 1.0, 1.0,
        sliding_window_size=window,
        page_size=page,
        window_kv_offsets=torch.tensor([n - len(r) for n, r in zip(LENGTHS, read, strict=True)], dtype=torch.int32),
    )  # fmt: skip
    worst = 0.0
    for b, length in enumerate(LENGTHS):
        first, count = b * nodes, int(drafts.counts[b])
        keys, values = (
            torch.cat((pool[slots[b]], own[first : first + nodes])).repeat_interleave(2, 1)
            for pool, own in ((pool_k, k), (pool_v, v))
        )
        seen = torch.zeros(count, length + nodes, dtype=torch.bool)
        for i in range(count):
            seen[i, [*range(length), *(length + node for node in path_to(drafts, b, i))]] = True
        if window > 0:
            at = torch.cat((torch.arange(length), inputs.positions[first : first + nodes]))
            seen &= at >= at[length : length + count, None] - window
        scores = torch.einsum("nhd,shd->nhs", q[first : first + count], keys) / DIM**0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        error = out[first : first + count] - torch.einsum("nhs,shd->nhd", weights, values)
        worst = max(worst, float(error.abs().max()))
    return worst


def test_triton() -> None:
    """Trees are attended to as they should be; under a sliding window chains only (`guards.BACKENDS`)."""
    tree, chain = (random_trees(NODES, chain) for chain in (False, True))
    for page in (1, 4):
        assert largest_error(tree, -1, page) < 1e-5
        assert largest_error(chain, WINDOW, page) < 1e-5
    assert largest_error(tree, WINDOW) > 0.1, "SGLang counts windows by position now: draft trees there"


def graph_backend(runner: ModelRunner, nodes: int, page: int) -> Any:
    """FA3's, as after a capture for batches of `SIZES`."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    get_context().override("test", speculative_num_draft_tokens=nodes, speculative_eagle_topk=2)
    runner.page_size, runner.sliding_window_size = page, None
    backend = FlashAttentionBackend(runner)
    slots = np.random.default_rng(0).permutation(12 * 2100).astype(np.int32)
    backend.req_to_token = torch.from_numpy(slots.reshape(12, 2100))
    backend.init_cuda_graph_state(SIZES[-1], SIZES[-1] * nodes)
    for size in SIZES:
        backend._bind_metadata_buffers(size, size * nodes, None, ForwardMode.TARGET_VERIFY, None, "cpu")
    return backend


def prepared(backend: Any, forward: ForwardBatch) -> list[torch.Tensor]:
    """Copies of all that is written for a replayed graph, over junk."""
    size, tables = forward.batch_size, ("cache_seqlens_int32", "cu_seqlens_k", "page_table")
    both = backend.target_verify_metadata_topk_normal[size], backend.target_verify_metadata_topk_expand[size]
    for metadata, name in itertools.product(both, tables):
        getattr(metadata, name)[int(name == "cu_seqlens_k") :] = -7
    backend.forward_metadata = backend.forward_metadata_spec_decode_expand = None
    backend.init_forward_metadata_out_graph(forward)
    assert (backend.forward_metadata, backend.forward_metadata_spec_decode_expand) == both
    assert both[0].max_seq_len_k == backend.max_context_len
    return [getattr(metadata, name).clone() for metadata, name in itertools.product(both, tables)]


@pytest.mark.parametrize("nodes", [2, 16])
def test_one_kernel_writes_what_sglang_does(runner: ModelRunner, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, for a replayed graph of trees on FA3; neither reads the mask over cached tokens."""
    from freedraft.engines.sglang.graphs import write_metadata_at_once

    rng = np.random.default_rng(nodes)
    for page in (1, 4):
        own, ours = graph_backend(runner, nodes, page), graph_backend(runner, nodes, page)
        write_metadata_at_once(ours)
        for batch in (1, 3, 5, 8):
            lengths = torch.from_numpy(rng.integers(1, rng.choice([9, 1900]), batch))
            drafts = random_batch(rng, batch, nodes, 50, rng.integers(1, nodes + 1, batch).tolist())
            rows, slots = torch.from_numpy(rng.permutation(11)[:batch] + 1), torch.zeros(batch * nodes)
            padding = next(size for size in SIZES if size >= batch) - batch
            forward = forward_of(drafts, rows, lengths, slots, padding)
            whole, forward.spec_info.custom_mask = prepared(own, forward), over_nodes(forward)
            for backend in (own, ours):
                assert all(map(torch.equal, whole, prepared(backend, forward))), (page, batch)
    launched = record_launches(monkeypatch, run=False)
    ours.init_forward_metadata_out_graph(forward)
    assert len(launched) == 1


@pytest.mark.extended
@pytest.mark.parametrize("hybrid", [False, True])
def test_what_graphs_of_further_widths_share(runner: ModelRunner, hybrid: bool) -> None:
    """Page indices, which are gigabytes at long contexts that the memory fraction does not count; and scratch for
    decoding under MLA."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from freedraft.engines.sglang.graphs import capture

    def made(init_new_workspace: bool = False) -> Any:
        backends = [TritonAttnBackend(runner) for _ in range(2)]
        for backend in backends:
            backend.max_kv_splits = 256  # of MLA on an H100
        decode, prefill = backends
        return HybridAttnBackend(runner, decode_backend=decode, prefill_backend=prefill) if hybrid else prefill

    def verifies(backend: Any) -> Any:
        return backend.prefill_backend if hybrid else backend

    runner.attn_backend, runner._get_attention_backend = made(), made
    runner.attn_backend.init_cuda_graph_state(BATCH, BATCH * NODES)
    own = verifies(runner.attn_backend).cuda_graph_kv_indices
    for window, width in itertools.product((None, 64), (1, 4)):
        runner.sliding_window_size = window
        whole = capture(runner, width).backend
        whole.init_cuda_graph_state(BATCH, BATCH * width)
        backend = verifies(whole)
        assert backend.num_draft_tokens == width
        assert (backend.cuda_graph_kv_indices.data_ptr() == own.data_ptr()) == (window is None)
        assert len(backend.cuda_graph_kv_indices) >= BATCH * width * backend.max_context_len
        scratch = backend.cuda_graph_attn_logits.numel()
        assert scratch == BATCH * width * backend.num_head * backend.v_head_dim, "for one part of the keys"


@pytest.mark.extended
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("topk", [1, 2])
def test_what_fa3_takes_from_a_mask(runner: ModelRunner, page: int, topk: int) -> None:
    """Pages of each request's tokens, and slots of each node's ancestors and of itself, without a look at the mask over
    cached tokens; chains are read without a mask, with the tokens."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    rng, drafts = np.random.default_rng(page), random_trees(NODES, chain=topk == 1)
    pages = 1 + rng.permutation(200 // page)[: BATCH * 20 // page].reshape(BATCH, 20 // page)
    slots = torch.from_numpy((pages[..., None] * page + np.arange(page)).reshape(BATCH, 20))
    forward, windows = verification(runner, drafts, slots)
    get_context().override("test", speculative_eagle_topk=topk)
    runner.page_size, runner.sliding_window_size = page, None
    backend, forward.spec_info.custom_mask = FlashAttentionBackend(runner), over_nodes(forward)
    backend.init_forward_metadata(forward)
    past, own = backend.forward_metadata, backend.forward_metadata_spec_decode_expand
    for b, window in enumerate(windows):
        length = LENGTHS[b] + (NODES if topk == 1 else 0)
        assert past.cache_seqlens_int32[b] == length
        assert past.page_table[b, : -(-length // page)].tolist() == (slots[b, :length:page] // page).tolist()
        for i in range(NODES if topk > 1 else 0):
            row, path = b * NODES + i, path_of(drafts, b, i)
            assert own.page_table[row, : own.cache_seqlens_int32[row]].tolist() == window[path].tolist()


class OnThisMachine(TorchFunctionMode):
    """FlashInfer's backend allocates on "cuda", wherever the model is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}) | ({"device": "cpu"} if (kwargs or {}).get("device") == "cuda" else {}))


def flashinfer_backend(runner: ModelRunner) -> Any:
    """The module of SGLang's backend, without FlashInfer's kernels."""
    from sglang.srt.layers.attention import flashinfer_backend as module

    for name in ("PrefillWithRaggedKVCache", "PrefillWithPagedKVCache", "DecodeWithPagedKVCache"):
        setattr(module, f"Batch{name}Wrapper", MagicMock())
    runner.page_size, runner.sliding_window_size = 1, None
    return module


@pytest.mark.extended
@pytest.mark.parametrize("nodes", [2, NODES])
def test_what_flashinfers_planner_takes_from_a_mask(runner: ModelRunner, nodes: int) -> None:
    """For each node, a mask over the slots of its request and of its tree."""
    module, drafts = flashinfer_backend(runner), random_trees(nodes)
    slots = (1 + torch.randperm(200)[: BATCH * 20]).reshape(BATCH, 20)
    forward, windows = verification(runner, drafts, slots)
    with OnThisMachine():
        backend = module.FlashInferAttnBackend(runner)
        backend.init_forward_metadata(forward)
    (wrapper,) = backend.forward_metadata.prefill_wrappers
    (queries, ends, read, *_), named = wrapper.begin_forward.call_args
    assert queries.tolist() == [b * nodes for b in range(BATCH + 1)]
    mask, start = named["custom_mask"], 0
    for b, (first, end) in enumerate(itertools.pairwise(ends.tolist())):
        of_request, seen = read[first:end], mask[start : start + nodes * (end - first)].view(nodes, end - first)
        start += seen.numel()
        for i in range(nodes):
            expected = [*slots[b, : LENGTHS[b]].tolist(), *windows[b][path_of(drafts, b, i)].tolist()]
            assert of_request[seen[i]].tolist() == expected, (b, i)


@pytest.mark.extended
def test_flashinfer_of_several_widths(runner: ModelRunner) -> None:
    """SGLang's backend, which has names of kernels where that of two others has these; without the kernels."""
    from freedraft.engines.sglang.graphs import capture

    module = flashinfer_backend(runner)
    runner.attn_backend = module.FlashInferAttnBackend(runner)
    runner._get_attention_backend = lambda init_new_workspace: module.FlashInferAttnBackend(runner)
    assert runner.attn_backend.decode_backend == "fa2"
    with OnThisMachine():
        runner.attn_backend.init_cuda_graph_state(BATCH, BATCH * NODES)
        (own,) = runner.attn_backend.cuda_graph_kv_indices
        for width in (1, 4):
            backend = capture(runner, width).backend
            backend.init_cuda_graph_state(BATCH, BATCH * width)
            assert isinstance(backend, module.FlashInferAttnBackend)
            assert backend.cuda_graph_kv_indices[0].data_ptr() == own.data_ptr()


def bytes_held(*backends: Any) -> int:
    """Of all tensors that these hold, each once."""
    found = {}
    for held in [each for backend in backends for each in vars(backend).values()]:
        several = held.values() if isinstance(held, dict) else held if isinstance(held, list) else [held]
        for one in [getattr(each, "buffer", each) for each in several]:  # of a `VerifyMask`
            if isinstance(one, torch.Tensor):
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("name", ["triton", "fa3", "flashinfer"])
def test_all_widths_have_one_mask(runner: ModelRunner, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a byte for each node and token of the context: gigabytes at long contexts, which the memory fraction does
    not count."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from freedraft.engines.sglang import graphs

    classes = {"triton": TritonAttnBackend, "fa3": FlashAttentionBackend}
    make = flashinfer_backend(runner).FlashInferAttnBackend if name == "flashinfer" else classes[name]
    get_context().override("test", speculative_num_draft_tokens=NODES, speculative_eagle_topk=2)
    runner.page_size, runner.sliding_window_size, widths = 1, None, (2, 4)
    runner.attn_backend, runner._get_attention_backend = make(runner), lambda init_new_workspace: make(runner)

    def held() -> int:
        runner.attn_backend.init_cuda_graph_state(BATCH, BATCH * NODES)
        backends = [graphs.capture(runner, width).backend for width in widths]
        for backend, width in zip(backends, widths, strict=True):
            backend.init_cuda_graph_state(BATCH, BATCH * width)
        return bytes_held(runner.attn_backend, *backends)

    with OnThisMachine():
        shared = held()
        monkeypatch.setattr(graphs, "_start_graphs", lambda stock, made, start, *sizes: start(*sizes))
        context = runner.attn_backend.max_context_len
        saved = sum(BATCH * width * (context + (0 if name == "flashinfer" else width)) for width in widths)
        assert held() - shared == saved


@pytest.mark.extended
def test_widths_that_cannot_be_captured(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    """They cost themselves, one line each; where other ranks capture them, too, the start."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from freedraft.engines.sglang.graphs import WidthGraphs

    def backend(init_new_workspace: bool) -> Any:
        made = TritonAttnBackend(runner)
        if made.num_draft_tokens in too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nand more")
        return made

    too_large = {1}
    runner.attn_backend, runner._get_attention_backend = backend(False), backend
    graphs, widths = WidthGraphs(runner), (1, 4, NODES)
    kept = graphs.capture(widths, fixed_width=True)
    assert kept == (4, NODES) and graphs.capture(kept, fixed_width=True) == kept
    (line,) = [line for line in caplog.messages if "GiB" in line]
    assert "drafts of 0 tokens" in line and "20.00 GiB)" in line
    with graphs.use(4):
        assert runner.attn_backend.num_draft_tokens == 4
    with pytest.raises(torch.OutOfMemoryError):  # the other ranks would go on with this width
        graphs.capture(widths, fixed_width=True, alone=False)
    assert graphs.capture((1, NODES), fixed_width=True) == (NODES,)
