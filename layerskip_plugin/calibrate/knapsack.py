"""KnapSpec's search on calibration texts, and its evaluation by tokens per time (arXiv 2602.20217)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from layerskip_plugin import knapsack_search
from layerskip_plugin.calibrate.host_model import HostModel, Sample
from layerskip_plugin.pass_times import MAX_LENGTH, PassTimes
from layerskip_plugin.selection.knapsack import Choice
from layerskip_plugin.skip_set import SkipSet

PROTECT = 0.85
MIN_TOKENS = 24


@dataclass(frozen=True)
class ScoredSet:
    """A set, with its skipped weight, and on the sample the mean cosine of its last hidden states to the whole model's
    and the share of tokens on which their top-1 tokens agree."""

    skip: SkipSet
    weight: int
    cosine: float
    agreement: float


def protected_sublayers(model: HostModel, sample: Sample, min_agreement: float = PROTECT) -> frozenset[int]:
    """Sublayers that no set may skip: skipping that one alone leaves less than `min_agreement`."""
    agreement = model.agreement([model.skip([i]) for i in range(model.sublayers)], sample)
    return frozenset(np.flatnonzero(agreement < min_agreement).tolist())


@torch.inference_mode()
def search(model: HostModel, sample: Sample, **options: Any) -> list[ScoredSet]:
    """One set per reachable skipped weight, ascending from 0 (the empty set): the survivor of best agreement, then
    cosine. `options`: see `knapsack_search.search`."""
    found = knapsack_search.search(sample.states(0), partial(model.sublayer, sample=sample), model.sublayers, **options)
    final, best = sample.gather(lambda t: t.final), sample.gather(lambda t: t.best)
    drafted = model.norm(found.states)
    agreement = torch.stack([(model.best(h) == best).double().mean() for h in drafted]).numpy(force=True)
    similarity = knapsack_search.cosine(drafted, final)
    sets, order = found.sets(model.fingerprint), np.lexsort((-similarity, -agreement, found.weight))
    _, first = np.unique(found.weight[order], return_index=True)
    return [
        ScoredSet(sets[row], int(found.weight[row]), float(similarity[row]), float(agreement[row]))
        for row in order[first].tolist()
    ]


def best_choice(candidates: Sequence[ScoredSet], times: PassTimes, trials: int, max_length: int) -> Choice:
    """The set and draft length with the highest tokens per time; decoding without drafts competes. trials: tokens that
    agreement was measured on: acceptance is taken as (hits + 1/2) / (trials + 1)."""
    drafting, plain = best_drafting(candidates, times, trials, max_length), 1 / times.verify(1)
    if drafting is None:
        return Choice(SkipSet.empty(candidates[0].skip.n_layers, candidates[0].skip.model), 0, plain)
    return drafting if drafting.rate > plain else Choice(drafting.skip, 0, plain, trial_length=drafting.length)


def best_drafting(
    candidates: Sequence[ScoredSet], times: PassTimes, trials: int, max_length: int = MAX_LENGTH
) -> Choice | None:
    """The same among sets that skip something, even if decoding without drafts is faster; None without any."""
    choices = []
    for candidate in candidates:
        if candidate.skip:
            acceptance = (candidate.agreement * trials + 0.5) / (trials + 1)
            rate, length = times.best(candidate.skip, acceptance, max_length)
            choices.append(Choice(candidate.skip, length, rate))
    return max(choices, key=lambda choice: choice.rate, default=None)
