"""DISCO (Mamou et al. 2024): a small classifier predicts whether the token just drafted will be accepted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.lookahead.records import JUDGED, TOP
from layerskip_plugin.rounds import Flags, Floats, Ints
from layerskip_plugin.skip_set import read_json, undamaged, write_json

FORMAT = "freedraft disco 2"
FEATURES = TOP + 2
WEIGHTS = ("mean", "scale", "w1", "b1", "w2", "b2")


def features(top: Floats, entropy: Floats, position: Ints) -> NDArray[np.float64]:
    """float64 [N, 12] of [N, 10] descending probabilities, [N] in nats, and int32 [N] places in the draft."""
    return np.concatenate([top, entropy[:, None], position[:, None]], 1)


@dataclass(frozen=True)
class Classifier:
    """Two-layer feed-forward network on `features`.

    Attributes:
        weights: float32 each: mean [12] and scale [12] of the features; w1 [12, h] and b1 [h], ReLU after them;
            w2 [h, 1] and b2 [1], a sigmoid after them.
        threshold: minimum probability of acceptance at which drafting goes on.
        max_length: of a draft.
        model: fingerprint of the model of the training data.
    """

    weights: tuple[Floats, ...]
    threshold: float
    max_length: int
    model: str = ""

    def probability(self, x: NDArray[np.float64]) -> Floats:
        """float32[N]: chance that each token is accepted, from its features, float64 [N, 12]."""
        mean, scale, w1, b1, w2, b2 = self.weights
        logit = np.maximum(((x - mean) / scale).astype(np.float32) @ w1 + b1, 0) @ w2 + b2
        return 1 / (1 + np.exp(-np.clip(logit[:, 0], -30, 30)))

    def save(self, path: Path, about: dict[str, Any]) -> None:
        lists = [[round(float(x), 6) for x in array.ravel()] for array in self.weights]
        fields = {"model": self.model, "threshold": self.threshold, "max_length": self.max_length}
        fields |= {"hidden": len(self.weights[3]), "weights": dict(zip(WEIGHTS, lists, strict=True))}
        write_json(path, FORMAT, fields, about)

    @classmethod
    def load(cls, path: Path, model: str | None = None) -> Self:
        """Read what `save` wrote; raises ValueError, one line, if it is damaged or trained on another model."""
        values = read_json(path, FORMAT, "disco")
        with undamaged("disco", path):
            h = int(values["hidden"])
            shapes = ((FEATURES,), (FEATURES,), (FEATURES, h), (h,), (h, 1), (1,))
            lists = [values["weights"][name] for name in WEIGHTS]
            arrays = (np.array(w, np.float32).reshape(shape) for w, shape in zip(lists, shapes, strict=True))
            rule = float(values["threshold"]), int(values["max_length"])
            loaded = cls(tuple(arrays), *rule, str(values["model"]))
        if model and loaded.model and model != loaded.model:
            raise ValueError(
                f"disco: {path} was trained on another model (fingerprint {loaded.model}, here {model}); "
                "train one with: freedraft calibrate disco"
            )
        return loaded


class Disco(Lookahead):
    """Go on while the classifier's probability for the token just drafted is at least its threshold, up to its maximum
    length; that token is kept."""

    outputs = JUDGED

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    def expected_len(self) -> int:
        return min(super().expected_len(), self.classifier.max_length)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats) -> Flags:
        if position + 1 >= min(self.max_draft_len, self.classifier.max_length):
            return np.zeros(len(rows), np.bool_)
        x = features(top[:, :TOP], entropy, np.full(len(rows), position, np.int32))
        return self.classifier.probability(x) >= self.classifier.threshold
