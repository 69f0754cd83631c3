"""`Drafting` of vLLM's model runner V2 on vLLM's own requests and batches, without a model that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def newest_tokens(
    tokens: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, gained: torch.Tensor, out: torch.Tensor,
    drafts: torch.Tensor,
) -> None:  # fmt: skip
    """As the kernel of that name, without a GPU."""
    known = lengths[slots.long()].long()
    at = (known[:, None] + torch.arange(2 - out.shape[1], 0)).clamp(min=0)
    out[:, 0], out[:, 1], out[:, 2:] = gained, known, tokens[slots.long()[:, None], at]
    drafts.copy_(out[:, -1:].expand_as(drafts))


class Decoding:
    """Steps of decoding, each request's text known from the start.

    Args:
        texts: int32 [B, max_model_len], what each of B requests writes; its first `prompt` tokens are the prompt.
        options: of the method, and `num_speculative_tokens`.
        extra_args: of the last request.

    Attributes:
        batch: vLLM's InputBatch of a step in which each request verifies K draft tokens.
    """

    def __init__(
        self, model: Path, texts: NDArray[np.int32], prompt: int, options: dict[str, Any], extra_args: Any = None
    ) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.output import NewRequestData
        from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
        from vllm.v1.worker.gpu import buffer_utils
        from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
        from vllm.v1.worker.gpu.states import RequestState

        from freedraft.engines.vllm.v2 import gained
        from freedraft.engines.vllm.v2.drafting import Drafting

        gained.newest_tokens = newest_tokens
        buffer_utils.UvaBuffer = UvaBuffer  # as in vLLM's workers for CPUs
        (size, longest), length, cpu = texts.shape, options["num_speculative_tokens"], torch.device("cpu")
        tokens, ids = size * (1 + length), [str(i) for i in range(size)]
        arguments = EngineArgs(
            str(model), skip_tokenizer_init=True, max_model_len=longest, speculative_config=dict(options)
        )
        self.states = RequestState(size, longest, tokens, length, int(texts.max()) + 1, cpu)
        self.drafting = Drafting(arguments.create_engine_config(), cpu, self.states)
        self.drafting.proposed = np.zeros((size, 1, length), np.int64)
        self.states.all_token_ids.gpu[:] = torch.from_numpy(texts)
        self.states.req_id_to_index.update(zip(ids, range(size), strict=True))
        self.batch = InputBatch.make_dummy(size, tokens, InputBuffers(size, tokens, cpu))
        self.batch.req_ids, self.batch.num_draft_tokens_per_req = ids, np.full(size, length, np.int32)
        self.drafts = torch.zeros(size, length, dtype=torch.int64)
        self.lengths = np.full(size, prompt)
        for name, text in zip(ids, texts[:, :prompt].tolist(), strict=True):
            parameters = SamplingParams(max_tokens=longest, extra_args=extra_args if name == ids[-1] else None)
            new = NewRequestData(name, text, [], parameters, None, ([],), 0, None, prefill_token_ids=text)
            self.drafting.add([new])

    def launch(self, gained: int, arrival: Any = None) -> None:
        """Launch a step by which each request gains this many tokens. arrival: event that the host waits for."""
        self.lengths += gained
        self.states.total_len.gpu[:] = torch.from_numpy(self.lengths)
        size, drafting = len(self.lengths), self.drafting
        drafting.steps += 1
        sampled, over = torch.full((size,), gained, dtype=torch.int32), np.zeros(size, np.bool_)
        assert drafting.guarded.call(drafting.launched, self.batch, sampled, self.drafts, torch.zeros(0), over)
        drafting.gained._event = arrival

    def draft(self) -> bool:
        """Draft for the next step, as soon as the tokens are there; whether it was drafted for."""
        drafting = self.drafting
        drafted = drafting.guarded.call(drafting.draft, self.drafts.shape[1], self.batch)
        if drafted:
            self.drafts.copy_(torch.from_numpy(drafting.proposed[self.batch.idx_mapping_np, 0]))
        return bool(drafted)
