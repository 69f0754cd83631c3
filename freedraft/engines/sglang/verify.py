"""Verification of draft trees: from the logits of their nodes to the accepted tokens and the KV that is kept."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from freedraft_kernels import KVPool, TreeBatch, Verification, verify, warm_up
from numpy.typing import NDArray
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import SYNC_TOKEN_IDS_ACROSS_TP, Sampler, apply_custom_logit_processor
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    move_accept_tokens_to_target_kvcache,
)
from sglang.srt.utils.async_probe import sanitize_nan_logits

from freedraft.draft import DraftBatch
from freedraft.engines.draft_round import DraftRanks
from freedraft.engines.sglang_cpu.attention import CpuKVPool
from freedraft.step import TOP_TOKENS

logger = logging.getLogger(__name__)

# SGLang reserves it for writes of padding; no request uses it.
SPARE_SLOT = 0

MAX_PROBABILITIES = 1 << 24  # per call of the sampler
BYTES_OF_EACH = 48  # maximum per probability in SGLang's samplers: sorted probabilities, ids, sums and noise


class Ranks(DraftRanks):
    """Rank 0 decides for all ranks."""

    def share_draft(self, draft: DraftBatch | None) -> DraftBatch:
        """Broadcast rank 0's trees between the hosts, whose launches depend on their width: by SGLang's message queue,
        in shared memory."""
        return self._group.broadcast_object(draft, src=0)  # with one rank, the argument

    def share_outcome(self, verified: Verification) -> Verification:
        """Broadcast rank 0's result: logits of ranks may differ in the last bit, and so may their draws."""
        if not self.several:
            return verified
        width = verified.tokens.shape[1]
        flat = torch.cat((verified.accepted, verified.tokens, verified.lengths[:, None]), 1)
        accepted, tokens, lengths = self._group.broadcast(flat, src=0).split((width, width, 1), 1)
        return Verification(accepted.contiguous(), lengths.squeeze(1).contiguous(), tokens.contiguous())


