"""`OnTop`: n-grams on top of a drafter that vLLM runs itself ("head").

The head drafts after every step, as it does alone. Its KV and hidden states are those of verified tokens. Its K tokens
are always verified. An n-gram that begins with them goes on behind, so a step has at least the head's tokens. The host
looks up n-grams while the passes of the head run, and steps that verify K tokens do not wait.

With adaptive verification, vLLM ranks the tokens of both by the probability of each, and verifies the likeliest ones of
the batch. It ranks them before it prepares a step, so that every step waits for n-grams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from freedraft_kernels.device.extend_drafts import extend_drafts
from vllm.v1.worker.gpu.states import RequestState

from freedraft.engines.vllm.context import SCHEDULE, configured
from freedraft.engines.vllm.v2.next_step import NextStep, Stage
from freedraft.engines.vllm.v2.requests import shared
from freedraft.engines.vllm.v2.rows_by_score import Confidences
from freedraft.engines.vllm.v2.speculator import MethodSpeculator


class OnTop(MethodSpeculator):
    """Stays behind vLLM's speculator `head`, whose `propose` it replaces. Other arguments: see `MethodSpeculator`."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: RequestState, head: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.least = configured(vllm_config).head
        self._newest = head.draft_tokens  # filled with the newest tokens first, so that those behind K are some tokens
        self._propose, self._capture = head.propose, head.capture
        self._passes: Callable[[], torch.Tensor] | None = None  # of the step that is proposed for
        self._on_device = head.idx_mapping[:0]  # slots of the newest step
        self._head = head
        self._confidences: Confidences | None = None  # with adaptive verification
        self._nowhere = torch.zeros(req_states.max_num_reqs + 1, dtype=torch.int32, device=device)
        head.propose, head.capture = self.propose, self.capture

    def _make_buffers(self) -> None:
        """vLLM keeps the drafts. The device reads ours from the host's memory."""
        self._proposed, self._drafts = shared((self._states.max_num_reqs, 1, self.length), torch.int64, self._device)
        if self.host is not None:
            self.host.proposed = self._proposed.numpy()

    def verify_by_score(self) -> None:
        """Keep the runner's AdaptiveVerificationManager, and tell it how likely n-grams are."""
        if self.length == self.least:
            return
        self.usual_stage = Stage.SAMPLED  # what it ranks must be there
        self._confidences = Confidences(*shared((self._states.max_num_reqs, self.length), torch.float32, self._device))
        if self.host is not None:
            self.host.by_score = self._confidences

    def capture(self) -> None:
        """Capture vLLM's graphs of the head's passes for its own K."""
        config = self._vllm_config.speculative_config
        schedule = getattr(config, SCHEDULE)
        setattr(config, SCHEDULE, [(1, self._states.max_num_reqs, self.least)])
        try:
            self._capture()
        finally:
            setattr(config, SCHEDULE, schedule)

    def propose(self, input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any) -> Any:
        most = self.length if num_speculative_tokens is None else num_speculative_tokens
        own = min(self.least, most)
        self._passes = partial(self._propose, input_batch, *args, num_speculative_tokens=own, **kwargs)
        self._on_device = input_batch.idx_mapping
        return super().propose(input_batch, *args, num_speculative_tokens=most, **kwargs)

    def under(self, drafts: torch.Tensor) -> torch.Tensor:
        if self.warming_up:
            self._extend(self._on_device)
        if self._confidences is not None:
            self._head.draft_token_confidence_probs[:, self.least :] = 0.0
        passes, self._passes = self._passes, None
        assert passes is not None
        return passes()

    def _share(self, step: NextStep, drafted: bool) -> bool:
        drafted = super()._share(step, drafted)
        if drafted and self._confidences is not None and self._ranks.world_size > 1:
            ours = self._confidences.known
            ours[step.rows] = self._ranks.broadcast_object(ours[step.rows], src=0)
        return drafted

    def _copy(self, step: NextStep, drafted: bool) -> None:
        if not drafted or step.batch is not None:
            return
        self._extend(self._on_device)
        if self._confidences is not None:
            slots, behind = self._on_device.long(), slice(self.least, None)
            taken = (self._drafts[slots, 0] == self._states.draft_tokens[slots]).all(1, keepdim=True)
            known = self._confidences.on_device[slots, behind] * taken
            self._head.draft_token_confidence_probs[: len(slots), behind] = known

    def _place(self, batch: Any, drafted: bool) -> None:
        if drafted:
            self._extend(batch.idx_mapping, batch.query_start_loc, batch.cu_num_logits)

    def _extend(
        self, slots: torch.Tensor, ends: torch.Tensor | None = None, rows: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        ends, rows = (self._nowhere if at is None else at for at in (ends, rows))
        inputs = self.runner.input_buffers.input_ids
        extend_drafts(self._states.draft_tokens, self._drafts[:, 0], slots, inputs, ends, rows, self.least)

    def close(self) -> None:
        super().close()
        self._propose = self._capture = self._passes = self._head = None
