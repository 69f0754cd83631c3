"""KNN-SSD offline: anchors of domains, from the last hidden states of their prompts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.calibrate.knapsack import protected_sublayers
from layerskip_plugin.calibrate.prompts import Answered, Prompts, encode
from layerskip_plugin.calibrate.run import Run, bar
from layerskip_plugin.selection.knn import ALL_DOMAINS, Domains, unit
from layerskip_plugin.skip_set import SkipSet

MAX_ANCHORS = 10
MARGIN = 0.05  # margin of the similarity floor below that of 99 % of held-out prompts


def calibrate(
    run: Run, size: int | None, count: int | None, answered: int, anchors: str, survivors: int
) -> tuple[Domains, float]:
    """Anchors and skip sets of the domains, and the share of the prompts routed to their own domain.

    Args:
        size: of the sets; None: the one of most tokens per time.
        count: clusters to find in a log without labels; None: each file is a domain.
        answered: prompts of each domain that the model answers for its set.
    """
    parts, hidden = _files(run) if count is None else _clusters(run, count)

    def best_set(name: str, answers: Sequence[Answered]) -> SkipSet:
        sample = run.sample(answers)
        protected = protected_sublayers(run.model, sample)
        found = run.search(f"set of {name}", sample, max_weight=size, protected=protected, survivors=survivors)
        return found[-1].skip if size is not None else run.fastest(found, len(sample))[0].skip

    answers = [run.answers(part, min(answered, len(part.texts))) for part in parts]
    answers.append([a for part in answers for a in part])
    names = [part.name for part in parts]
    sets = [best_set(name, part) for name, part in zip([*names, ALL_DOMAINS], answers, strict=True)]
    domains = fit(hidden, names, sets, anchors=anchors, seed=run.common.seed)
    return domains, float(np.mean([(domains.route(h) == i).mean() for i, h in enumerate(hidden)]))


def _files(run: Run) -> tuple[list[Prompts], list[NDArray[np.float32]]]:
    """The domains, one per file, and the last hidden states of their prompts."""
    parts = [Prompts(p.texts[: run.common.prompts], p.name, p.sha256) for p in run.prompts]
    if len({p.name for p in parts}) < len(parts):
        raise ValueError("data: two files have the same name, and it names the domain; rename one")
    if len(parts) < 2:
        raise ValueError("knn: at least two domains are needed, one file of prompts each; for one, use static")
    for part in parts:
        if len(part.texts) < 2:
            raise ValueError(
                f"knn: domain {part.name} has {len(part.texts)} prompt(s); give at least 2, better 20 or more"
            )
    return parts, [_last_states(run, p.texts) for p in parts]


def _clusters(run: Run, count: int) -> tuple[list[Prompts], list[NDArray[np.float32]]]:
    """The same for clusters of all files together."""
    log = [text for p in run.prompts for text in p.texts]
    order = np.random.default_rng(run.common.seed).permutation(len(log))[: run.common.prompts * count]
    log = [log[i] for i in order]
    states = _last_states(run, log)
    members = clusters(states, count, run.common.seed)
    parts = [Prompts([log[i] for i in m], f"cluster {n}", "") for n, m in enumerate(members, 1)]
    return parts, [states[m] for m in members]


def _last_states(run: Run, texts: Sequence[str]) -> NDArray[np.float32]:
    rows = []
    with bar("reading", len(texts)) as advance:
        for text in texts:
            rows.append(run.model.read(encode(run.tokenizer, text)).final[-1].float().numpy(force=True))
            advance()
    return np.stack(rows)


def fit(
    hidden: Sequence[NDArray[np.float32]],
    names: Sequence[str],
    sets: Sequence[SkipSet],
    max_anchors: int = MAX_ANCHORS,
    seed: int = 0,
    anchors: str = "kmeans",
) -> Domains:
    """Fit at most `max_anchors` anchors to the last hidden states of each domain's prompts, float32[n, hidden]: the
    centroids of "kmeans", or the states "nearest" to the domain's centroid (equation 2). `sets`: one per domain, and
    the global one."""
    anchors_of = {"kmeans": _centroids, "nearest": _nearest}[anchors]
    center = np.concatenate(hidden).mean(0)
    units = [unit(states - center) for states in hidden]
    found = [anchors_of(states, max_anchors, seed) for states in units]
    domain = np.repeat(np.arange(len(names)), [len(a) for a in found]).astype(np.int32)
    # Similarity of prompts to anchors fitted without them.
    held_out = [
        (states[i::2] @ anchors_of(states[1 - i :: 2], max_anchors, seed).T).max(1) for states in units for i in (0, 1)
    ]
    floor = float(np.percentile(np.concatenate(held_out), 1)) - MARGIN
    return Domains(tuple(names), tuple(sets), center.astype(np.float32), np.concatenate(found), domain, floor)


def _nearest(states: NDArray[np.float32], max_anchors: int, seed: int) -> NDArray[np.float32]:
    distance = np.linalg.norm(states - states.mean(0), axis=1)
    return states[distance.argsort(kind="stable")[:max_anchors]]


def _centroids(states: NDArray[np.float32], max_anchors: int, seed: int) -> NDArray[np.float32]:
    """float32[k, hidden] unit vectors: k-means centroids of unit vectors, at most one for two of them."""
    from sklearn.cluster import KMeans

    count = min(max_anchors, max(1, len(states) // 2), len(np.unique(states, axis=0)))
    return unit(KMeans(count, n_init=4, random_state=seed).fit(states).cluster_centers_.astype(np.float32))


def clusters(hidden: NDArray[np.float32], count: int, seed: int = 0) -> list[NDArray[np.intp]]:
    """Domains of prompts without labels: k-means over their last hidden states, float32[n, hidden] (KNN-SSD's Alpaca,
    5 clusters). The prompts of each cluster, largest first; clusters of one prompt are left to the global set. Raises
    ValueError for fewer than two clusters, or too few or too similar prompts."""
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