class TreeVerifier:
    """Verifies trees of B requests with n <= N nodes each. max_nodes: N; sampler: that of SGLang's ModelRunner."""

    def __init__(self, max_nodes: int, ranks: Ranks, device: Any, allocator: Any, sampler: Any) -> None:
        self._max_nodes, self._ranks, self._device, self._allocator = max_nodes, ranks, device, allocator
        self._sampler = sampler
        self.moves = True  # accepted KV; that of chains is in its place, and some pools cannot move it
        self.moves_states = True  # hidden states that clients ask for
        self.grammar_chain: GrammarTree | None = None  # of a step whose tokens only the device knows
        self.barrier: Any = None  # SGLang's, to wait for grammars of the step before
        self._pool: KVPool | None = None
        kv = allocator.get_kvcache()
        kv = kv.full_kv_pool if isinstance(kv, HybridLinearKVPool) else kv
        # Subclasses hold more than K and V, or index slots differently, and move them by their own method.
        if type(kv) in (MHATokenToKVPool, CpuKVPool) and kv.kv_cache_layout == "nhd" and not kv.is_quantized_kv_cache:
            self._pool = KVPool([*kv.k_buffer, *kv.v_buffer])
        elif type(kv) is MLATokenToKVPool and len({*map(len, kv.kv_buffer)}) == 1:  # all layers are here
            self._pool = KVPool(kv.kv_buffer)
        else:
            logger.info("freedraft: accepted KV is compacted by SGLang's own %s", type(kv).__name__)

    def warm_up(self, widths: Sequence[int], max_batch: int, vocab_size: int) -> None:
        """Compile kernels for these widths, before requests arrive and steps are timed."""
        logits = torch.zeros(1, vocab_size, device=self._device)
        warm_up(widths, max_batch, logits, top=TOP_TOKENS, pool=self._pool, slot=SPARE_SLOT)

    def verify(self, batch: Any, host_tree: DraftBatch, tree: TreeBatch | None, output: Any) -> Verification:
        """Return the result of a verification pass, identical on every tensor-parallel rank. tree: `host_tree` on the
        device, None for roots alone; output: the pass's LogitsProcessorOutput, whose logits (float [B * n, V]) are
        processed in place."""
        self._process_logits(batch, output.next_token_logits, host_tree)
        targets = self._targets(batch, host_tree, tree, output.next_token_logits)
        if tree is None:
            tokens = targets.view(-1, 1).to(torch.int32)
            outcome = Verification(torch.zeros_like(tokens), tokens.new_ones(len(tokens)), tokens)
        else:
            outcome = verify(tree, targets.view(tree.tokens.shape))
        sampling = batch.sampling_info
        # SGLang's own rule for sharing tokens: these ranks have bitwise equal logits.
        alike = sampling.is_all_greedy and not batch.has_grammar and not SYNC_TOKEN_IDS_ACROSS_TP
        return outcome if alike else self._ranks.share_outcome(outcome)

    def keep(self, batch: Any, verified: Verification, output: Any) -> None:
        """Apply the result to KV, logprobs and hidden states; arguments as in `verify`."""
        width = verified.tokens.shape[1]
        if not self.moves or width == 1:
            pass
        elif self._pool is not None:
            self._pool.compact(batch.out_cache_loc.view(-1, width), verified)
        else:
            rows = self.flat(verified.accepted, width)[:, :width].contiguous()
            move_accept_tokens_to_target_kvcache(batch, rows, verified.lengths - 1, self._allocator)
        if batch.return_logprob or batch.return_hidden_states:
            rows = self.flat(verified.accepted, width)
            if batch.return_logprob:
                compute_spec_logprobs(batch, output, _by_node(verified), accept_index=rows)
            # SGLang reads N rows for each request.
            if self.moves_states and batch.return_hidden_states and output.hidden_states is not None:
                output.hidden_states = output.hidden_states[rows.view(-1).clamp(min=0)]

    def _process_logits(self, batch: Any, logits: torch.Tensor, tree: DraftBatch) -> None:
        """Apply in place, at each node, everything that SGLang's sampler does to logits before the softmax."""
        sampling = batch.sampling_info
        grammar = self._grammar_mask(batch, tree) if batch.has_grammar else None
        sampling.grammar_mask = None  # the prefill's, if any
        nodes = logits.view(tree.batch_size, tree.max_nodes, -1)
        # Requests with penalties or a custom processor have only a root: see `Tracked.of`.
        roots = nodes[:, 0]
        sampling.apply_logits_bias(roots)
        if sampling.logit_bias is not None:
            nodes[:, 1:] += sampling.logit_bias[:, None]
        if grammar is not None:
            grammar.apply(logits)
        if sampling.has_custom_logit_processor:
            apply_custom_logit_processor(roots, sampling)
        sanitize_nan_logits(logits, "verification of drafts")

    def _grammar_mask(self, batch: Any, tree: DraftBatch) -> Any:
        tokens = torch.from_numpy(tree.tokens.astype(np.int64))
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=self.grammar_chain or GrammarTree.from_host(*tree_links(tree), tokens),
            sampling_info=batch.sampling_info,
            device=self._device,
            barrier=self.barrier,
        )

    def _targets(self, batch: Any, host_tree: DraftBatch, tree: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return the token that SGLang's sampler draws after each node, int64 [B * n]; undefined at padding. Seed and
        position give the noise of plain decoding there; without a seed, every node has its own noise.

        logits: [B * n, V], processed; not modified."""
        sampling, width = batch.sampling_info, host_tree.max_nodes
        if sampling.is_all_greedy:
            return logits.argmax(-1)
        seeds, positions = sampling.sampling_seed, batch.spec_info.positions
        if seeds is None and type(self._sampler) is Sampler and not filters(sampling):
            return drawn(logits, sampling.temperatures.repeat_interleave(width, 0))
        targets, nodes = torch.zeros_like(positions), torch.arange(len(positions), device=logits.device)
        if tree is not None:
            nodes = tree.valid().view(-1).argsort(descending=True, stable=True)[: int(host_tree.counts.sum())]
        for rows in nodes.split(rows_at_once(logits.shape[1])):
            request = rows // width
            of_nodes = replace(
                sampling,
                temperatures=sampling.temperatures[request],
                top_ks=sampling.top_ks[request],
                top_ps=sampling.top_ps[request],
                min_ps=sampling.min_ps[request],
                sampling_seed=None if seeds is None else seeds[request],
                has_custom_logit_processor=False,  # it has been applied
                grammars=None,  # SGLang would synchronize ranks for them; `verify` shares the result
            )
            output = LogitsProcessorOutput(next_token_logits=logits[rows])
            targets[rows] = self._sampler(output, of_nodes, False, [], [], positions[rows]).to(targets.dtype)
        return targets

    def flat(self, accepted: torch.Tensor, width: int) -> torch.Tensor:
        """Return int32 [B, N]: indices of accepted nodes within a batch of `width` nodes per request, -1 after each
        path. accepted: int32 [B, n], as in `Verification`."""
        first = torch.arange(0, len(accepted) * width, width, dtype=torch.int32, device=self._device)[:, None]
        flat = torch.where(accepted >= 0, accepted + first, -1)
        return F.pad(flat, (0, self._max_nodes - accepted.shape[1]), value=-1)


def filters(sampling: Any) -> bool:
    """Whether a request of the batch samples by top-k, top-p or min-p. A greedy one does by top-k."""
    return bool(sampling.need_top_k_sampling or sampling.need_top_p_sampling or sampling.need_min_p_sampling)


def drawn(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return a token of softmax(logits / temperature) for each row, int64 [R]. SGLang divides probabilities by
    exponential noise and takes the largest; these are the logarithms, without its passes for the probabilities.
    logits: float [R, V]; temperatures: float [R, 1]."""

    def of_rows(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
        noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()  # as SGLang: a zero would win
        return noise.addcdiv_(logits, temperatures, value=-1).argmin(-1)

    size = rows_at_once(logits.shape[1])
    return torch.cat([*map(of_rows, logits.split(size), temperatures.split(size))])


def alters_logits(batch: Any) -> bool:
    """Whether verification modifies the logits of a pass in place."""
    sampling = batch.sampling_info
    added = (sampling.logit_bias, sampling.acc_additive_penalties, sampling.acc_scaling_penalties)
    penalised = sampling.penalizer_orchestrator is not None and sampling.penalizer_orchestrator.is_required
    custom = batch.has_grammar or sampling.has_custom_logit_processor
    return custom or penalised or any(each is not None for each in added)


def rows_at_once(vocab_size: int) -> int:
    """Return the number of nodes per call of the sampler."""
    return max(MAX_PROBABILITIES // vocab_size, 1)


def tree_links(tree: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first child and next sibling of each node, int64 [B, n]; -1 for none."""
    nodes = np.arange(tree.max_nodes)
    present = nodes < tree.counts[:, None]
    parents = np.where(present, tree.parents, -2)
    later = nodes[:, None] < nodes  # [i, j]: j comes after i
    children = parents[:, None, :] == nodes[:, None]
    siblings = (parents[:, None, :] == parents[:, :, None]) & later & (present & (tree.parents >= 0))[:, :, None]

    def first(candidates: NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.where(candidates.any(-1), candidates.argmax(-1), -1).astype(np.int64))

    return first(children), first(siblings)


def _by_node(verified: Verification) -> torch.Tensor:
    """Return int32 [B * n]: the token accepted after each node; 0 at nodes off the path."""
    batch, width = verified.accepted.shape
    spare = torch.where(verified.accepted >= 0, verified.accepted, width).to(torch.int64)
    out = verified.tokens.new_zeros(batch, width + 1).scatter_(1, spare, verified.tokens.clamp(min=0))
    return out[:, :width].reshape(-1)
