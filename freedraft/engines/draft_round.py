"""Rounds of draft passes, for every engine: a pass, its inputs and results, and how ranks run it together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from freedraft.draft_model import Drafted, DraftRound, PassOutputs
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.recipe import Window


class DraftPass(NamedTuple):
    """One token per request through `layers`, in the engine's form; see `DraftModel.build`. Ranks refer to a pass by
    its number."""

    layers: Any
    window: Window | None  # the part of the KV cache that it reads; None for the whole cache
    outputs: PassOutputs
    number: int


class RankedRound(DraftRound):
    """Draft passes that all tensor-parallel ranks run at the same time. Results come to the host in one transfer."""

    def __init__(self, ranks: DraftRanks, draft_pass: DraftPass, max_draft_len: int) -> None:
        self._ranks, self.draft_pass, self.max_draft_len = ranks, draft_pass, max_draft_len

    @abstractmethod
    def _ready(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> Any:
        """Inputs and KV slots of a pass; arguments as in `launch`."""

    @abstractmethod
    def _next(self, ready: Any, tokens: torch.Tensor) -> Any:
        """The same for the next pass, with these tokens on the device (int64 [R])."""

    @abstractmethod
    def _output(self, ready: Any) -> torch.Tensor:
        """Run the pass; see `most_likely`."""

    def launch(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int, count: int = 1) -> torch.Tensor:
        """float32 [N, R, 2K (+ 1)], see `most_likely`."""
        self._ranks.tell("run", rows, tokens, position, count)
        ready = self._ranks.ready(lambda: self._ready(rows, tokens, position))
        with self._ranks.together():
            outputs = [self._output(ready)]
            for _ in range(1, count):
                ready = self._next(ready, outputs[-1][:, 0].long())
                outputs.append(self._output(ready))
            return torch.stack(outputs)

    def read(self, launched: torch.Tensor) -> Drafted:
        with self._ranks.together():
            return on_host(launched, self.draft_pass.outputs)


def run_kept(
    hidden: torch.Tensor, sublayers: Iterable[tuple[Any, Any, bool]], last_norm: Any, **attention: Any
) -> torch.Tensor:
    """Hidden states of embedded tokens after the kept sublayers of a pre-norm decoder, and its last norm. sublayers:
    norm, attention or MLP, and whether it is attention, which is called with the keyword arguments."""
    residual: torch.Tensor | None = None  # sum of all sublayers before the last one; each norm adds the last one to it
    for norm, sublayer, is_attention in sublayers:
        if residual is None:
            residual, hidden = hidden, norm(hidden)
        else:
            hidden, residual = norm(hidden, residual)
        hidden = sublayer(hidden_states=hidden, **attention) if is_attention else sublayer(hidden)
    return last_norm(hidden) if residual is None else last_norm(hidden, residual)[0]


def most_likely(logits: torch.Tensor, outputs: PassOutputs, scale: float = 1.0) -> torch.Tensor:
    """float32 [R, 2K (+ 1)], in one tensor for one transfer: the most likely tokens of each row of float [R, V], best
    first (float32 holds them exactly), their probabilities (0 beyond the vocabulary's size), and the entropy in nats if
    requested; K is `outputs.top`. scale: factor of the logits."""
    best = logits.argmax(-1, keepdim=True)
    logits = logits.float() if scale == 1.0 else logits.float() * scale
    total = logits.logsumexp(-1, keepdim=True)
    known = min(outputs.top, logits.shape[1])
    if known == 1:
        tokens, values = best, logits.amax(-1, keepdim=True)
    else:
        values, tokens = logits.topk(known)
        # On ties the first one, as the target's own argmax.
        tokens = torch.where(tokens == best, tokens[:, :1], tokens)
        tokens = torch.cat((best, tokens[:, 1:]), 1)
    parts = [pad(part, (0, outputs.top - known)) for part in (tokens.float(), (values - total).exp())]
    if outputs.entropy:
        log_probs = logits - total
        parts.append(-(log_probs.exp() * log_probs).nan_to_num(0.0).sum(-1, keepdim=True))
    return torch.cat(parts, 1)


def on_host(values: torch.Tensor, outputs: PassOutputs) -> Drafted:
    """Results of `most_likely` of N passes, float [N, R, 2K (+ 1)], on the host."""
    host, top = values.cpu().numpy(), outputs.top
    entropy = host[..., -1] if outputs.entropy else None
    return Drafted(host[..., :top].astype(np.int32), host[..., top : 2 * top], entropy)


def on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `values` through pinned memory: from pageable memory the host would wait for the copy, and for the passes
    before it. On a CPU nothing is copied."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
