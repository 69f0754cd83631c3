"""The hidden states behind prompts, which SGLang computes anyway and by default does not keep."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, get_server_return_hidden_states_mode


def with_states(worker: Any, batch: Any, **arguments: Any) -> tuple[Any, torch.Tensor]:
    """A prefill, and float [B, H]: the normed last hidden state behind each request's last token of it.

    What requests themselves want of hidden states stays as it is."""
    mode = max(CaptureHiddenMode.LAST, batch.return_hidden_states_mode, get_server_return_hidden_states_mode())
    result = worker.forward_batch_generation(batch, capture_hidden_mode=mode, **arguments)
    states = result.logits_output.hidden_states
    if mode.is_full():
        ends = torch.tensor(batch.extend_lens).cumsum(0) - 1
        states = states[ends.to(states.device)]
    return result, states
