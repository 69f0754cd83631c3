"""KnapSpec: the choice of sublayers to skip as a 0/1 knapsack (arXiv 2602.20217).

Items are the 2L attention and MLP sublayers in order, a sublayer's weight is the time that skipping it saves, and the
value of a set is the cosine of its hidden states to the whole model's. g[i, j] holds the best states after the first i
sublayers with skipped weight j:

    execute sublayer i: f_i(g[i - 1, j])        skip it: g[i - 1, j - w_i]

All weights j are executed in one batch. States are chosen by their value after each sublayer, so this is a beam search
that keeps the best `survivors` of each weight, not an exact optimum.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from layerskip_plugin.skip_set import SkipSet

PRUNE = 0.5
# Time of a search grows with the weights. Weights up to 12 gained less than the error (docs/papers.md).
MAX_WEIGHT = 5

RunSublayer = Callable[[int, Tensor], Tensor]  # the hidden states after a sublayer, for float[J, N, hidden] before it


class Survivors(NamedTuple):
    """The J partial sets at the end of a search."""

    skipped: NDArray[np.bool_]  # [J, 2L]
    weight: NDArray[np.int64]  # [J], ascending
    states: Tensor  # float[J, N, hidden], not normed

    def sets(self, model: str = "") -> list[SkipSet]:
        return [SkipSet.of_sublayers(np.flatnonzero(row), len(row) // 2, model) for row in self.skipped]


def integer_weights(attention: float, mlp: float) -> tuple[int, int]:
    """Weights of an attention and an MLP sublayer from their seconds: w = round(t / min(t)), at most 5."""
    if not (attention > 0 and mlp > 0):
        raise ValueError(f"latencies of sublayers must be positive, not {attention} and {mlp}")
    unit = min(attention, mlp)
    return min(MAX_WEIGHT, round(attention / unit)), min(MAX_WEIGHT, round(mlp / unit))


@torch.inference_mode()
def search(
    embedded: Tensor,
    sublayer: RunSublayer,
    sublayers: int,
    weights: tuple[int, int] = (1, 1),
    max_weight: int | None = None,
    protected: Iterable[int] = (),
    prune: float = PRUNE,
    survivors: int = 1,
    progress: Callable[[], object] = lambda: None,
    base: Iterable[int] = (),
) -> Survivors:
    """The best sets by skipped weight, 0 included: the empty set, or `base`.

    Args:
        embedded: float[N, hidden], tokens before the first of the 2L `sublayers`.
        weights: of an attention and of an MLP sublayer.
        max_weight: limit of the skipped weight; None: half of the whole.
        protected: sublayers that are never skipped; base: those that every set skips, with weight 0.
        prune: cosine below which a partial set is dropped.
        survivors: partial sets kept per weight; 1 is the paper's.
    """
    w = np.array([weights[i % 2] for i in range(sublayers)])
    max_weight = int(w.sum()) // 2 if max_weight is None else max_weight
    protected, base = frozenset(protected), frozenset(base)
    states = whole = embedded[None]
    skipped, weight = np.zeros((1, sublayers), np.bool_), np.zeros(1, np.int64)
    for i in range(sublayers):
        progress()
        if i in base:
            whole = sublayer(i, whole)
            skipped[:, i] = True
            continue
        # The set that skips nothing comes first, and stays.
        executed = sublayer(i, torch.cat([whole, states]) if base else states)
        whole, executed = executed[:1], executed[1 if base else 0 :]
        fits = np.flatnonzero((weight + w[i] <= max_weight) & (i not in protected))
        without = skipped[fits].copy()
        without[:, i] = True
        states = torch.cat([executed, states[torch.from_numpy(fits).to(states.device)]])
        skipped, weight = np.concatenate([skipped, without]), np.concatenate([weight, weight[fits] + w[i]])
        value = cosine(states, whole[0])
        order = np.lexsort((-value, weight))
        rank = np.arange(len(order)) - np.searchsorted(weight[order], weight[order])
        stay = order[(rank < survivors) & ((value[order] >= prune) | (weight[order] == 0))]
        states, skipped, weight = states[torch.from_numpy(stay).to(states.device)], skipped[stay], weight[stay]
    return Survivors(skipped, weight, states)


def cosine(states: Tensor, whole: Tensor) -> NDArray[np.float64]:
    """float64[J]: mean over tokens of the cosine between float[J, N, hidden] and float[N, hidden]."""
    return functional.cosine_similarity(states.float(), whole.float(), dim=-1).double().mean(1).numpy(force=True)
