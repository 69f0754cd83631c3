"""KNN-SSD: a skip set per domain, chosen once per request by the nearest anchor of its prompt."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead.rates import BinnedRate
from layerskip_plugin.selection.base import Selection
from layerskip_plugin.skip_set import SkipSet, read_json, write_json

FORMAT = "freedraft knn 1"
EVERYTHING = "all domains"
ANCHORS = 10
MARGIN = 0.05
"""A prompt belongs to no domain when it is less similar to all anchors than 99 % of held-out prompts, by this much."""
ENOUGH, WORSE = 200.0, 0.03
"""Judged tokens after which an anchor whose acceptance is worse than the global set's by this loses its requests."""
MOST_SETS = 4
"""Sets that one batch may hold."""


@dataclass(frozen=True)
class Domains:
    """Anchors in the space of last hidden states, and the sets behind them.

    Attributes:
        names: of the domains.
        sets: one per domain, and the global one behind them.
        center: float32[hidden], mean of the calibration's states; it is taken off before cosines, because hidden states
            of all prompts share a large part.
        anchors: float32[A, hidden], unit vectors.
        domain: int32[A], of each anchor.
        floor: least cosine at which a prompt belongs to a domain.
    """

    names: tuple[str, ...]
    sets: tuple[SkipSet, ...]
    center: NDArray[np.float32]
    anchors: NDArray[np.float32]
    domain: NDArray[np.int32]
    floor: float

    def __post_init__(self) -> None:
        if len(self.sets) != len(self.names) + 1:
            raise ValueError(f"{len(self.names)} domains need {len(self.names) + 1} skip sets, not {len(self.sets)}")
        a, width = self.anchors.shape
        if self.domain.shape != (a,) or self.center.shape != (width,) or not np.isfinite(self.anchors).all():
            raise ValueError("anchors, domains and center do not fit together")
        if a and not 0 <= self.domain.min() <= self.domain.max() < len(self.names):
            raise ValueError("an anchor names a domain that there is not")

    def nearest(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Per prompt, equation 4: the anchor of the largest cosine, and that cosine. `hidden`: float32[B, hidden]."""
        cosine = unit(hidden - self.center) @ self.anchors.T
        best = cosine.argmax(1)
        return best, cosine[np.arange(len(best)), best]

    def route(self, hidden: NDArray[np.float32]) -> NDArray[np.intp]:
        """Per prompt, place of its set in `sets`; the last one below the floor."""
        anchor, cosine = self.nearest(hidden)
        return np.where(cosine >= self.floor, self.domain[anchor], len(self.names))

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write a JSON file; `about` says where it comes from."""
        fields = {
            "model": self.sets[-1].model,
            "names": list(self.names),
            "sets": [skip.to_dict() for skip in self.sets],
            "floor": self.floor,
            "domain": self.domain.tolist(),
            "hidden": len(self.center),
            "center": _text(self.center),
            "anchors": _text(self.anchors),
        }
        write_json(path, {"format": FORMAT, **fields, "about": dict(about)})

    @classmethod
    def load(cls, path: Path, n_layers: int | None = None, model: str | None = None) -> Domains:
        """Read what `save` wrote; with `n_layers` and `model` (fingerprint), for that model only.

        Raises:
            ValueError: one line: the file is damaged or of another model.
        """
        values = read_json(path, FORMAT, "knn")
        try:
            sets = tuple(SkipSet.from_dict(s, str(path)) for s in values["sets"])
            width = int(values["hidden"])
            domain = np.array(values["domain"], np.int32)
            center, anchors = _array(values["center"]), _array(values["anchors"]).reshape(-1, width)
            loaded = cls(tuple(values["names"]), sets, center, unit(anchors), domain, float(values["floor"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"knn: {path} is damaged: {error}; make it again with freedraft calibrate knn") from None
        for skip in sets:
            skip.require(n_layers, model, str(path))
        return loaded


def fit(
    hidden: Sequence[NDArray[np.float32]],
    names: Sequence[str],
    sets: Sequence[SkipSet],
    anchors: int = ANCHORS,
    seed: int = 0,
) -> Domains:
    """Anchors from the last hidden states of each domain's prompts: centres of k-means in each domain.

    Args:
        hidden: per domain float32[n, hidden], n >= 2.
        names: of the domains.
        sets: one per domain, and the global one.
        anchors: most anchors per domain.

    Raises:
        ValueError: fewer than two domains, or a domain of one prompt.
    """
    require_prompts({name: len(states) for name, states in zip(names, hidden, strict=True)})
    center = np.concatenate(hidden).mean(0)
    units = [unit(states - center) for states in hidden]
    centres = [_centres(states, anchors, seed) for states in units]
    domain = np.repeat(np.arange(len(names)), [len(c) for c in centres]).astype(np.int32)
    # How similar prompts are to anchors that were made without them.
    halves = [(states[::2], states[1::2]) for states in units]
    similar = [
        (seen @ _centres(other, anchors, seed).T).max(1) for pair in halves for seen, other in (pair, pair[::-1])
    ]
    floor = float(np.percentile(np.concatenate(similar), 1)) - MARGIN
    return Domains(tuple(names), tuple(sets), center.astype(np.float32), np.concatenate(centres), domain, floor)


def _centres(states: NDArray[np.float32], anchors: int, seed: int) -> NDArray[np.float32]:
    """float32[k, hidden] unit vectors: k-means centres of unit vectors, at most one for two of them."""
    from sklearn.cluster import KMeans

    count = min(anchors, max(1, len(states) // 2), len(np.unique(states, axis=0)))
    return unit(KMeans(count, n_init=4, random_state=seed).fit(states).cluster_centers_.astype(np.float32))


def require_prompts(counts: Mapping[str, int]) -> None:
    """Refuse domains that cannot be told apart.

    Raises:
        ValueError: fewer than two domains, or one with a single prompt.
    """
    if len(counts) < 2:
        raise ValueError("knn: at least two domains are needed, one file of prompts each; for one, use static")
    for name, count in counts.items():
        if count < 2:
            raise ValueError(f"knn: domain {name} has {count} prompt(s); give at least 2, better 20 or more")


class Knn(Selection):
    """Each request keeps the set of its domain; acceptance is followed per anchor.

    An anchor on whose requests the domain's set is accepted less often than the global set is elsewhere sends further
    requests to the global set. A batch never holds more than `MOST_SETS` sets: domains beyond the most used ones share
    the global set.
    """

    needs_hidden = True

    def __init__(self, domains: Domains) -> None:
        self.domains = domains
        # The global one first; domains that share a set share its place.
        named = zip([EVERYTHING, *domains.names], [domains.sets[-1], *domains.sets[:-1]], strict=True)
        self._sets: dict[str, SkipSet] = {}
        for name, skip in named:
            if skip not in self._sets.values():
                self._sets[name] = skip
        built = list(self._sets.values())
        self._place = np.array([built.index(skip) for skip in domains.sets], np.intp)
        self.requests: dict[str, tuple[int, int]] = {}
        # One bin per anchor, and one for requests of no domain.
        self.acceptance = BinnedRate(np.full(len(domains.anchors) + 1, 0.5), weight=1.0, memory=2000.0)

    def sets(self) -> dict[str, SkipSet]:
        return self._sets

    def begin(
        self, request_ids: Sequence[str], hidden: NDArray[np.float32] | None = None, wanted: Sequence[Any] = ()
    ) -> None:
        """Route these requests; without `hidden` (a request resumed from elsewhere) they take the global set."""
        nowhere, everyone = len(self.domains.anchors), len(self.domains.names)
        if hidden is None:
            self.requests |= dict.fromkeys(request_ids, (everyone, nowhere))
            return
        anchor, cosine = self.domains.nearest(hidden)
        rates, trials = self.acceptance.rates, self.acceptance.trials
        worse = (trials >= ENOUGH) & (rates < rates[nowhere] - WORSE) & (trials[nowhere] >= ENOUGH)
        ours = (cosine >= self.domains.floor) & ~worse[anchor]
        chosen = np.where(ours, self.domains.domain[anchor], everyone)
        counted = np.where(ours, anchor, nowhere)
        for request, one, bin_ in zip(request_ids, chosen.tolist(), counted.tolist(), strict=True):
            self.requests[request] = (one, bin_)

    def choose(self, request_ids: Sequence[str], context: NDArray[np.int32]) -> NDArray[np.intp]:
        everyone = len(self.domains.names)
        chosen = self._place[[self.requests.get(r, (everyone, 0))[0] for r in request_ids]]
        counts = np.bincount(chosen, minlength=len(self._sets))
        if np.count_nonzero(counts) > MOST_SETS:
            counts[0] = 0
            rare = np.argsort(-counts, kind="stable")[MOST_SETS - 1 :]
            chosen[np.isin(chosen, rare)] = 0
        return chosen

    def observe(self, request_ids: Sequence[str], drafted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        bins = np.array([self.requests.get(r, (0, len(self.domains.anchors)))[1] for r in request_ids], np.intp)
        accepted = np.asarray(accepted)
        missed = np.minimum(np.asarray(drafted), accepted + 1) - accepted
        everything = np.concatenate([np.repeat(bins, accepted), np.repeat(bins, missed)])
        self.acceptance.add(everything, np.arange(len(everything)) < accepted.sum())

    def finish(self, request_ids: Sequence[str]) -> None:
        for request in request_ids:
            self.requests.pop(request, None)


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; zero rows stay zero."""
    return (rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)).astype(np.float32)


def _text(array: NDArray[np.float32]) -> str:
    return base64.b64encode(array.astype("<f2").tobytes()).decode()


def _array(text: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32)
