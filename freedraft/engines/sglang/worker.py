"""`TreeVerifyWorker`: speculative worker that SGLang's scheduler calls in place of the target's own worker."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from freedraft_kernels import TreeBatch, TreeInputs, tree_inputs
from numpy.typing import NDArray
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_registry import get_spec as algorithm_of
from sglang.srt.speculative.spec_utils import (
    commit_mamba_states_after_verify,
    prepare_mamba_track_for_verify,
    record_stream_for_v2_verify,
)

from freedraft.config import ConfigError
from freedraft.draft import DraftBatch
from freedraft.engines.draft_round import on_device
from freedraft.engines.sglang.algorithm import TreeAlgorithm, context_of_worker, start_line
from freedraft.engines.sglang.drafting import AcceptedTokens, BatchDrafting
from freedraft.engines.sglang.graphs import WidthGraphs
from freedraft.engines.sglang.guards import BACKENDS, shape_for, verify_backend_of, widths_for
from freedraft.engines.sglang.verify import BYTES_OF_EACH, Ranks, TreeVerifier, alters_logits, rows_at_once, tree_links
from freedraft.guarded_method import GuardedMethod
from freedraft.method import MethodSpec

logger = logging.getLogger(__name__)


def documents_of(token_chunks: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """Return the documents in SGLang's corpus chunks, which split them anywhere; a negative token starts a document."""
    flat = np.fromiter((token for chunk in token_chunks for token in chunk), np.int64)
    pieces = np.split(flat, np.flatnonzero(flat < 0))
    return [tokens.astype(np.int32) for piece in pieces if len(tokens := piece[piece >= 0])]


