"""The verify worker: drafts on the host, verifies the trees in one forward pass, keeps the accepted path's KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from freedraft_kernels import (
    KVPool,
    TreeBatch,
    Verification,
    target_probs,
    tree_inputs,
    verify_greedy,
    verify_sampled,
)
from numpy.typing import NDArray
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_device, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    move_accept_tokens_to_target_kvcache,
    record_stream_for_v2_verify,
)

from freedraft.config import ConfigError
from freedraft.draft import DraftBatch
from freedraft.engines.sglang.graphs import WidthGraphs
from freedraft.engines.sglang.guards import widths_for
from freedraft.engines.sglang.platform import selected
from freedraft.engines.sglang.prompt_states import with_states
from freedraft.engines.sglang.requests import RequestTokens, tenant_of, text_of
from freedraft.engines.sglang.source import DraftSource, DraftStep, SourceContext

logger = logging.getLogger(__name__)


class TreeVerifyWorker(BaseSpecWorker):
    """What SGLang's scheduler drives in place of the target's own worker. B requests, N = most nodes, n = this step's
    width.

    Every step relays the tokens it accepted, padded to N per request, to the next step
    (`NgramVerifyInput.accept_tokens`), with overlap scheduling through SGLang's future map and without it directly;
    what is drafted from depends on nothing else, so both modes run the same code.
    """

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
        *,
        make_source: Callable[[SourceContext], DraftSource],
        every_rank: bool = False,
    ) -> None:
        super().__init__()
        self._every_rank = every_rank
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = get_device().device
        self.max_nodes: int = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self.max_nodes
        self._check_model()
        self._tp = get_parallel().tp_group
        self._make_source = make_source
        self._source: DraftSource | None = None
        self._requests = RequestTokens()
        self._known: WeakValueDictionary[str, Any] = WeakValueDictionary()  # SGLang's requests, by id
        self._ended: list[str] = []
        self._pool: KVPool | None = None
        self.widths: tuple[int, ...] = (self.max_nodes,)
        self._graphs = WidthGraphs(self.model_runner)
        self._draft_failed = False
        self._decoded_last = False

    def _check_model(self) -> None:
        from sglang.srt.configs.hybrid_arch import mambaish_config

        if mambaish_config(self.model_runner.model_config) is not None:
            raise ConfigError(
                "--speculative-algorithm: this model has recurrent layers, whose state cannot follow a draft tree: "
                "start without it"
            )

    @property
    def draft_worker(self) -> None:
        return None

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        kv = self.token_to_kv_pool_allocator.get_kvcache()
        if isinstance(kv, MHATokenToKVPool) and not kv.is_quantized_kv_cache:
            try:
                self._pool = KVPool([buffer.flatten(0, -3) for buffer in (*kv.k_buffer, *kv.v_buffer)])
            except (ValueError, RuntimeError) as error:  # a layout of its own: SGLang's move knows it
                logger.info("freedraft: accepted tokens are moved by SGLang (%s)", error)

    def init_attention_backends(self) -> None:
        backend = self.model_runner.server_args.attention_backend or ""
        decode = getattr(self.model_runner, "decode_attention_backend_str", None) or backend
        self.widths = widths_for(decode, self.max_nodes)
        if self._every_rank or self._tp.rank_in_group == 0:
            self._source = self._make_source(
                SourceContext(
                    vocab_size=self.model_runner.model_config.vocab_size,
                    max_nodes=self.max_nodes,
                    max_batch=self.model_runner.max_running_requests,
                    widths=self.widths,
                    tokenizer=self._target_worker.tokenizer,
                    target_worker=self._target_worker,
                )
            )

    def init_cuda_graphs(self) -> None:
        self._graphs.capture(self.widths)
        capture = getattr(self._source, "capture_graphs", None)  # of sources that run the model
        if capture is not None:
            capture()

    # -- one step ------------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        record_stream_for_v2_verify(batch, None, torch.get_device_module(self.device).current_stream())
        if batch.forward_mode.is_decode() and len(batch.reqs):
            return self._decode(batch, on_publish)
        self._decoded_last = False
        if batch.forward_mode.is_extend():
            self._begin(batch.reqs)
        if batch.forward_mode.is_extend() and getattr(self._source, "needs_states", False):
            result, states = with_states(self._target_worker, batch, pp_proxy_tensors=pp_proxy_tensors)
            self._tell_states(batch.reqs, states)
        else:
            result = self._target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
        tokens = torch.zeros(len(batch.reqs), self.max_nodes, dtype=torch.int32, device=self.device)
        tokens[:, 0] = result.next_token_ids
        lengths = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
        new_seq_lens = batch.seq_lens.clone()
        if on_publish is not None:
            on_publish(new_seq_lens)
        return self._result(result, result.next_token_ids, tokens, lengths, new_seq_lens)

    def _decode(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> GenerationBatchResult:
        host_tree = self._draft(batch)
        size, width = host_tree.tokens.shape
        tree = TreeBatch.from_numpy(
            host_tree.tokens, host_tree.parents, host_tree.depths, host_tree.counts, self.device
        )
        on_cpu = selected()  # its attention reads the query layout
        inputs = tree_inputs(
            tree,
            batch.seq_lens,
            layout="query" if on_cpu else "full",
            seq_lens_sum=None if on_cpu else int(batch.seq_lens_cpu.sum()),
        )
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = inputs.input_ids
        batch.out_cache_loc = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=size,
            draft_token_num=width,
            device=self.device,
        )
        batch.spec_info = NgramVerifyInput(
            draft_token=inputs.input_ids,
            custom_mask=inputs.mask.view(-1),
            positions=inputs.positions,
            draft_token_num=width,
        )
        with self._graphs.use(width):
            result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        logits = result.logits_output.next_token_logits
        self._process_logits(batch, logits, host_tree)
        verified = self._agree(self._verify(batch, tree, logits))
        self._compact(batch, verified)
        new_seq_lens = batch.seq_lens + verified.lengths
        if batch.return_logprob:
            accepted = self._flat(verified.accepted, width)
            predict = _by_node(verified)
            compute_spec_logprobs(batch, result.logits_output, predict, accept_index=accepted)
        if on_publish is not None:
            on_publish(new_seq_lens)
        batch.forward_mode = ForwardMode.DECODE
        self._decoded_last = True
        tokens = F.pad(verified.tokens.clamp(min=0), (0, self.max_nodes - verified.tokens.shape[1]))
        return self._result(result, tokens.flatten(), tokens, verified.lengths, new_seq_lens)

    def _result(
        self,
        target: Any,
        next_token_ids: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        new_seq_lens: torch.Tensor,
    ) -> GenerationBatchResult:
        """What the scheduler gets. tokens: int32 [B, N], new tokens padded with 0; lengths: int32 [B], how many."""
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=target.can_run_cuda_graph,
            accept_lens=lengths,
            new_seq_lens=new_seq_lens,
            next_draft_input=NgramVerifyInput(
                draft_token_num=self.max_nodes,
                new_seq_lens=new_seq_lens,
                accept_tokens=tokens.flatten(),
                accept_lens=lengths,
            ),
            speculative_num_draft_tokens=self.max_nodes,
        )

    # -- draft ---------------------------------------------------------------------------------------------------------

    def _begin(self, requests: Sequence[Any]) -> None:
        """Hand prompts to the source while their prefill runs; a retracted request's prompt includes its output so
        far."""
        if self._source is None or self._draft_failed:
            return
        try:
            for request in requests:
                if (tokens := self._requests.begin(request)) is not None:
                    self._hand_over(request, tokens)
        except Exception:
            self._stop_drafting()

    def _hand_over(self, request: Any, tokens: NDArray[np.int32]) -> None:
        assert self._source is not None
        self._source.begin(request.rid, tokens)
        belongs = getattr(self._source, "belongs", None)  # of sources that keep tenants apart
        if belongs is not None:
            belongs(request.rid, tenant_of(request))
        self._known[request.rid] = request

    def _tell_states(self, requests: Sequence[Any], states: torch.Tensor) -> None:
        """Of sources that want them: the last hidden states behind prompts, as far as these have been read."""
        if self._draft_failed:
            return
        try:
            for request, state in zip(requests, states, strict=True):
                if not request.output_ids:  # not one that was retracted in the midst of its output
                    self._source.take_state(request.rid, state)  # type: ignore[union-attr]
        except Exception:
            self._stop_drafting()

    def _draft(self, batch: Any) -> DraftBatch:
        """The trees of this step, [B, n], the same on every tensor-parallel rank: rank 0's, which it broadcasts."""
        tree = None
        if self._source is not None:
            tokens = batch.spec_info.accept_tokens.cpu().numpy().astype(np.int32, copy=False)
            lengths = batch.spec_info.accept_lens.cpu().numpy()
            tree = self._ask(batch, tokens.reshape(len(batch.reqs), self.max_nodes), lengths)
        if self._tp.world_size > 1:
            tree = self._tp.broadcast_object(tree, src=0)
        assert tree is not None
        return tree

    def _ask(self, batch: Any, tokens: NDArray[np.int32], lengths: NDArray[np.int32]) -> DraftBatch:
        """The source's trees, cut to the smallest prepared width that holds them; without branches to offer, the
        roots."""
        assert self._source is not None
        size = len(batch.reqs)
        width, tree = self.widths[0], None
        if not self._draft_failed:
            try:
                wanted = 1 if self._one_at_a_time(batch) else self._source.width(size)
                # Also at width 1 tokens are handed on, so that drafting can resume.
                step = self._step(batch, tokens, lengths)
                tree = self._source.draft(step, max(1, min(wanted, self.max_nodes)))
                if self._ended:
                    self._source.finish(self._ended)
                most = max(1, min(wanted, int(tree.counts.max())))
                width = next(w for w in self.widths if w >= most)
            except Exception:
                self._stop_drafting()
                tree = None
        out = DraftBatch.empty(size, width)
        if tree is not None:
            kept = min(width, tree.max_nodes)
            for target, source in zip(
                (out.tokens, out.parents, out.depths), (tree.tokens, tree.parents, tree.depths), strict=True
            ):
                target[:, :kept] = source[:size, :kept]
            np.clip(tree.counts[:size], 1, kept, out=out.counts)
            if wanted == 1:
                out.counts[:] = 1
        else:
            out.counts[:] = 1
        # The root comes from the engine, whatever the source holds.
        out.tokens[:, 0] = tokens[np.arange(size), lengths - 1]
        out.parents[:, 0] = -1
        out.depths[:, 0] = 0
        return out

    def _step(self, batch: Any, tokens: NDArray[np.int32], lengths: NDArray[np.int32]) -> DraftStep:
        """What the source has not seen yet. Normally the tokens that the last step accepted, with no loop over
        requests."""
        assert self._source is not None
        ids = [request.rid for request in batch.reqs]
        totals = batch.seq_lens_cpu.numpy() + 1  # the root is not in the KV cache
        self._ended = []
        for row in self._requests.advance(ids, totals, lengths):
            if batch.reqs[row].finished():  # with a grammar, SGLang runs a request once more after its end
                self._requests.forget(ids[row])
                self._ended.append(ids[row])
                continue
            known = int(totals[row] - lengths[row])
            self._hand_over(batch.reqs[row], self._requests.rebuild(batch.reqs[row], known))
        if gone := self._requests.sweep(ids, self.model_runner.max_running_requests):
            self._source.finish(gone)
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        mask = np.arange(self.max_nodes) < lengths[:, None]
        return DraftStep(ids, tokens[mask], offsets, batch, self._decoded_last)

    @staticmethod
    def _one_at_a_time(batch: Any) -> bool:
        """Whether some request's distribution depends on tokens of this very step, so that a tree has no one mask or
        bias: penalties count tokens, custom logit processors and watermarks may look at them."""
        sampling = batch.sampling_info
        return (
            sampling.acc_additive_penalties is not None
            or sampling.acc_scaling_penalties is not None
            or sampling.has_custom_logit_processor
            or sampling.has_watermark_candidates
        )

    def _stop_drafting(self) -> None:
        """Drafting is an aid: when it fails, decode without it. Not where all ranks run the model to draft: the others
        would wait for this one for ever."""
        if self._every_rank and self._tp.world_size > 1:
            raise
        self._draft_failed = True
        logger.exception("freedraft: drafting failed; the server goes on without speculation")

    # -- verify --------------------------------------------------------------------------------------------------------

    def _process_logits(self, batch: Any, logits: torch.Tensor, tree: DraftBatch) -> None:
        """In place: everything that SGLang's sampler does to logits before the softmax, at each node."""
        sampling, width = batch.sampling_info, tree.max_nodes
        grammar = self._grammar_mask(batch, tree) if batch.has_grammar else None
        sampling.grammar_mask = None  # the prefill's, if any
        if sampling.has_custom_logit_processor:
            apply_custom_logit_processor(logits, sampling, num_tokens_in_batch=width)
        if width == 1:
            sampling.apply_logits_bias(logits)
        elif sampling.logit_bias is not None:
            logits.add_(sampling.logit_bias.repeat_interleave(width, 0))
        if grammar is not None:
            grammar.apply(logits)

    def _grammar_mask(self, batch: Any, tree: DraftBatch) -> Any:
        child, sibling = tree_links(tree)
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=GrammarTree.from_host(child, sibling, torch.from_numpy(tree.tokens.astype(np.int64))),
            sampling_info=batch.sampling_info,
            device=self.device,
            barrier=None,
        )

    def _verify(self, batch: Any, tree: TreeBatch, logits: torch.Tensor) -> Verification:
        """logits: [B * n, V], processed."""
        sampling = batch.sampling_info
        logits = logits.view(tree.batch_size, tree.max_nodes, -1)
        if sampling.is_all_greedy:
            return verify_greedy(tree, logits.argmax(-1))
        probs = target_probs(
            logits,
            sampling.temperatures.view(-1),
            top_ks=sampling.top_ks if sampling.need_top_k_sampling else None,
            top_ps=sampling.top_ps if sampling.need_top_p_sampling else None,
            min_ps=sampling.min_ps if sampling.need_min_p_sampling else None,
        )
        seeds = sampling.sampling_seed
        if seeds is None:
            seeds = torch.randint(2**62, (tree.batch_size,), device=self.device)
        return verify_sampled(tree, probs, seeds.to(torch.int64), batch.seq_lens)

    def _agree(self, verified: Verification) -> Verification:
        """Rank 0's outcome on all tensor-parallel ranks: their logits may differ in the last bit, and their coins."""
        if self._tp.world_size == 1:
            return verified
        width = verified.tokens.shape[1]
        flat = torch.cat((verified.accepted, verified.tokens, verified.lengths[:, None], verified.bonus[:, None]), 1)
        self._tp.broadcast(flat, src=0)
        accepted, tokens, lengths, bonus = flat.split((width, width, 1, 1), 1)
        return Verification(
            accepted.contiguous(), lengths.squeeze(1).contiguous(), tokens.contiguous(), bonus.squeeze(1).contiguous()
        )

    def _compact(self, batch: Any, verified: Verification) -> None:
        """Bring the KV of the accepted path to the front of the verify window."""
        width = verified.tokens.shape[1]
        if width == 1:
            return
        if self._pool is not None:
            self._pool.compact(batch.out_cache_loc.view(-1, width), verified)
        else:
            move_accept_tokens_to_target_kvcache(
                batch,
                self._flat(verified.accepted, width)[:, :width].contiguous(),
                verified.lengths - 1,
                self.token_to_kv_pool_allocator,
            )

    def _flat(self, accepted: torch.Tensor, width: int) -> torch.Tensor:
        """int32 [B, N]: accepted nodes counted over the whole batch, -1 beyond each path."""
        first = torch.arange(0, accepted.numel(), width, dtype=torch.int32, device=self.device)[:, None]
        flat = torch.where(accepted >= 0, accepted + first, -1)
        return F.pad(flat, (0, self.max_nodes - width), value=-1)

    # -- calls from the scheduler --------------------------------------------------------------------------------------

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        if self._source is not None and not self._draft_failed:
            self._source.observe(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self._source is not None:
            self._requests.forget(rid)
            request = self._known.pop(rid, None)
            ended = getattr(self._source, "ended", None)  # of sources that learn
            if ended is not None and request is not None and not self._draft_failed:
                ended(rid, text_of(request))
            self._source.finish([rid])

    def clear_cache_pool(self) -> None:
        """SGLang flushes its prefix cache: nothing of ours lies there."""

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        documents = documents_of(token_chunks)
        if self._source is None:  # rank 0 holds the datastore
            return sum(len(document) for document in documents)
        return self._source.add_corpus(corpus_id, documents)

    def commit_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        if self._source is not None:
            self._source.commit_corpus(corpus_id)

    def remove_external_corpus(self, corpus_id: str) -> None:
        if self._source is not None:
            self._source.remove_corpus(corpus_id)

    def list_external_corpora(self) -> dict[str, int]:
        return self._source.corpora() if self._source is not None else {}


def tree_links(tree: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each node, int64 [B, n], -1 where there is none."""
    nodes = np.arange(tree.max_nodes)
    present = nodes < tree.counts[:, None]
    parents = np.where(present, tree.parents, -2)
    later = nodes[:, None] < nodes  # [i, j]: j comes after i
    children = parents[:, None, :] == nodes[:, None]
    siblings = (parents[:, None, :] == parents[:, :, None]) & later & (present & (tree.parents >= 0))[:, :, None]

    def first(candidates: NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.where(candidates.any(-1), candidates.argmax(-1), -1).astype(np.int64))

    return first(children), first(siblings)


def documents_of(token_chunks: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """SGLang's corpus chunks as documents: it cuts documents anywhere, and marks their starts with a negative token."""
    flat = np.fromiter((token for chunk in token_chunks for token in chunk), np.int64)
    pieces = np.split(flat, np.flatnonzero(flat < 0))
    return [tokens.astype(np.int32) for piece in pieces if len(tokens := piece[piece >= 0])]


def _by_node(verified: Verification) -> torch.Tensor:
    """int32 [B * n]: the token accepted after each node; 0 at nodes off the path."""
    batch, width = verified.accepted.shape
    spare = torch.where(verified.accepted >= 0, verified.accepted, width).to(torch.int64)
    out = verified.tokens.new_zeros(batch, width + 1).scatter_(1, spare, verified.tokens.clamp(min=0))
    return out[:, :width].reshape(-1)
