"""The hook in vLLM's model runner: what a drafter of ours sees of a step, and when requests start and end.

vLLM's custom proposers get neither request ids nor the scheduled number of draft tokens, and do not hear when a request
ends. `StepProposer`s do.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.engines.vllm.fixes import apply_fixes
from freedraft.engines.vllm.methods import method_options
from freedraft.engines.vllm.patching import share_logging, wrap_once
from freedraft.engines.vllm.tenants import SALT

if TYPE_CHECKING:
    from freedraft.controller import Controller

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine, after sampling: what a drafter may look at.

    Attributes:
        runner: vLLM's GPUModelRunner.
        arguments: what vLLM passed to `propose_draft_token_ids`, by name (hidden_states, common_attn_metadata, ...).
        rows: int32 [R], rows of the batch that sampled a token and so may draft; the others are in the midst of their
            prompt.
    """

    runner: Any
    arguments: dict[str, Any]
    rows: NDArray[np.int32]

    @classmethod
    def of(cls, runner: Any, arguments: dict[str, Any]) -> Step:
        sampled = arguments["sampled_token_ids"]
        if all(sampled):
            rows = np.arange(len(sampled), dtype=np.int32)
        else:
            rows = np.array([row for row, tokens in enumerate(sampled) if tokens], np.int32)
        return cls(runner, arguments, rows)

    @property
    def sampled_token_ids(self) -> list[list[int]]:
        """Tokens that this step added, by row of the batch."""
        return self.arguments["sampled_token_ids"]

    @property
    def batch_size(self) -> int:
        """Requests in the step, those in the midst of their prompt included."""
        return len(self.sampled_token_ids)

    @property
    def request_ids(self) -> Sequence[str]:
        """Ids of the requests in `rows`, in that order."""
        ids = self.runner.input_batch.req_ids
        return ids if len(self.rows) == len(ids) else [ids[row] for row in self.rows.tolist()]

    @property
    def token_rows(self) -> NDArray[np.int32]:
        """int32 [max batch, max_model_len]: prompt and output of each row, this step's tokens included."""
        return self.runner.input_batch.token_ids_cpu

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32 [R]: tokens of each of `rows`, this step's included."""
        return self.runner.input_batch.num_tokens_no_spec[self.rows]

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens per request that vLLM will verify in the next step."""
        most = self.runner.speculative_config.num_speculative_tokens
        scheduled = getattr(self.arguments["scheduler_output"], "num_spec_tokens_to_schedule", None)
        return most if scheduled is None else min(most, scheduled)

    @property
    def verified(self) -> tuple[int, int]:
        """Draft tokens that this step verified and, of these, accepted."""
        drafted = sum(map(len, self.arguments["scheduler_output"].scheduled_spec_decode_tokens.values()))
        accepted = sum(map(len, self.sampled_token_ids)) - len(self.rows) if drafted else 0
        return drafted, accepted

    def verdicts(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32 [R] each, of `rows`: draft tokens that this step verified and, of these, accepted."""
        scheduled = self.arguments["scheduler_output"].scheduled_spec_decode_tokens
        if not scheduled:
            none = np.zeros(len(self.rows), np.int32)
            return none, none
        sampled = self.sampled_token_ids
        drafted = np.array([len(scheduled.get(request_id, ())) for request_id in self.request_ids], np.int32)
        gained = np.array([len(sampled[row]) for row in self.rows.tolist()], np.int32)
        return drafted, np.minimum(gained - 1, drafted)

    def tell(self, controller: Controller) -> None:
        """Tell a controller what became of its last drafts."""
        rows, lengths = self.rows, self.lengths.astype(np.int64)
        width = self.token_rows.shape[1]
        sampled = self.sampled_token_ids
        if len(rows) == len(sampled):
            gained = np.fromiter(map(len, sampled), np.int64, len(sampled))
            query_tokens = self.arguments["scheduler_output"].total_num_scheduled_tokens
        else:  # others are in the midst of their prompts
            gained = np.array([len(sampled[row]) for row in rows], np.int64)
            query_tokens = None
        ends = rows * np.int64(width) + lengths
        context = float(lengths.mean()) if len(rows) else 1.0
        controller.observe(
            self.request_ids,
            self.token_rows.reshape(-1),
            ends - gained,
            ends,
            context=context,
            query_tokens=query_tokens,
        )

    def no_drafts(self) -> list[list[int]]:
        return [[] for _ in range(self.batch_size)]

    def drafts(self, chains: DraftBatch) -> list[list[int]]:
        """What vLLM wants: draft tokens by row of the batch, none where none fit.

        Args:
            chains: chains without branches, in the order of `rows`.
        """
        # The last token that may be sampled is at max_model_len - 1, one beyond the drafts.
        room = self.runner.max_model_len - 1 - self.lengths
        counts = np.minimum(chains.counts - 1, room).clip(0).tolist()
        tokens = chains.tokens[:, 1:].tolist()
        drafts = [row[:count] for row, count in zip(tokens, counts, strict=True)]
        if len(drafts) == self.batch_size:
            return drafts
        result = self.no_drafts()
        for row, draft in zip(self.rows.tolist(), drafts, strict=True):
            result[row] = draft
        return result


