"""KnapSpec by context: what several searches choose, and how well their tokens per time predict the speed.

Searches see tokens of the third quarter of texts; drafts are measured from tokens of the fourth, against the whole
model's. An attention and an MLP sublayer take the times of Llama-3.1-8B's on an H100 at batch `BATCH`, by the roofline.
Each search drafts with the set and at the length that it expects most of:
- apart: KnapSpec's search; static: its set for the first context, at all of them.
- bound: the same on whole layers, as CLaSp's.
- SWIFT: the best of random sets of `SWIFT` sublayers, every 25th by a Gaussian process; Bayesian: Self-SD's search.
  Both take the processor seconds of the search "apart".
- uniform: evenly spread sublayers.
"""

import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.lib.draft_chains import draft_chains
from bench.lib.machine import rounded
from bench.lib.prompts import LONG
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline
from layerskip_plugin import knapsack_search
from layerskip_plugin.calibrate import bayesian
from layerskip_plugin.calibrate.host_model import HostModel, Sample
from layerskip_plugin.calibrate.knapsack import Candidate, protected_sublayers, search
from layerskip_plugin.knapsack_search import integer_weights
from layerskip_plugin.pass_times import PassTimes, tokens_per_time
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.skip_set import SkipSet

LARGE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
BATCH = 32
TEXTS, LEARN, HELD = 2, 32, 96  # files of Python's library, and tokens of them
LONGEST = 6  # draft
SWIFT, UNIFORM = 24, (6, 12, 24, 36, 48, 60)  # numbers of sublayers
Found = dict[str, list[Candidate]]


