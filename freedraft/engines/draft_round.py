"""Rounds of draft passes, for every engine: a pass, its inputs and results, and how ranks run it together."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp, all_reduce
from torch.nn.functional import pad

from freedraft.draft_model import Drafted, PassOutputs, Window
from freedraft.guarded_method import EngineMustEnd, is_device_fault

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DraftRanks:
    """The ranks of one model. Rank 0 decides; all ranks run the same passes together.

    Every rank has its shard of the weights and of the KV cache, and the same requests in the same slots. Rank 0
    broadcasts its calls until it ends. Before the layers run, in which ranks wait for one another, all ranks agree that
    they can. A rank that fails after that would leave the others waiting, so it ends the engine.

    Args:
        group: the engine's GroupCoordinator of tensor-parallel ranks (alike in vLLM and SGLang).
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.several: bool = group.world_size > 1
        self.first: bool = group.rank_in_group == 0
        self._calls = 0
        self._built: dict[int, Any] = {}  # draft passes of worker ranks, by rank 0's numbers

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Context of rank 0's calls: the other ranks repeat them in `serve`, which ends with it."""
        try:
            yield
        except Exception:
            self._end()
            raise
        self._end()  # no broadcast on process exit: the others may be gone

    def _end(self) -> None:
        if self.several:
            self._group.broadcast_object(None, src=0)

    def tell(self, name: str, *arguments: Any) -> int:
        """In rank 0: broadcast a call: "build" a draft pass, "start" a round, or "run" a pass in it. Returns a number,
        by which "start" refers to a built pass."""
        self._calls += 1
        if self.several and self.first:
            self._group.broadcast_object((self._calls, name, arguments), src=0)
        return self._calls

    def serve(self, build: Callable[..., Any], start: Callable[..., RankedRound]) -> None:
        """In worker ranks: repeat the calls that rank 0 broadcasts, by `build` and `start`. A failure ends drafting in
        this step on all ranks. Raises EngineMustEnd: see `together`."""
        round_: RankedRound | None = None
        while (told := self._group.broadcast_object(None, src=0)) is not None:
            call, name, arguments = told
            try:
                if name == "build":
                    *pass_of, optimize = arguments
                    self._built[call] = build(*pass_of, optimize=optimize)
                elif name == "start":
                    round_ = None
                    number, *rest = arguments
                    round_ = start(self._built[number], *rest)
                elif round_ is not None:
                    round_.launch(*arguments)
                else:
                    self.agree(False)
            except Exception as error:
                if is_device_fault(error):
                    raise
                logger.exception("freedraft: this rank cannot run a draft pass of rank 0")

    def ready(self, prepare: Callable[[], T]) -> T:
        """The result of `prepare`, once it has succeeded on all ranks. Raises RuntimeError: it failed on another rank;
        its own error if it failed on this one."""
        able = False
        try:
            prepared = prepare()
            able = True
        finally:
            agreed = self.agree(able)
        if not agreed:
            raise RuntimeError("another tensor-parallel rank cannot run this draft pass")
        return prepared

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of work that all ranks do at the same time, waiting for one another. Raises EngineMustEnd: it failed
        on this one of several ranks, which would be out of step with the others. With one rank, and after a device
        fault, its own error."""
        try:
            yield
        except Exception as error:
            if not self.several or is_device_fault(error):
                raise
            logger.exception("freedraft: the engine stops: this rank failed during a draft pass")
            raise EngineMustEnd("a draft pass failed that other tensor-parallel ranks wait for") from error

    def agree(self, able: bool) -> bool:
        """Whether `able` is True on all ranks."""
        if not self.several:
            return able
        all_able = torch.tensor(int(able))
        all_reduce(all_able, ReduceOp.MIN, group=self._group.cpu_group)
        return bool(all_able)


class DraftPass(NamedTuple):
    """One token per request through `layers`, in the engine's form; see `DraftModel.build`. Ranks refer to a pass by
    its number."""

    layers: Any
    window: Window | None  # the part of the KV cache that it reads; None for the whole cache
    outputs: PassOutputs
    number: int


class RankedRound(ABC):
    """Draft passes for the requests of one step, one token per request and pass, that all tensor-parallel ranks run at
    the same time. Results come to the host in one transfer.

    The pass at position p of a request writes the KV of its token at context - 1 + p, in a slot that the engine has
    reserved for this step's verification, which writes it again before anything else reads it.
    """

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
        """Start `count` passes (N), each on the most likely token of the previous one, without waiting. Returns float32
        [N, R, 2K (+ 1)], see `most_likely`, for `read`.

        Args:
            rows: intp [R], rows of the step; all smaller positions must have been run for them.
            tokens: int32 [R], the token at `position` of each: its root at 0, then its drafts.
            position: of the first pass, from 0.
        """
        self._ranks.tell("run", rows, tokens, position, count)
        ready = self._ranks.ready(lambda: self._ready(rows, tokens, position))
        with self._ranks.together():
            outputs = [self._output(ready)]
            for _ in range(1, count):
                ready = self._next(ready, outputs[-1][:, 0].long())
                outputs.append(self._output(ready))
            return torch.stack(outputs)

    def read(self, launched: torch.Tensor) -> Drafted:
        """Wait for launched passes, and return their tokens."""
        with self._ranks.together():
            return on_host(launched, self.draft_pass.outputs)


# Of a pre-norm decoder: its norm, attention or MLP, and whether it is attention. Plain, for compilers.
Sublayer = tuple[Any, Any, bool]


def sublayers_of(layers: Iterable[Any]) -> list[Sublayer]:
    """The 2L sublayers of L decoder layers, in order."""
    sublayers = []
    for layer in layers:
        sublayers.append((layer.input_layernorm, layer.self_attn, True))
        sublayers.append((layer.post_attention_layernorm, layer.mlp, False))
    return sublayers


def run_kept(hidden: torch.Tensor, kept: Iterable[Sublayer], last_norm: Any, **attention: Any) -> torch.Tensor:
    """Hidden states of embedded tokens after the kept sublayers of a pre-norm decoder, and its last norm. Attention is
    called with the keyword arguments."""
    residual: torch.Tensor | None = None  # sum of all sublayers before the last one; each norm adds the last one to it
    for norm, sublayer, is_attention in kept:
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
