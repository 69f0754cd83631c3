"""`OnTopWorker`: n-grams behind the drafts of a drafter that SGLang runs itself ("head"). B requests, K = draft tokens
of the head, W = width of the step.

The head drafts and follows the verified tokens as it does alone. Its K tokens are always verified. An n-gram that
begins with them goes on behind, so a step has at least the head's tokens. The host looks up n-grams while the passes of
the head run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from freedraft_kernels import TreeBatch, TreeInputs
from numpy.typing import NDArray
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_context, get_spec
from sglang.srt.speculative import eagle_worker_v2 as eagle
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree

from freedraft.draft import DraftBatch
from freedraft.engines.draft_round import on_device
from freedraft.engines.sglang.drafting import BatchDrafting, Gained
from freedraft.engines.sglang.graphs import Captured
from freedraft.engines.sglang.guards import BACKENDS
from freedraft.engines.sglang.requests import rests_on_drafts
from freedraft.engines.sglang.worker import TreeVerifyWorker
from freedraft.step import Step


class OnTopDrafting(BatchDrafting):
    """Counts what a step accepted of the head's tokens, and of n-grams. head: K."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.head: int = get_spec().speculative_num_steps
        self._proposed: dict[str, NDArray[np.int32]] = {}  # first K tokens of the n-grams in verification, by request

    def note(self, batch: Any, draft: DraftBatch) -> None:
        super().note(batch, draft)
        tokens = draft.tokens[:, 1 : self.head + 1].copy()
        self._proposed = dict(zip((r.rid for r in batch.reqs), tokens, strict=True))

    def _step(self, batch: Any, gained: Gained, tracked: NDArray[np.int64], drafted: NDArray[np.int32]) -> Step:
        ids, unknown = [request.rid for request in batch.reqs], np.full(self.head, -1, np.int32)
        ngrams = np.array([self._proposed.get(request_id, unknown) for request_id in ids])
        known = np.array([request_id in self._proposed for request_id in ids])
        self.guarded.judge_head(gained[:3], ngrams, drafted, known)
        return super()._step(batch, gained, tracked, drafted)


