"""SGLang's own attention backends with our trees, in a process of their own, which `test_attention_masks.py` starts
with TRITON_INTERPRET=1 and the folder of a model in TINY_MODEL.

The kernel of Triton's backend runs in Triton's interpreter, against attention written out. The others are on a real
ModelRunner. FA3's and FlashInfer's kernels are not for this machine: the former are written out here, the latter are
left out, and no graph is captured.
"""

from __future__ import annotations

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

LENGTHS = [7, 1, 4]
BATCH, NODES, WINDOW, DIM = len(LENGTHS), 8, 6, 16


@pytest.fixture(scope="session")
def runner() -> ModelRunner:
    return model_runner(os.environ["TINY_MODEL"])


def model_runner(folder: str) -> ModelRunner:
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.flash_attn"] = MagicMock()
    load_plugins()
    on_cpu = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}
    sizes = {"max_total_tokens": 256, "max_running_requests": BATCH, "speculative_num_draft_tokens": NODES}
    args = ServerArgs(model_path=folder, skip_tokenizer_init=True, speculative_algorithm="sssd", **on_cpu, **sizes)
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


def attention_over_pages(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, softmax_scale: float, causal: bool,
    return_softmax_lse: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """FA3's kernel. k_cache, v_cache: [pages, tokens, heads, D]."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        at = torch.arange(int(cache_seqlens[b]))
        place = page_table[b, at // k_cache.shape[1]].long(), at % k_cache.shape[1]
        keys, values = (c[place].repeat_interleave(q.shape[1] // c.shape[2], 1) for c in (k_cache, v_cache))
        scores = torch.einsum("qhd,shd->hqs", q[start:end], keys) * softmax_scale
        if causal:
            scores = scores.masked_fill(at > (torch.arange(start, end) + len(at) - end)[:, None], -torch.inf)
        out[start:end] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), values)
        lse[:, start:end] = scores.logsumexp(-1)
    return (out, lse) if return_softmax_lse else out


def merged(one: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> Any:
    share = torch.sigmoid(lse - other_lse)[..., None]
    return share * one + (1 - share) * other, None


def random_trees(rng: np.random.Generator, nodes: int, chain: bool = False) -> DraftBatch:
    """A whole tree, a root, all but one node."""
    return random_batch(rng, BATCH, nodes, 10**6, [nodes, 1, nodes - 1], chain)


def path_of(drafts: DraftBatch, row: int, node: int) -> list[int]:
    """The ancestors of a node, from the root on, and itself; padding has none."""
    return path_to(drafts, row, node) if node < drafts.counts[row] else [node]


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
        here = slice(b * nodes, (b + 1) * nodes)
        keys = torch.cat((pool_k[slots[b]], k[here])).repeat_interleave(2, 1)
        values = torch.cat((pool_v[slots[b]], v[here])).repeat_interleave(2, 1)
        at = torch.cat((torch.arange(length), inputs.positions[here]))
        for i in range(int(drafts.counts[b])):
            seen = torch.zeros(length + nodes, dtype=torch.bool)
            seen[[*range(length), *(length + node for node in path_to(drafts, b, i))]] = True
            if window > 0:
                seen &= at >= at[length + i] - window
            scores = torch.einsum("hd,shd->hs", q[b * nodes + i], keys[seen]) / DIM**0.5
            want = torch.einsum("hs,shd->hd", scores.softmax(-1), values[seen])
            worst = max(worst, float((out[b * nodes + i] - want).abs().max()))
    return worst


def test_triton() -> None:
    """Trees are attended to as they should be; under a sliding window chains only (`guards.BACKENDS`)."""
    tree, chain = (random_trees(np.random.default_rng(0), NODES, chain) for chain in (False, True))
    for page in (1, 4):
        assert largest_error(tree, -1, page) < 1e-5
        assert largest_error(chain, WINDOW, page) < 1e-5
    assert largest_error(tree, WINDOW) > 0.1, "SGLang counts windows by position now: draft trees there"


def inputs_and_slots(
    runner: ModelRunner, drafts: DraftBatch, slots: Any
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """Inputs of the pass; the rows of the requests, which get these KV slots; of them those of each request's nodes."""
    rows, table = torch.arange(1, 1 + BATCH), runner.req_to_token_pool.req_to_token
    table[rows, : slots.shape[1]] = slots.to(table.dtype)
    inputs = tree_inputs(on("cpu", drafts), torch.tensor(LENGTHS), sum(LENGTHS))
    nodes = drafts.max_nodes
    return inputs, rows, [table[row, n : n + nodes] for row, n in zip(rows.tolist(), LENGTHS, strict=True)]


def verification(inputs: Any, rows: torch.Tensor, nodes: int, windows: list[torch.Tensor]) -> ForwardBatch:
    """A batch that verifies trees. windows: KV slots of each request's nodes."""
    lengths = torch.tensor(LENGTHS)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=BATCH,
        input_ids=inputs.input_ids,
        req_pool_indices=rows,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=sum(LENGTHS),
        out_cache_loc=torch.cat(windows).to(torch.int64),
        positions=inputs.positions,
        spec_algorithm=SpeculativeAlgorithm.from_string("sssd"),
        spec_info=NgramVerifyInput(
            draft_token=inputs.input_ids, custom_mask=inputs.mask, positions=inputs.positions, draft_token_num=nodes
        ),
    )