class TreeVerifyWorker(BaseSpecWorker):
    """Drafts on the host, verifies the trees in one forward pass and keeps the KV of accepted paths. B requests, N =
    maximum nodes, n = width of the step.

    Every step passes its accepted tokens to the next one (`AcceptedTokens`), with and without overlap scheduling;
    drafts depend on nothing else, so both modes run the same code. SGLang's own relay
    (`NgramVerifyInput.accept_tokens`) is not read.
    """

    own = 0  # draft tokens of another drafter that each step verifies
    together = False  # whether ranks with other requests run the same steps
    drafting_type: type[BatchDrafting] = BatchDrafting
    captured: ClassVar[dict[str, Any]] = {}  # of SGLang's forward pass, besides logits

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, *, spec: MethodSpec) -> None:
        super().__init__()
        self._spec = spec
        self._target_worker, self._draft_worker = target_worker, None  # what SGLang's properties return
        self.model_runner = target_worker.model_runner
        self.device = get_device().device
        self.max_nodes: int = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self.max_nodes
        self._ranks = Ranks(get_dp_tp_group())  # those with the same requests
        self.together = get_parallel().attn_dp_size > 1
        self._drafting: BatchDrafting | None = None  # on tensor-parallel rank 0; the others verify the same trees
        self._draft_model: Any = None
        self._window_rows: Any = None
        self._reads_states = False  # of prompts, on all ranks: their prefills must be the same
        self.widths: tuple[int, ...] = (self.max_nodes,)
        self._graphs = WidthGraphs(self.model_runner)

    @property
    def name(self) -> str:
        return self._spec.name

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        if self._spec.runs_model and getattr(self._spec.options.read(), "window", None):
            from freedraft.engines.sglang.draft_model import WindowRows

            self._window_rows = WindowRows(self.req_to_token_pool, self.model_runner.page_size or 1)
            self.model_runner.init_kv_index_translator()  # it holds the tensor of all rows
        self._verifier = TreeVerifier(
            self.max_nodes, self._ranks, self.device, self.token_to_kv_pool_allocator, self.model_runner.sampler
        )
        self._accepted = AcceptedTokens(len(self.req_to_token_pool.req_to_token), self.max_nodes)

    def init_attention_backends(self) -> None:
        self._backend = verify_backend_of(self.model_runner)
        runner = self.model_runner
        adapters = runner.lora_manager is not None
        self.widths = widths_for(
            self._backend, self.max_nodes, adapters=adapters, together=self.together, least=self.own + 1
        )
        page, window = runner.page_size or 1, runner.sliding_window_size
        shape = shape_for(self.name, self._backend, runner.model_config, window, page)
        self._trees = self._verifier.moves = shape != "chain" and get_spec().speculative_eagle_topk > 1
        self._recurrent = mambaish_config(runner.model_config) is not None
        algorithm = algorithm_of(self._spec.name)
        assert isinstance(algorithm, TreeAlgorithm)
        algorithm.take_prompts = self.take_prompts
        if get_disagg().disaggregation_mode == "prefill":  # it decodes nothing
            return
        if self._spec.runs_model:
            from freedraft.engines.sglang.draft_model import PagedDraftModel

            try:
                self._draft_model = PagedDraftModel(runner, self._ranks, self._window_rows)
            except ConfigError as error:
                raise ConfigError(f"--speculative-algorithm {self.name} {error}") from None
            self._draft_model.trees = self._trees
        if not self._ranks.first:
            self._reads_states = self._ranks.agree(True)
            if self._draft_model is not None:
                self._draft_model.serve()
            return
        context = context_of_worker(self._target_worker, self.widths, self.own)
        guarded = GuardedMethod(self._spec, self._spec.options.read(), context)
        self._reads_states = self._ranks.agree(guarded.method.needs_prompt_states)
        if self._draft_model is not None:
            with self._ranks.leading(), guarded:
                guarded.method.prepare(self._draft_model)
        running = runner.max_running_requests
        self._drafting = self.drafting_type(guarded, self.widths, running, self._accepted, trees=self._trees)
        algorithm.receive_step = self._drafting.receive_step

    def init_cuda_graphs(self) -> None:
        runner = self.model_runner
        self._verifier.warm_up(self.widths, runner.max_running_requests, runner.model_config.vocab_size)
        self._capture()
        runner.init_decode_cuda_graph = partial(self._recapture, runner.init_decode_cuda_graph)
        if self._ranks.first:
            logger.info(start_line(runner, self.name, self._backend, self.widths, trees=self._trees))

    def _capture(self) -> None:
        fixed_width, alone = BACKENDS[self._backend].fixed_width, not self._ranks.several
        self.widths = self._graphs.capture(self.widths, fixed_width=fixed_width, alone=alone)
        if self._drafting is not None:
            self._drafting.keep_widths(self.widths)
        if self._draft_model is not None:
            self._draft_model.capture()

    def _recapture(self, original: Callable[[], None]) -> None:
        """Capture all graphs again with SGLang's own, after weights were loaded to other addresses."""
        captured = [self._graphs] if self._draft_model is None else [self._graphs, self._draft_model]
        for graphs in captured:
            graphs.clear()
        original()
        self._capture()

    def prewarm_sampling(self) -> Any:
        """Report the memory that SGLang's sampler needs for the nodes of one call, so that SGLang leaves it out of a KV
        cache that it sizes after its CUDA graphs."""
        from sglang.srt.model_executor.model_runner import SamplingPrewarmResult

        runner = self.model_runner
        vocab_size = runner.model_config.vocab_size
        rows = min(runner.max_running_requests * self.max_nodes, rows_at_once(vocab_size))
        taken = BYTES_OF_EACH * rows * vocab_size
        runner.sampling_prewarm_result = SamplingPrewarmResult(sampling_headroom_bytes=taken)
        return runner.sampling_prewarm_result

    # -- one step ------------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None = None, pp_proxy_tensors: Any = None,
        grammar_barrier: Any = None,
    ) -> GenerationBatchResult:  # fmt: skip
        record_stream_for_v2_verify(batch, None, torch.get_device_module(self.device).current_stream())
        self._verifier.barrier = grammar_barrier
        if batch.forward_mode.is_decode() and len(batch.reqs):
            return self._decode(batch, on_publish)
        if batch.forward_mode.is_idle() and not batch.is_extend_in_batch:
            return self._idle(batch, on_publish)
        return self._prefill(batch, on_publish, pp_proxy_tensors)

    def _publish(
        self, batch: Any, target: Any, tokens: torch.Tensor, lengths: torch.Tensor, new_seq_lens: torch.Tensor,
        on_publish: Callable[[torch.Tensor], None] | None,
    ) -> GenerationBatchResult:  # fmt: skip
        """Pass the accepted tokens to the next step; return the scheduler's result. tokens: int32 [B, N], padded with
        0; lengths: int32 [B], number of valid tokens."""
        if self._drafting is not None and len(batch.reqs):
            self._accepted.put(batch.req_pool_indices_cpu, tokens, lengths, new_seq_lens)
        if on_publish is not None:
            on_publish(new_seq_lens)
        relayed = {"new_seq_lens": new_seq_lens, "accept_lens": lengths}
        return GenerationBatchResult(
            logits_output=target.logits_output, can_run_cuda_graph=target.can_run_cuda_graph,
            **relayed, **self._relay(batch, tokens, relayed),
        )  # fmt: skip

    def _relay(self, batch: Any, tokens: torch.Tensor, relayed: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return what the scheduler and the next step read, by SGLang's names."""
        flat = tokens.flatten()
        return {
            "next_token_ids": flat,
            "next_draft_input": NgramVerifyInput(draft_token_num=self.max_nodes, accept_tokens=flat, **relayed),
            "speculative_num_draft_tokens": self.max_nodes,
        }

    def _begin(self, batch: Any) -> None:
        if self._drafting is not None:
            self._drafting.interrupt()
            if batch.forward_mode.is_extend():
                self._drafting.begin(batch.reqs)

    def _first(self, next_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that prompts gain, int32 [B, N], padded with 0, and their number."""
        lengths = torch.ones(len(next_token_ids), dtype=torch.int32, device=self.device)
        return F.pad(next_token_ids.to(torch.int32)[:, None], (0, self.max_nodes - 1)), lengths

    def take_prompts(self, batch: Any, tokens: torch.Tensor) -> NgramVerifyInput:
        """Take prompts that another server has read, and their first tokens, int64 [B]. Drafts begin with the next
        step."""
        first, lengths = self._first(tokens)
        if self._drafting is not None:
            self._accepted.put(batch.req_pool_indices_cpu, first, lengths, batch.seq_lens)
        gained = {"accept_tokens": first.flatten(), "accept_lens": lengths, "new_seq_lens": batch.seq_lens}
        return NgramVerifyInput(draft_token_num=self.max_nodes, **gained)

    def _prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:
        self._begin(batch)
        result = self._read_prompts(batch, pp_proxy_tensors)
        published = self._publish(
            batch, result, *self._first(result.next_token_ids), batch.seq_lens.clone(), on_publish
        )
        published.next_token_ids = result.next_token_ids
        return published

    def _read_prompts(self, batch: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:
        drafting, extends = self._drafting, batch.forward_mode.is_extend()
        forward = partial(self._target_worker.forward_batch_generation, batch, pp_proxy_tensors=pp_proxy_tensors)
        if not (extends and self._reads_states):
            return forward()
        from sglang.srt.model_executor import forward_batch_info as info

        # SGLang computes the prompts' last states anyway. Hidden states that requests ask for are still returned.
        mode = max(
            info.CaptureHiddenMode.LAST, batch.return_hidden_states_mode, info.get_server_return_hidden_states_mode()
        )
        result = forward(capture_hidden_mode=mode)
        if drafting is not None:
            states = result.logits_output.hidden_states
            if mode.is_full():
                states = states[(torch.tensor(batch.extend_lens).cumsum(0) - 1).to(states.device)]
            drafting.keep_states(batch.reqs, states)
        return result

    def _idle(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """Take part, without requests, in a verification of other attention ranks."""
        self._begin(batch)
        tokens, lengths = self._first(nothing := batch.seq_lens)
        inputs = TreeInputs(nothing, nothing, self._with_padding(batch, nothing.bool(), self.max_nodes))
        batch.spec_info = self._verify_input(inputs, self.max_nodes)
        forward = ForwardBatch.init_new(batch, self.model_runner, return_hidden_states_before_norm=False)
        # SGLang would cut hidden states, which nobody asked for.
        forward.post_forward_mlp_sync_batch = lambda output: None
        result = self._target_worker.forward_batch_generation(None, forward, is_verify=True)
        return self._publish(batch, result, tokens, lengths, nothing, on_publish)

    def _with_padding(self, batch: Any, mask: torch.Tensor, width: int) -> torch.Tensor:
        """Append to a mask that of requests of one cached token, by which SGLang pads this rank's to as many as the
        largest attention rank has."""
        added = (get_parallel().attn_tp_size - 1) // width + max(batch.global_num_tokens) - len(batch.seq_lens)
        return F.pad(mask, (0, added * width * (1 + width)), value=True)

    def _draft(self, batch: Any) -> DraftBatch:
        model, drafted = self._draft_model, None
        if self._drafting is not None:
            with nullcontext() if model is None else self._ranks.leading():
                drafted = self._drafting.draft(batch)
        elif model is not None:
            model.serve(batch)
        if model is not None:
            # SGLang waits for this event before it writes attention inputs; a captured draft pass ends earlier.
            self.model_runner.shared_read_done_event = None
        return self._ranks.share_draft(drafted)

    def _to_verify(self, batch: Any) -> tuple[DraftBatch, DraftBatch, TreeBatch | None]:
        """Draft. Return the draft, and the trees of the step on the host and on the device; None: roots alone."""
        draft, tree = self._draft(batch), None
        if draft.max_nodes > 1:
            parts = draft.tokens, draft.parents, draft.depths, draft.counts
            tree = TreeBatch.from_numpy(*parts, self.device)
        return draft, draft, tree

    def _acceptable(self, batch: Any, tree: TreeBatch | None) -> TreeBatch | None:
        return tree

    def _verify_input(self, inputs: TreeInputs, width: int) -> Any:
        return NgramVerifyInput(
            draft_token=inputs.input_ids,
            custom_mask=inputs.mask,
            positions=inputs.positions,
            draft_token_num=width,
        )

    def _follow(self, batch: Any, result: GenerationBatchResult) -> None:
        """Do what another drafter does after each step."""

    def _decode(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> GenerationBatchResult:
        draft, host_tree, tree = self._to_verify(batch)
        size, width = host_tree.tokens.shape
        seen = int(batch.seq_lens_cpu.sum())
        if tree is not None:
            # FA3 is given the cache's pages, and reads of the mask what nodes see of each other.
            inputs = tree_inputs(tree, batch.seq_lens, seen, cached=self._backend != "fa3")
        else:
            roots = on_device(host_tree.tokens.ravel().astype(np.int64), batch.seq_lens.device)
            positions = batch.seq_lens.to(torch.int64, copy=True)
            inputs = TreeInputs(roots, positions, roots.new_ones(seen + size, dtype=torch.bool))
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = inputs.input_ids
        batch.out_cache_loc = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices, req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens, end_offset=batch.seq_lens + width, batch_size=size, draft_token_num=width,
            device=self.device,
        )  # fmt: skip
        if self.together:
            inputs = replace(inputs, mask=self._with_padding(batch, inputs.mask, width))
        batch.spec_info = self._verify_input(inputs, width)
        if self._recurrent:
            prepare_mamba_track_for_verify(batch)
            if tree is not None:  # also of chains: graphs for trees read the links
                links = torch.stack(tree_links(host_tree)).to(torch.int32)
                child, sibling = on_device(links.numpy(), batch.seq_lens.device)
                batch.spec_info.retrieve_next_token, batch.spec_info.retrieve_next_sibling = child, sibling
        with self._graphs.use(width):
            result = self._target_worker.forward_batch_generation(batch, is_verify=True, **self.captured)
        logits, altered = result.logits_output.next_token_logits, alters_logits(batch)
        if self._drafting is not None and altered:
            self._drafting.copy_logits(batch, host_tree, logits)
        verified = self._verifier.verify(batch, host_tree, self._acceptable(batch, tree), result.logits_output)
        new_seq_lens = batch.seq_lens + verified.lengths
        tokens = F.pad(verified.tokens.clamp(min=0), (0, self.max_nodes - width))
        published = self._publish(batch, result, tokens, verified.lengths, new_seq_lens, on_publish)
        if self._drafting is not None and not altered:  # after the copy that the next step waits for
            self._drafting.copy_logits(batch, host_tree, logits)
        if self._recurrent:
            # By the largest width, which SGLang makes room for behind the accepted tokens where it replays them.
            accepted = self._verifier.flat(verified.accepted, self.max_nodes)
            with self._graphs.use(width):  # whose backend knows the states of this batch
                commit_mamba_states_after_verify(self._target_worker, batch, verified.lengths, accepted, self.max_nodes)
        self._follow(batch, published)
        self._verifier.keep(batch, verified, result.logits_output)
        batch.forward_mode = ForwardMode.DECODE
        if self._drafting is not None:
            self._drafting.note(batch, draft)
        return published

    # -- calls from the scheduler --------------------------------------------------------------------------------------

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self._drafting is not None:
            self._drafting.finish(rid)

    # `ExternalCorpusManager` calls the following on every tensor-parallel rank; rank 0 holds the corpora. Corpora are
    # added from a separate thread. Errors are returned to the client.

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        documents = documents_of(token_chunks)
        if self._drafting is None:
            return sum(map(len, documents))
        return self._drafting.guarded.method.add_corpus(corpus_id, documents)

    def commit_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Called by SGLang after `add_external_corpus`, when drafts come from the corpus already."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        if self._drafting is not None:
            self._drafting.guarded.method.remove_corpus(corpus_id)

    def list_external_corpora(self) -> dict[str, int]:
        return self._drafting.guarded.method.corpora() if self._drafting is not None else {}
