"""Seconds of the parts of a pass of a `HostModel`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from freedraft.cost.profiling import median_seconds
from layerskip_plugin.calibrate.host_model import HostModel, Sample, Text, device_of
from layerskip_plugin.pass_times import PassTimes

VERIFIED = (1, 2, 4, 8, 12)  # query tokens per request of timed verifications


@torch.inference_mode()
def pass_times(model: HostModel, context: int, repeats: int = 7) -> PassTimes:
    """Times at one context length and batch 1; medians over `repeats` rounds of all layers, since weights and KV of a
    few would stay in caches that a whole pass exceeds."""
    text = _random_text(model, context)

    def run_sublayers(kind: int, h: Tensor, sample: Sample) -> None:
        for index in range(kind, model.sublayers, 2):
            model.sublayer(index, h, sample)

    def run_head(h: Tensor) -> None:
        model.best(model.norm(h))

    rows = []  # seconds of all attention sublayers, of all MLP sublayers, and of the head
    for n in VERIFIED:
        sample = Sample([replace(text, kept=torch.full((n,), context - 1))])
        h = torch.randn_like(text.final[None, :n])
        parts = (partial(run_sublayers, 0, h, sample), partial(run_sublayers, 1, h, sample), partial(run_head, h))
        rows.append([median_seconds(part, least=repeats) for part in parts])
    attention, mlp, head = rows[0]
    verify = partial(np.interp, xp=VERIFIED, fp=[sum(row) for row in rows])
    return PassTimes(attention / model.n_layers, mlp / model.n_layers, head, lambda n: float(verify(n)))


def _random_text(model: HostModel, context: int) -> Text:
    ids = torch.zeros(context, dtype=torch.int64, device=model.device)
    final = torch.randn_like(model.embed(ids))
    shape = (int(model.config.num_key_value_heads), context, model.head_size)
    keys, values = (
        [torch.randn(shape, dtype=final.dtype, device=device_of(layer, final)) for layer in model.layers]
        for _ in range(2)
    )
    return Text(ids, ids, final, ids[:0], final[None, :0], keys, values)