@pytest.mark.extended
@pytest.mark.parametrize("hybrid", [False, True])
def test_what_graphs_of_further_widths_share(runner: ModelRunner, hybrid: bool) -> None:
    """Page indices, which are gigabytes at long contexts that the memory fraction does not count; and scratch for
    decoding under MLA."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from freedraft.engines.sglang.graphs import capture

    def triton() -> Any:
        backend = TritonAttnBackend(runner)
        backend.max_kv_splits = 256  # of MLA on an H100
        return backend

    def made() -> Any:
        return HybridAttnBackend(runner, decode_backend=triton(), prefill_backend=triton()) if hybrid else triton()

    def verifies(backend: Any) -> Any:
        return backend.prefill_backend if hybrid else backend

    runner.attn_backend = made()
    runner.attn_backend.init_cuda_graph_state(BATCH, BATCH * NODES)
    own = verifies(runner.attn_backend).cuda_graph_kv_indices
    runner._get_attention_backend = lambda init_new_workspace: made()
    for window in (None, 64):
        runner.sliding_window_size = window
        for width in (1, 4):
            whole = capture(runner, width).backend
            whole.init_cuda_graph_state(BATCH, BATCH * width)
            backend = verifies(whole)
            assert backend.num_draft_tokens == width
            assert (backend.cuda_graph_kv_indices.data_ptr() == own.data_ptr()) == (window is None)
            assert len(backend.cuda_graph_kv_indices) >= BATCH * width * backend.max_context_len
            scratch = backend.cuda_graph_attn_logits.numel()
            assert scratch == BATCH * width * backend.num_head * backend.v_head_dim, "for one part of the keys"


@pytest.mark.extended
@pytest.mark.parametrize("nodes", [2, 5, NODES])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("topk", [1, 2])
def test_what_fa3_takes_from_a_mask(runner: ModelRunner, nodes: int, page: int, topk: int) -> None:
    """Slots of each node's ancestors and of itself, in order, and what it attends to; also on pages of several tokens,
    and where chains are read without a mask."""
    from sglang.srt.layers.attention import flashattention_backend as module
    from sglang.srt.layers.radix_attention import RadixAttention

    from freedraft.engines.sglang.cpu.attention import CpuKVPool

    module.flash_attn_with_kvcache, module.merge_state_v2_wrapper = attention_over_pages, merged
    rng, batch = np.random.default_rng(nodes), len(LENGTHS)
    drafts = random_trees(rng, nodes, chain=topk == 1)
    pages = 1 + rng.permutation(200 // page)[: batch * 20 // page].reshape(batch, 20 // page)
    slots = torch.from_numpy((pages[..., None] * page + np.arange(page)).reshape(batch, 20))
    inputs, rows, windows = inputs_and_slots(runner, drafts, slots)
    get_context().override("test", speculative_num_draft_tokens=nodes, speculative_eagle_topk=topk)
    before, runner.page_size, runner.sliding_window_size = runner.token_to_kv_pool, page, None
    pool = runner.token_to_kv_pool = CpuKVPool(256, page, torch.float32, 2, 8, 1, "cpu", False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.from_numpy(rng.standard_normal(buffer.shape)))
    backend = module.FlashAttentionBackend(runner)
    forward = verification(inputs, rows, nodes, windows)
    backend.init_forward_metadata(forward)
    query = torch.from_numpy(rng.standard_normal((batch * nodes, 4, 8))).float()
    out = backend.forward_extend(query, None, None, RadixAttention(4, 8, 0.5, 2, 0), forward, False)
    made = backend.forward_metadata_spec_decode_expand
    for b, window in enumerate(windows):
        for i in range(nodes):
            path = path_of(drafts, b, i)
            row = b * nodes + i
            seen = torch.cat((slots[b, : LENGTHS[b]], window[path]))
            k, v = (buffer[0][seen.long()].repeat_interleave(2, 1) for buffer in (pool.k_buffer, pool.v_buffer))
            weights = (0.5 * torch.einsum("hd,shd->hs", query[row], k)).softmax(-1)
            if i < drafts.counts[b] or topk > 1:  # chains see one another's padding, which nobody reads
                torch.testing.assert_close(out[row].view(4, 8), torch.einsum("hs,shd->hd", weights, v))
            if topk > 1:
                assert int(made.cache_seqlens_int32[row]) == len(path)
                assert made.page_table[row, : len(path)].tolist() == window[path].tolist()
    runner.token_to_kv_pool, runner.page_size = before, 1


class OnThisMachine(TorchFunctionMode):
    """FlashInfer's backend allocates on "cuda", wherever the model is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}) | ({"device": "cpu"} if (kwargs or {}).get("device") == "cuda" else {}))


