"""Seconds of the parts of a pass, measured on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from layerskip_plugin.selection.host_model import HostModel, Sample, Text
from layerskip_plugin.selection.knapsack import PassTimes

VERIFIED = (1, 2, 4, 8, 12)


@torch.inference_mode()
def measure(host: HostModel, context: int, repeats: int = 7, layers: Sequence[int] | None = None) -> PassTimes:
    """Times at one context length, batch 1; medians over `repeats` rounds through `layers` (by default all of them:
    the weights and KV of a few would stay in a cache that those of a whole pass do not fit into).

    The KV is made up: the time does not depend on what is in it.
    """
    text = blank(host, context)
    layers = layers or range(host.n_layers)
    attention, mlp, head = ({}, {}, {})  # type: dict[int, float], dict[int, float], dict[int, float]
    for n in VERIFIED:
        sample = Sample([text], [torch.full((n,), context - 1)])
        h = torch.randn(1, n, text.final.shape[1], device=text.final.device)
        attention[n], mlp[n] = (
            seconds(lambda i=i, s=sample, h=h: [host.sublayer(2 * k + i, h, s) for k in layers], repeats) / len(layers)  # type: ignore[misc]
            for i in (0, 1)
        )
        head[n] = seconds(lambda h=h: host.best(host.norm(h)), repeats)  # type: ignore[misc]
    whole = [host.n_layers * (attention[n] + mlp[n]) + head[n] for n in VERIFIED]

    def verify(n: int) -> float:
        return float(np.interp(n, VERIFIED, whole))

    return PassTimes(attention[1], mlp[1], head[1], 0.0, verify)


def blank(host: HostModel, context: int) -> Text:
    """A text of `context` made-up tokens."""
    weight = host.embed.weight
    layer = host.layers[0].self_attn
    heads = layer.k_proj.out_features // host.head_size

    def made_up() -> list[torch.Tensor]:
        return [torch.randn(heads, context, host.head_size, device=weight.device) for _ in range(host.n_layers)]

    final = torch.randn(context, weight.shape[1], device=weight.device)
    cos, sin = (x[0] for x in host.rotary(final[:1], torch.arange(context, device=weight.device)[None]))
    ids = torch.zeros(context, dtype=torch.int64, device=weight.device)
    return Text(ids, made_up(), made_up(), cos, sin, ids, final, ids[:0], final[None, :0])


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `work`, after one call that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
