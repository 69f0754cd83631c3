"""KNN-SSD: a skip set per domain; the nearest anchor to its prompt decides a request's domain."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.selection.base import Selection
from layerskip_plugin.skip_set import SkipSet, read_json, undamaged, write_json

FORMAT = "freedraft knn 1"
ALL_DOMAINS = "all domains"


@dataclass(frozen=True)
class Domains:
    """Anchors in the space of last hidden states, each of one domain, and the skip sets of the domains."""

    names: tuple[str, ...]
    sets: tuple[SkipSet, ...]  # one per domain, and the global one last
    center: NDArray[np.float32]  # [hidden], mean state, subtracted before cosines
    anchors: NDArray[np.float32]  # [A, hidden], unit vectors
    domain: NDArray[np.int32]  # [A], of each anchor
    floor: float  # minimum cosine at which a prompt belongs to a domain

    def __post_init__(self) -> None:
        if len(self.sets) != len(self.names) + 1:
            raise ValueError(f"{len(self.names)} domains need {len(self.names) + 1} skip sets, not {len(self.sets)}")
        a, width = self.anchors.shape
        if self.domain.shape != (a,) or self.center.shape != (width,) or not np.isfinite(self.anchors).all():
            raise ValueError("anchors, domains and center do not fit together")
        if a and not 0 <= self.domain.min() <= self.domain.max() < len(self.names):
            raise ValueError("an anchor names an unknown domain")

    def route(self, hidden: NDArray[np.float32]) -> NDArray[np.intp]:
        """intp[B]: index in `sets` of each prompt's set, by float32[B, hidden] states: that of the anchor of the
        largest cosine (equation 4), the global one below the floor."""
        cosine = unit(hidden - self.center) @ self.anchors.T
        return np.where(cosine.max(1) >= self.floor, self.domain[cosine.argmax(1)], len(self.names))

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
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
        write_json(path, FORMAT, fields, about)

    @classmethod
    def load(cls, path: Path, n_layers: int | None = None, model: str | None = None) -> Self:
        """Read what `save` wrote; raises ValueError, one line, if it is damaged or of another model."""
        values = read_json(path, FORMAT, "knn")
        with undamaged("knn", path):
            sets = tuple(SkipSet.from_dict(s, str(path)) for s in values["sets"])
            domain = np.array(values["domain"], np.int32)
            center, anchors = _array(values["center"]), _array(values["anchors"]).reshape(-1, int(values["hidden"]))
            domains = cls(tuple(values["names"]), sets, center, unit(anchors), domain, float(values["floor"]))
        for skip in sets:
            skip.require(n_layers, model, str(path))
        return domains


class Knn(Selection):
    """Each request keeps the set of its domain; without a hidden state (a request resumed from elsewhere) the global
    one."""

    needs_prompt_states = True

    def __init__(self, domains: Domains) -> None:
        self.domains = domains
        names: dict[SkipSet, str] = {domains.sets[-1]: ALL_DOMAINS}
        for name, skip in zip(domains.names, domains.sets, strict=False):
            names.setdefault(skip, name)  # domains may share a set
        super().__init__({name: skip for skip, name in names.items()})

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        self.requests[request_id] = self.domains.sets[self.domains.route(state[None])[0]]


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1; zero rows stay zero."""
    return (rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)).astype(np.float32)


def _text(array: NDArray[np.float32]) -> str:
    return base64.b64encode(array.astype("<f2").tobytes()).decode()


def _array(text: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32)
