"""KNN-SSD: each domain has a skip set, and the nearest anchor of its prompt decides a request's domain."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead.rates import BinnedRate
from layerskip_plugin.selection.base import Counts, Hidden, Requested, Selection
from layerskip_plugin.skip_set import SkipSet, read_json, write_json

FORMAT = "freedraft knn 1"
ALL_DOMAINS = "all domains"
MIN_TRIALS, MAX_DEFICIT = 200.0, 0.03
"""Verified tokens of both sets after which an anchor whose own set is accepted this much less often than the global set
loses its requests."""
EXPLORE_EVERY = 20
"""One request in so many of an anchor drafts with the other one of the two sets, so that both are known."""
MAX_SETS = 4
"""Sets that one batch may hold."""


@dataclass(frozen=True)
class Domains:
    """Anchors in the space of last hidden states, each of one domain, and the skip sets of the domains.

    Attributes:
        names: of the domains.
        sets: one per domain, and the global one last.
        center: float32[hidden], mean of the calibration's states; it is subtracted before cosines, because the hidden
            states of all prompts share a large part.
        anchors: float32[A, hidden], unit vectors.
        domain: int32[A], of each anchor.
        floor: minimum cosine at which a prompt belongs to a domain.
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
        """The anchor of the largest cosine to each of float32[B, hidden] states (equation 4), and that cosine."""
        cosine = unit(hidden - self.center) @ self.anchors.T
        best = cosine.argmax(1)
        return best, cosine[np.arange(len(best)), best]

    def route(self, hidden: NDArray[np.float32]) -> NDArray[np.intp]:
        """intp[B]: index in `sets` of each prompt's set; the global one below the floor."""
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
        """Read what `save` wrote; `n_layers` and `model` (fingerprint) must match where they are given.

        Raises:
            ValueError: one line: the file is damaged or of another model.
        """
        values = read_json(path, FORMAT, "knn")
        try:
            sets = tuple(SkipSet.from_dict(s, str(path)) for s in values["sets"])
            width = int(values["hidden"])
            domain = np.array(values["domain"], np.int32)
            center, anchors = _array(values["center"]), _array(values["anchors"]).reshape(-1, width)
            domains = cls(tuple(values["names"]), sets, center, unit(anchors), domain, float(values["floor"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"knn: {path} is damaged: {error}; make it again with freedraft calibrate knn") from None
        for skip in sets:
            skip.require(n_layers, model, str(path))
        return domains


class Knn(Selection):
    """Each request keeps the set of its domain; acceptance is recorded per anchor, of its own set and the global one.

    An anchor whose requests accept the domain's set less often than the global one sends further requests to the global
    set. Only its own requests are compared, since some domains are harder than others.

    A batch never holds more than `MAX_SETS` sets: domains beyond the most frequent ones
    share the global set.
    """

    needs_hidden = True

    def __init__(self, domains: Domains) -> None:
        self.domains = domains
        # The global one first; domains that share a set share its index.
        named = zip([ALL_DOMAINS, *domains.names], [domains.sets[-1], *domains.sets[:-1]], strict=True)
        self._sets: dict[str, SkipSet] = {}
        for name, skip in named:
            if skip not in self._sets.values():
                self._sets[name] = skip
        built = list(self._sets.values())
        self._index = np.array([built.index(skip) for skip in domains.sets], np.intp)
        self._nowhere = len(domains.names), 2 * len(domains.anchors)
        # Domain and bin of acceptance by request: two bins per anchor, of its own set and the global one, and one for
        # requests of no domain.
        self.requests: dict[str, tuple[int, int]] = {}
        self.acceptance = BinnedRate(np.full(2 * len(domains.anchors) + 1, 0.5), weight=1.0, memory=2000.0)
        self._moved: set[str] = set()  # requests that drafted with the global set last, which is not their own
        self._begun = np.zeros(len(domains.anchors), np.int64)

    def sets(self) -> dict[str, SkipSet]:
        return self._sets

    def begin(self, request_ids: Sequence[str], requested: Requested = (), hidden: Hidden = None) -> None:
        """Route these requests; without `hidden` (a request resumed from elsewhere) they take the global set."""
        if hidden is None:
            self.requests |= dict.fromkeys(request_ids, self._nowhere)
            return
        all_domains, no_anchor = self._nowhere
        anchor, cosine = self.domains.nearest(hidden)
        (own, everywhere) = self.acceptance.rates[:-1].reshape(-1, 2)[anchor].T
        known = (self.acceptance.trials[:-1].reshape(-1, 2)[anchor] >= MIN_TRIALS).all(1)
        worse = known & (own < everywhere - MAX_DEFICIT)
        near = cosine >= self.domains.floor
        np.add.at(self._begun, anchor[near], 1)
        routed = near & (worse == (self._begun[anchor] % EXPLORE_EVERY == 0))
        domains = np.where(routed, self.domains.domain[anchor], all_domains)
        bins = np.where(near, 2 * anchor + ~routed, no_anchor)
        self.requests.update(zip(request_ids, zip(domains.tolist(), bins.tolist(), strict=True), strict=True))

    def choose(self, request_ids: Sequence[str], contexts: Counts) -> NDArray[np.intp]:
        self._moved = set()
        chosen = self._index[[self.requests.get(r, self._nowhere)[0] for r in request_ids]]
        counts = np.bincount(chosen, minlength=len(self._sets))
        if np.count_nonzero(counts) > MAX_SETS:
            counts[0] = 0
            rare = np.argsort(-counts, kind="stable")[MAX_SETS - 1 :]
            moved = np.isin(chosen, rare)
            chosen[moved] = 0
            self._moved = {request_ids[i] for i in np.flatnonzero(moved).tolist()}
        return chosen

    def record_acceptance(self, request_ids: Sequence[str], drafted: Counts, accepted: Counts) -> None:
        no_anchor = self._nowhere[1]
        bins = np.array([self.requests.get(r, self._nowhere)[1] for r in request_ids], np.intp)
        moved = np.array([r in self._moved for r in request_ids], np.bool_)
        bins = np.where(moved & (bins < no_anchor), bins | 1, bins)
        accepted = np.asarray(accepted)
        rejected = np.minimum(np.asarray(drafted), accepted + 1) - accepted
        trials = np.concatenate([np.repeat(bins, accepted), np.repeat(bins, rejected)])
        self.acceptance.add(trials, np.arange(len(trials)) < accepted.sum())

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