class OnTopWorker(TreeVerifyWorker):
    """head: class of SGLang's worker, an EAGLEWorkerV2. Other arguments: see `TreeVerifyWorker`."""

    drafting_type = OnTopDrafting
    captured: ClassVar = {"capture_hidden_mode": CaptureHiddenMode.FULL}

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any, *, spec: Any, head: Callable[..., Any]
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker, spec=spec)
        self.own = get_spec().speculative_num_steps
        self._extend: dict[int, Captured] = {}  # of the head, by width
        self._chains: dict[tuple[int, int], tuple[tuple[torch.Tensor, ...], DraftBatch]] = {}
        with nodes(self.own + 1):
            self.head = head(server_args, gpu_id, nccl_port, target_worker)
        self._draft_worker = self.head.draft_worker

    @property
    def name(self) -> str:
        return f"{self._spec.name}+{get_spec().speculative_algorithm.lower()}"

    @property
    def last_shared_read_runner(self) -> Any:
        return self.head.last_shared_read_runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        # SGLang then waits for lengths, by which masks are made; backends that do not need them would not.
        return (*self.head.spec_v2_attn_backends, self)

    needs_cpu_seq_lens = True

    # -- start ---------------------------------------------------------------------------------------------------------

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.head.alloc_memory_pool(**kwargs)
        super().alloc_memory_pool(**kwargs)
        self._verifier.moves_states = False  # SGLang reads W rows for each request, which are in their places

    def init_attention_backends(self) -> None:
        with nodes(self.own + 1):
            self.head.init_attention_backends()
        super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with nodes(self.own + 1):
            self.head.init_cuda_graphs()
        super().init_cuda_graphs()

    def _capture(self) -> None:
        super()._capture()
        graphs = self.draft_worker.cuda_graph_runner_for_draft_extend
        if graphs is not None or BACKENDS[self._backend].fixed_width:
            wide = [width for width in self.widths if width > self.own + 1]
            self._extend = {width: self._capture_extend(width, graphs) for width in wide}

    def _capture_extend(self, width: int, graphs: Any) -> Captured:
        """Build what the head's pass over W verified nodes needs. graphs: those of K + 1 nodes, or None."""
        drafter = self.draft_worker
        with nodes(width), self._of_head(width):
            backend = DraftBackendFactory(
                drafter.draft_runner, 1, self.own,
                seed_dsa_topk_from_draft_extend=drafter.seed_dsa_topk_from_draft_extend,
                qsa_profile=eagle.parse_qsa_profile(drafter.draft_runner.model_config.hf_config),
            ).create_draft_extend_backend()  # fmt: skip
            backend = drafter.draft_runner.attn_backend = backend or drafter.draft_runner.attn_backend
            return Captured(backend, graphs and type(graphs)(drafter, draft_extend_attn_backend=backend))

    @contextmanager
    def _of_head(self, width: int = 0) -> Iterator[None]:
        """Run passes of the head in this context, as SGLang does. width: W, if they follow a step of this width."""
        drafter = self.draft_worker
        before = drafter.draft_runner.attn_backend, drafter.cuda_graph_runner_for_draft_extend
        captured = self._extend.get(width, before)
        with (
            eagle.draft_tp_context(drafter.parallel_layout),
            eagle.speculative_moe_backend_context(),
            eagle.speculative_moe_a2a_backend_context(),
        ):
            drafter.speculative_num_draft_tokens = width or self.own + 1
            drafter.draft_runner.attn_backend, drafter.cuda_graph_runner_for_draft_extend = captured
            try:
                yield
            finally:
                drafter.speculative_num_draft_tokens = self.own + 1
                drafter.draft_runner.attn_backend, drafter.cuda_graph_runner_for_draft_extend = before

    # -- one step ------------------------------------------------------------------------------------------------------

    def _prefill(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any) -> GenerationBatchResult:
        self._begin(batch)
        rows, lengths = batch.req_pool_indices_cpu, batch.seq_lens
        result = self.head._forward_prefill_batch(batch, on_publish, pp_proxy_tensors)
        if self._drafting is not None and len(batch.reqs):
            self._accepted.put(rows, *self._first(result.next_token_ids), lengths)
        return result

    def _to_verify(self, batch: Any) -> tuple[DraftBatch, DraftBatch, TreeBatch]:
        with self._of_head():
            proposed = self.draft_worker.draft(batch).draft_token.view(-1, self.own + 1)
        draft = self._draft(batch)
        size, width = draft.tokens.shape
        tokens = proposed
        if width > self.own + 1:
            # Behind the end of an n-gram stand copies of the root.
            ngrams = np.where(np.arange(width) < draft.counts[:, None], draft.tokens, draft.tokens[:, :1])
            behind = on_device(ngrams, proposed.device)
            agree = (behind[:, : self.own + 1] == proposed).all(1, keepdim=True)
            tokens = torch.cat((proposed, torch.where(agree, behind[:, self.own + 1 :], behind[:, :1])), 1)
        if (size, width) not in self._chains:
            self._chains[size, width] = chains(size, width, self.device)
        chain, on_host = self._chains[size, width]
        tree = TreeBatch(tokens.to(torch.int32), *chain)
        if batch.has_grammar:
            self._verifier.grammar_chain = GrammarTree.from_linear_chain(tokens)
        return draft, on_host, tree

    def _acceptable(self, batch: Any, tree: TreeBatch | None) -> TreeBatch | None:
        """Without the draft tokens of requests that may have none, which no target equals."""
        none = [rests_on_drafts(request) for request in batch.reqs]
        if tree is None or not any(none):
            return tree
        tokens = tree.tokens.masked_fill(on_device(np.array(none), tree.device)[:, None], -1)
        return TreeBatch(tokens, tree.parents, tree.depths, tree.counts)

    def _verify_input(self, inputs: TreeInputs, width: int) -> EagleVerifyInput:
        return EagleVerifyInput(
            draft_token=inputs.input_ids, custom_mask=inputs.mask, positions=inputs.positions, retrieve_index=None,
            retrieve_next_token=None, retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=width - 1, topk=1,
            draft_token_num=width, capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
        )  # fmt: skip

    def _relay(self, batch: Any, tokens: torch.Tensor, relayed: dict[str, torch.Tensor]) -> dict[str, Any]:
        width = batch.spec_info.draft_token_num
        bonus = tokens.gather(1, relayed["accept_lens"][:, None].to(torch.int64) - 1).squeeze(1)
        return {
            "next_token_ids": tokens[:, :width].flatten(),
            "next_draft_input": EagleDraftInput(bonus_tokens=bonus),
            "speculative_num_draft_tokens": width,
        }

    def _follow(self, batch: Any, result: GenerationBatchResult) -> None:
        with self._of_head(result.speculative_num_draft_tokens):
            self.draft_worker._draft_extend_for_decode(batch, result)


@contextmanager
def nodes(count: int) -> Iterator[None]:
    """Let SGLang take `count` for the number of nodes per request in this context."""
    before = get_spec().speculative_num_draft_tokens
    get_context().override("freedraft.head", speculative_num_draft_tokens=count)
    try:
        yield
    finally:
        get_context().override("freedraft.head", speculative_num_draft_tokens=before)


def chains(size: int, width: int, device: Any) -> tuple[tuple[torch.Tensor, ...], DraftBatch]:
    """Return parents, depths and counts of B chains of W nodes on the device, and the chains, without tokens, on the
    host."""
    host = DraftBatch.empty(size, width)
    host.depths[:] = np.arange(width)
    host.parents[:], host.counts[:] = host.depths - 1, width
    return tuple(torch.from_numpy(part).to(device) for part in (host.parents, host.depths, host.counts)), host
