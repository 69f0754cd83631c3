"""Seconds of the parts of a pass, measured in transformers, and the tokens per time that they allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from layerskip_plugin.calibrate.sample import HostText, Sample
from layerskip_plugin.skip_set import SkipSet

if TYPE_CHECKING:
    from layerskip_plugin.calibrate.host_model import HostModel

VERIFIED = (1, 2, 4, 8, 12)
ROUNDS, MOST_ROUNDS = 15, 60
"""Times that an engine's passes are timed, and how often at most, on a machine that is busy with something else."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a pass at one context length and batch.

    Attributes:
        attention, mlp: of one sublayer in a draft pass.
        head: of the final norm, the LM head and sampling, and of everything else that all draft passes share.
        verify: seconds of a verify pass with n query tokens per request; `verify(1)` is a step without drafts.
    """

    attention: float
    mlp: float
    head: float
    verify: Callable[[int], float]

    def draft(self, skip: SkipSet) -> float:
        """t_draft(S) = kept attention * t_attn + kept MLP * t_mlp + t_head."""
        kept = (skip.n_layers - len(skip.attention)) * self.attention + (skip.n_layers - len(skip.mlp)) * self.mlp
        return kept + self.head


def tokens_per_time(acceptance: float, draft: float, verify: Callable[[int], float], length: int) -> float:
    """TPT(S, d) = (1 + a + ... + a^d) / (d * t_draft(S) + t_verify(d + 1)); d = 0 is decoding without drafts."""
    tokens = sum(acceptance**i for i in range(length + 1))
    return tokens / (length * draft + verify(length + 1))


@torch.inference_mode()
def measure(host: HostModel, context: int, repeats: int = 7) -> PassTimes:
    """Measure times at one context length and batch 1; medians over `repeats` rounds.

    A round runs through all layers: the weights and KV of a few would stay in a cache that those of a whole pass do
    not fit into. The KV is random: the time does not depend on what is in it.
    """
    text = blank(host, context)
    attention, mlp, head = np.zeros((3, len(VERIFIED)))

    def run_sublayers(kind: int, h: torch.Tensor, sample: Sample) -> None:
        for index in range(kind, host.sublayers, 2):
            host.sublayer(index, h, sample)

    for i, n in enumerate(VERIFIED):
        sample = Sample([text], [torch.full((n,), context - 1)])
        h = torch.randn(1, n, text.final.shape[1], device=text.final.device)
        attention[i], mlp[i] = (
            seconds(partial(run_sublayers, kind, h, sample), repeats) / host.n_layers for kind in (0, 1)
        )
        head[i] = seconds(partial(lambda h: host.best(host.norm(h)), h), repeats)
    whole = host.n_layers * (attention + mlp) + head
    return PassTimes(float(attention[0]), float(mlp[0]), float(head[0]), lambda n: float(np.interp(n, VERIFIED, whole)))


def blank(host: HostModel, context: int) -> HostText:
    """A text of `context` tokens with random KV and states."""
    weight = host.embed.weight
    heads = host.layers[0].self_attn.k_proj.out_features // host.head_size

    def random_cache() -> list[torch.Tensor]:
        return [torch.randn(heads, context, host.head_size, device=weight.device) for _ in range(host.n_layers)]

    final = torch.randn(context, weight.shape[1], device=weight.device)
    cos, sin = (x[0] for x in host.rotary(final[:1], torch.arange(context, device=weight.device)[None]))
    ids = torch.zeros(context, dtype=torch.int64, device=weight.device)
    return HostText(ids, ids, final, ids[:0], final[None, :0], random_cache(), random_cache(), cos, sin)


def engine_times(
    passes: Sequence[Callable[[], object]], verify: Sequence[Callable[[], object]], n_layers: int, context: int
) -> PassTimes:
    """Times of an engine's own passes; `verify(n)` as its passes over n tokens take.

    Args:
        passes: draft passes through all sublayers, without every second attention, and without every second MLP.
        verify: passes of the whole model over `VERIFIED` tokens behind `context`.

    Raises:
        ValueError: leaving sublayers out has saved no time, however often it was tried.
    """
    times = np.full((1, len(passes) + len(verify)), np.inf)
    left_out, saved = (n_layers + 1) // 2, [0.0]
    while min(saved) <= 0:
        if len(times) > MOST_ROUNDS:
            raise ValueError(
                f"context {context}: what sublayers take cannot be told on a machine this busy: run it again"
            )
        times = np.concatenate((times, timed_in_turns([*passes, *verify], ROUNDS)))
        # The least of them: differences between medians drown in what a machine does besides.
        whole, no_attention, no_mlp, *verified = times.min(0).tolist()
        saved = [whole - no_attention, whole - no_mlp]
    attention, mlp = (seconds / left_out for seconds in saved)
    head = max(0.0, whole - n_layers * (attention + mlp))
    return PassTimes(attention, mlp, head, lambda n: float(np.interp(n, VERIFIED, verified)))


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `work`, after one call that does not count."""
    return float(np.median(timed_in_turns([work], repeats)))


def timed_in_turns(works: Sequence[Callable[[], object]], repeats: int) -> NDArray[np.float64]:
    """float64[repeats, works]: seconds of each of `works`, in turns, so that a machine that is busy for a while
    slows all of them; after one round that does not count."""
    times = np.zeros((repeats + 1, len(works)))
    for round_, work in np.ndindex(times.shape):
        start = time.perf_counter()
        works[work]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[round_, work] = time.perf_counter() - start
    return times[1:]