def samples(host: HostModel, tokenizer: Any, size: int) -> tuple[Sample, Sample]:
    """Return tokens to search on and to measure with, of texts of `size` tokens."""
    library, learn, held = Path(sysconfig.get_paths()["stdlib"]), [], []
    quarters = ((size // 2, LEARN), (size * 3 // 4, HELD))
    kept = [torch.linspace(start, start + size // 4 - 1, count // TEXTS).long() for start, count in quarters]
    for name, _ in LONG[:TEXTS]:
        text = (library / name).read_text(encoding="utf-8")[: 8 * size]
        read = host.read(tokenizer(text, add_special_tokens=False)["input_ids"][:size], torch.cat(kept))
        learn.append(replace(read, kept=kept[0], states=read.states[:, : len(kept[0])]))
        held.append(replace(read, kept=kept[1], states=read.states[:, len(kept[0]) :]))
    return Sample(learn), Sample(held)


def times_at(n_layers: int, context: int) -> PassTimes:
    """Return the times of the 8B's parts, for as large shares of `n_layers` layers."""
    roofline = Roofline(LARGE, HardwareProfile.load("h100"))
    kinds: tuple[Sequence[int], ...] = ((), range(0, 64, 2), range(1, 64, 2))
    passes = [float(roofline.pass_seconds(SkipSet.of_sublayers(kind, 32), BATCH, context)) for kind in kinds]
    attention, mlp = passes[0] - passes[1], passes[0] - passes[2]
    verify = lambda n: float(roofline.seconds(BATCH, BATCH * n, context))  # noqa: E731
    return PassTimes(attention / n_layers, mlp / n_layers, passes[0] - attention - mlp, verify)


def scored(host: HostModel, sample: Sample, skips: Sequence[SkipSet]) -> list[Candidate]:
    found = zip(skips, *host.scores(skips, sample), strict=True)
    return [Candidate(skip, len(skip), float(cosine), float(agreement)) for skip, agreement, cosine in found]


def searches(host: HostModel, learn: Sample, times: PassTimes, kept: frozenset[int]) -> tuple[Found, dict[str, Any]]:
    """Return the sets to choose from by search, and the weights and budget. kept: sublayers that no set may skip."""

    def layer(index: int, h: Tensor) -> Tensor:
        return host.sublayer(2 * index + 1, host.sublayer(2 * index, h, learn), learn)

    def space(size: int | None) -> BitSearch:
        return BitSearch(host.n_layers, host.fingerprint, kept, size)

    def agreement(skips: Sequence[SkipSet]) -> NDArray[np.float64]:
        return host.scores(skips, learn)[0]

    started, weights = time.process_time(), integer_weights(times.attention, times.mlp)
    found = {"apart": search(host, learn, protected=kept, weights=weights)[1:]}
    budget = time.process_time() - started
    bound = knapsack_search.search(learn.states(0), layer, host.n_layers, protected={i // 2 for i in kept})
    sets = [host.skip(np.flatnonzero(row.repeat(2)).tolist()) for row in bound.skipped]
    found["bound"] = scored(host, learn, sets[1:])
    found["uniform"] = scored(host, learn, [space(n).uniform() for n in UNIFORM])
    swift, self_sd = space(SWIFT), space(None)
    started, new = time.process_time(), [swift.uniform()]
    while time.process_time() - started < budget:
        swift.register(new, agreement(new))
        new = list(dict.fromkeys([*(swift.random() for _ in range(24)), swift.bayesian()]))
    started = time.process_time()
    while time.process_time() - started < budget:
        bayesian.search(agreement, self_sd, len(self_sd.values) + 1, times)
    found |= {"SWIFT": scored(host, learn, [swift.best[0]]), "Bayesian": scored(host, learn, [self_sd.best[0]])}
    return found, {"weights": weights, "seconds": budget, "SWIFT": len(swift.values), "Bayesian": len(self_sd.values)}


def predicted(host: HostModel, candidate: Candidate, times: PassTimes) -> NDArray[np.float64]:
    """float64[LONGEST, 3]: by draft length the acceptance on searched tokens, and tokens per sublayer and per time
    that follow from it, over plain decoding."""
    acceptance = (candidate.agreement * LEARN + 0.5) / (LEARN + 1)
    share, draft = 1 - len(candidate.skip) / host.sublayers, times.draft(candidate.skip)
    return np.array([
        [
            acceptance,
            tokens_per_time(acceptance, share, lambda n: 1.0, length),
            tokens_per_time(acceptance, draft, times.verify, length) * times.verify(1),
        ]
        for length in range(1, LONGEST + 1)
    ])  # fmt: skip


def drafts(host: HostModel, held: Sample, skip: SkipSet) -> NDArray[np.int64]:
    """int64[N, LONGEST]: greedy drafts from each token."""
    return np.concatenate([draft_chains(host, skip, text, text.kept, LONGEST)[0] for text in held.texts])


def over_plain(right: NDArray[np.int64], times: PassTimes, skip: SkipSet) -> NDArray[np.float64]:
    """float64[N, LONGEST]: by draft length the measured tokens per time over plain decoding. right: int64[N, LONGEST],
    accepted tokens of a draft up to each of its tokens."""
    seconds = [length * times.draft(skip) + times.verify(length + 1) for length in range(1, LONGEST + 1)]
    return (1 + right) * times.verify(1) / np.array(seconds)


def mean(values: NDArray[np.float64]) -> list[float]:
    """Return the mean and its standard error."""
    return [float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)]


def correlations(points: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Return the correlation of each prediction with the measured speed; points: float64[N, 4] each."""
    found = np.corrcoef(np.concatenate(points).T)[3, :3].tolist()
    return dict(zip(("acceptance", "per_layer", "per_time"), found, strict=True))


def by_context(host: HostModel, tokenizer: Any, contexts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield figures of a growing number of contexts: of texts, or of texts and times ("4096:32768")."""
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    points: dict[str, list[NDArray[np.float64]]] = {"all": [], "best": []}  # of lengths
    protected, static, read = frozenset[int](), host.skip([]), 0
    for one in contexts:
        size, context = int(one.partition(":")[0]), int(one.rpartition(":")[2])
        if size != read:
            read, (learn, held) = size, samples(host, tokenizer, size)
            truth = drafts(host, held, host.skip([]))
        times, protected = times_at(host.n_layers, context), protected or protected_sublayers(host, learn)
        found, about = searches(host, learn, times, protected)
        further = [BitSearch(host.n_layers, host.fingerprint, protected, n).random() for n in UNIFORM[:2]]
        more = [*found["apart"][:: len(found["apart"]) // 2], *scored(host, learn, further)]
        here: dict[str, list[NDArray[np.float64]]] = {name: [] for name in points}
        static = static or max(found["apart"], key=lambda c: predicted(host, c, times)[:, 2].max()).skip
        found |= {"static": scored(host, learn, [static])} | {f"more {i}": [c] for i, c in enumerate(more)}
        rates: dict[str, NDArray[np.float64]] = {}
        for arm, candidates in found.items():
            best = max(candidates, key=lambda c: predicted(host, c, times)[:, 2].max())
            right = (drafts(host, held, best.skip) == truth).cumprod(1).cumsum(1)
            expected, measured = predicted(host, best, times), over_plain(right, times, best.skip)
            length = int(expected[:, 2].argmax())
            here["all"].append(np.column_stack([expected, measured.mean(0)]))
            here["best"].append(here["all"][-1][length : length + 1])
            row = {"context": context, "text": size, "arm": arm, "attention": len(best.skip.attention)}
            row |= {"mlp": len(best.skip.mlp), "length": length + 1, "acceptance": float(right[:, 0].mean())}
            row |= {"searched": best.agreement, "per_step": float(1 + right[:, length].mean())}
            row |= dict(zip(("per_layer", "per_time"), expected[length, 1:].tolist(), strict=True))
            rates[arm] = measured[:, length]
            row |= {"over_plain": mean(rates[arm]), "less": mean(rates["apart"] - rates[arm])}
            rows.append(row)
            print(rounded(row), flush=True)
        cells.append({"context": context, "ratio": times.attention / times.mlp} | about)
        cells[-1] |= {lengths: correlations(here[lengths]) for lengths in here}
        print(rounded(cells[-1]), flush=True)
        for lengths in points:
            points[lengths] += here[lengths]
        pooled = {lengths: correlations(points[lengths]) for lengths in points}
        yield rounded({"tokens": [LEARN, HELD], "batch": BATCH, "rows": rows, "cells": cells, "pooled": pooled})