class StepProposer(ABC):
    """Base of the drafters that vLLM creates by the dotted path of a `Method`.

    It only drafts: a mistake in it costs drafts, never tokens. If it raises, the error is logged once and the engine
    goes on without drafts.
    """

    # Whether drafting writes KV beyond the request's tokens; the `Method` says it too, so that slots get reserved.
    writes_kv: ClassVar[bool] = False

    def __init__(self, vllm_config: Any) -> None:
        share_logging()
        install()
        apply_fixes(early=False)
        self.vllm_config = vllm_config
        self.options = method_options(vllm_config)
        self.failed = False

    @property
    def max_draft_tokens(self) -> int:
        return self.vllm_config.speculative_config.num_speculative_tokens

    @abstractmethod
    def draft(self, step: Step) -> list[list[int]]:
        """Draft tokens by row of the batch: 0 to `step.max_draft_tokens` each (`Step.drafts` makes them)."""

    @abstractmethod
    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        """A request has its first step; `tokens` int32 [n] is its prompt, a view that is valid during the call only."""

    def belongs(self, request_id: str, salt: str) -> None:  # noqa: B027 (most drafters do not care)
        """The request that has just begun has this cache_salt."""

    @abstractmethod
    def finish(self, request_ids: set[str]) -> None:
        """These requests have ended or were aborted; some may never have begun."""

    def load_model(self, target_model: Any) -> None:  # noqa: B027 (most drafters have nothing to do)
        """vLLM has loaded the target."""

    def ready(self, runner: Any) -> None:  # noqa: B027
        """The KV cache of vLLM's GPUModelRunner is there; requests come next."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        raise RuntimeError("freedraft's hook in vLLM's model runner is not in place: run 'freedraft doctor'")

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Run `work`, unless something has failed before; a failure turns this drafter off."""
        if self.failed:
            return None
        try:
            return work()
        except Exception:
            self.failed = True
            logger.exception("freedraft: drafting failed; the engine goes on without drafts. Please report this")
            return None


def install() -> None:
    """Hook vLLM's model runner, once per process. Other drafters see no difference."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_once(GPUModelRunner, "propose_draft_token_ids", _propose)
    wrap_once(GPUModelRunner, "_update_states", _update)
    if hasattr(GPUModelRunner, "initialize_kv_cache"):
        wrap_once(GPUModelRunner, "initialize_kv_cache", _initialize)


def _propose(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = self.drafter
        if not isinstance(drafter, StepProposer):
            return original(self, *args, **kwargs)
        # What vLLM's own function does first.
        self._draft_probs = None
        self._draft_prob_req_ids = None
        arguments = signature.bind(self, *args, **kwargs).arguments
        drafts = drafter.guarded(lambda: drafter.draft(Step.of(self, arguments)))
        return drafts or [[] for _ in range(len(arguments["sampled_token_ids"]))]

    return propose_draft_token_ids


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, StepProposer):
            return original(self, scheduler_output, *args, **kwargs)
        # vLLM lets one request near max_model_len turn drafting off for the whole batch. Ours look at each by itself.
        self.effective_drafter_max_model_len = self.max_model_len + drafter.max_draft_tokens + 1
        # vLLM calls this also for a step of no tokens, which it makes after the last request has ended.
        # An id that starts anew (resubmitted after an abort, streamed input) loses what was known of it.
        new = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        gone = scheduler_output.finished_req_ids.union(new)
        if gone:
            drafter.guarded(lambda: drafter.finish(gone))
        result = original(self, scheduler_output, *args, **kwargs)
        if new:
            drafter.guarded(lambda: _begin(drafter, self.input_batch, scheduler_output.scheduled_new_reqs))
        return result

    return _update_states


def _initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        drafter = getattr(self, "drafter", None)
        profiling = signature.bind(self, *args, **kwargs).arguments.get("is_profiling", False)
        if isinstance(drafter, StepProposer) and not profiling:
            drafter.guarded(lambda: drafter.ready(self))
        return result

    return initialize_kv_cache


def _begin(drafter: StepProposer, batch: Any, requests: Sequence[Any]) -> None:
    for request in requests:
        row = batch.req_id_to_index[request.req_id]
        drafter.begin(request.req_id, batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]])
        salt = getattr(request, SALT, None)
        if salt:
            drafter.belongs(request.req_id, salt)