def flashinfer_backend(runner: ModelRunner) -> Any:
    """The module of SGLang's backend, without FlashInfer's kernels."""
    from sglang.srt.layers.attention import flashinfer_backend as module

    for name in ("BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        setattr(module, name, MagicMock())
    module.BatchDecodeWithPagedKVCacheWrapper = MagicMock()
    runner.sliding_window_size = None
    return module


@pytest.mark.extended
@pytest.mark.parametrize("nodes", [2, 5, NODES])
def test_what_flashinfers_planner_takes_from_a_mask(runner: ModelRunner, nodes: int) -> None:
    """For each node, a mask over the slots of its request and of its tree."""
    module = flashinfer_backend(runner)
    drafts = random_trees(np.random.default_rng(nodes), nodes)
    slots = (1 + torch.randperm(200)[: BATCH * 20]).reshape(BATCH, 20)
    inputs, rows, windows = inputs_and_slots(runner, drafts, slots)
    get_context().override("test", speculative_num_draft_tokens=nodes)
    with OnThisMachine():
        backend = module.FlashInferAttnBackend(runner)
        backend.init_forward_metadata(verification(inputs, rows, nodes, windows))
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


@pytest.mark.extended
def test_widths_that_cannot_be_captured(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    """They cost themselves, one line each; where other ranks capture them, too, the start."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.runtime_context import get_parallel

    from freedraft.engines.sglang.drafting import AcceptedTokens, Drafting
    from freedraft.engines.sglang.graphs import WidthGraphs
    from freedraft.engines.sglang.verify import Ranks
    from freedraft.guarded_method import GuardedMethod
    from freedraft.method import METHODS
    from freedraft.step import EngineContext

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
    spec, context = METHODS["sssd"], EngineContext(vocab_size=100, max_draft_tokens=NODES - 1, widths=widths)
    guarded = GuardedMethod(spec, spec.options.parse({"policy": "fixed", "hardware": "cpu"}), context)
    drafting = Drafting(guarded, widths, 4, AcceptedTokens(256, NODES), trees=True)
    ranks = Ranks(get_parallel().tp_group)
    worker = worker_of(runner, _drafting=drafting, _backend="fa3", _ranks=ranks)
    worker._capture()
    assert worker.widths == (4, NODES) and drafting._widths.tolist() == [4, NODES]
    assert guarded.method.controller.widths.tolist() == [4, NODES]
    guarded.close()


def worker_of(runner: ModelRunner, **given: Any) -> Any:
    from freedraft.engines.sglang.graphs import WidthGraphs
    from freedraft.engines.sglang.worker import TreeVerifyWorker

    worker = TreeVerifyWorker.__new__(TreeVerifyWorker)
    worker.model_runner, worker._graphs, worker.widths = runner, WidthGraphs(runner), (1, 4, NODES)
    worker._backend, worker._draft_model = "triton", None
    for name, value in given.items():
        setattr(worker, name, value)
    return worker


@pytest.mark.extended
def test_encoders_are_refused(runner: ModelRunner) -> None:
    from freedraft.config import ConfigError

    worker = worker_of(runner)
    worker._check_model()
    runner.model_config.is_encoder_decoder = True
    with pytest.raises(ConfigError, match="has an encoder"):
        worker._check_model()
