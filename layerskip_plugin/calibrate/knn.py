"""KNN-SSD offline: anchors of domains, from the last hidden states of their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.selection.knn import Domains, unit
from layerskip_plugin.skip_set import SkipSet

MAX_ANCHORS = 10
MARGIN = 0.05
"""A prompt belongs to no domain when it is less similar to all anchors than 99 % of held-out prompts, by this much."""


def fit(
    hidden: Sequence[NDArray[np.float32]],
    names: Sequence[str],
    sets: Sequence[SkipSet],
    max_anchors: int = MAX_ANCHORS,
    seed: int = 0,
) -> Domains:
    """Fit anchors to the last hidden states of each domain's prompts: the centroids of k-means in each domain.

    Args:
        hidden: per domain float32[n, hidden], n >= 2.
        names: of the domains.
        sets: one per domain, and the global one.
        max_anchors: per domain.
        seed: of k-means.

    Raises:
        ValueError: fewer than two domains, or a domain of one prompt.
    """
    require_prompts({name: len(states) for name, states in zip(names, hidden, strict=True)})
    center = np.concatenate(hidden).mean(0)
    units = [unit(states - center) for states in hidden]
    anchors = [_centroids(states, max_anchors, seed) for states in units]
    domain = np.repeat(np.arange(len(names)), [len(a) for a in anchors]).astype(np.int32)
    # How similar prompts are to anchors that were fitted without them.
    halves = [(states[::2], states[1::2]) for states in units]
    held_out = [
        (states @ _centroids(other, max_anchors, seed).T).max(1)
        for pair in halves
        for states, other in (pair, pair[::-1])
    ]
    floor = float(np.percentile(np.concatenate(held_out), 1)) - MARGIN
    return Domains(tuple(names), tuple(sets), center.astype(np.float32), np.concatenate(anchors), domain, floor)


def _centroids(states: NDArray[np.float32], max_anchors: int, seed: int) -> NDArray[np.float32]:
    """float32[k, hidden] unit vectors: k-means centroids of unit vectors, at most one for two of them."""
    from sklearn.cluster import KMeans

    count = min(max_anchors, max(1, len(states) // 2), len(np.unique(states, axis=0)))
    return unit(KMeans(count, n_init=4, random_state=seed).fit(states).cluster_centers_.astype(np.float32))


def clusters(hidden: NDArray[np.float32], count: int, seed: int = 0) -> list[NDArray[np.intp]]:
    """Domains of prompts without labels: k-means over their last hidden states (KNN-SSD's Alpaca, 5 clusters).

    Args:
        hidden: float32[n, hidden].
        count: of clusters.
        seed: of k-means.

    Returns:
        The prompts of each cluster, most frequent first; clusters of one prompt are left to the global set.

    Raises:
        ValueError: fewer than two clusters, or prompts that do not fall into so many.
    """
    from sklearn.cluster import KMeans

    if count < 2 or len(hidden) < 2 * count:
        raise ValueError(
            f"clusters: {count} from {len(hidden)} prompts: ask for at least 2, and give at least {2 * max(count, 2)} "
            "prompts, better 20 or more for each"
        )
    label = KMeans(count, n_init=4, random_state=seed).fit_predict(unit(hidden - hidden.mean(0)))
    members = [np.flatnonzero(label == i) for i in range(count)]
    large = sorted((m for m in members if len(m) > 1), key=len, reverse=True)
    if len(large) < 2:
        raise ValueError(f"clusters: these {len(hidden)} prompts are too much alike for {count}: use static")
    return large


def require_prompts(counts: Mapping[str, int]) -> None:
    """Refuse domains that cannot be told apart.

    Raises:
        ValueError: fewer than two domains, or one with fewer than two prompts.
    """
    if len(counts) < 2:
        raise ValueError("knn: at least two domains are needed, one file of prompts each; for one, use static")
    for name, count in counts.items():
        if count < 2:
            raise ValueError(f"knn: domain {name} has {count} prompt(s); give at least 2, better 20 or more")
