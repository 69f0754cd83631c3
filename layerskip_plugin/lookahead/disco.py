"""DISCO (Mamou et al. 2024): a small classifier says whether the token just drafted will be accepted."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead.base import Flags, Floats, Ints, Lookahead
from layerskip_plugin.lookahead.records import TOP, Verifications
from layerskip_plugin.skip_set import read_json, write_json

FORMAT = "freedraft disco 1"
FEATURES = TOP + 2
HIDDEN = 32
WEIGHTS = ("mean", "scale", "w1", "b1", "w2", "b2")
MIN_TOKENS = 100
"""Tokens of each kind, accepted and rejected, below which nothing can be said."""


@dataclass(frozen=True)
class Classifier:
    """Two-layer feed-forward network on (top-10 probabilities, entropy, position in the draft).

    Attributes:
        mean, scale: float32[12], standardise the features.
        w1, b1, w2, b2: float32[12, h], [h], [h, 1], [1]; ReLU between, a sigmoid behind.
        threshold: minimum probability of acceptance at which drafting goes on.
        model: fingerprint of the model that it was trained on.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]
    threshold: float
    model: str = ""

    def __post_init__(self) -> None:
        h = len(self.b1)
        shapes = [x.shape for x in (self.mean, self.scale, self.w1, self.b1, self.w2, self.b2)]
        if shapes != [(FEATURES,), (FEATURES,), (FEATURES, h), (h,), (h, 1), (1,)]:
            raise ValueError(f"disco: weights do not fit together: {shapes}")

    def probability(self, top: Floats, entropy: Floats, position: Ints) -> Floats:
        """float32[N]: chance that each token is accepted.

        Args:
            top: float32[N, 10], descending.
            entropy: float32[N], nats.
            position: int32[N].
        """
        x = (np.concatenate([top, entropy[:, None], position[:, None]], 1) - self.mean) / self.scale
        logit = np.maximum(x.astype(np.float32) @ self.w1 + self.b1, 0) @ self.w2 + self.b2
        return 1 / (1 + np.exp(-np.clip(logit[:, 0], -30, 30)))

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write a JSON file; `about` says where it comes from."""
        weights = {name: [round(float(x), 6) for x in getattr(self, name).ravel()] for name in WEIGHTS}
        fields = {"model": self.model, "threshold": self.threshold, "hidden": len(self.b1), "weights": weights}
        write_json(path, {"format": FORMAT, **fields, "about": about})

    @classmethod
    def load(cls, path: Path, model: str | None = None) -> Classifier:
        """Read what `save` wrote; with `model` (fingerprint), for that model only.

        Raises:
            ValueError: one line: the file is damaged, or trained on another model.
        """
        values = read_json(path, FORMAT, "disco")
        try:
            h, weights = int(values["hidden"]), values["weights"]
            mean, scale, w1, b1, w2, b2 = (np.array(weights[name], np.float32) for name in WEIGHTS)
            w1, w2 = w1.reshape(FEATURES, h), w2.reshape(h, 1)
            loaded = cls(mean, scale, w1, b1, w2, b2, float(values["threshold"]), str(values["model"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"disco: {path} is damaged: {error}") from None
        if model and loaded.model and model != loaded.model:
            raise ValueError(
                f"disco: {path} was trained on another model (fingerprint {loaded.model}, here {model}); "
                "train one with: freedraft calibrate disco"
            )
        return loaded


class Disco(Lookahead):
    """Go on while the classifier gives the token just drafted at least its threshold; that token is kept."""

    needs_top = TOP
    needs_entropy = True

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        if position + 1 >= self.max_draft_len:
            return np.zeros(len(rows), np.bool_)
        assert entropy is not None
        places = np.full(len(rows), position, np.int32)
        return self.classifier.probability(top, entropy, places) >= self.classifier.threshold


def f1(predicted: Flags, actual: Flags) -> float:
    """F1 of bool[N] predictions; 0 when nothing was predicted rightly."""
    hits = int((predicted & actual).sum())
    return 2 * hits / (int(predicted.sum()) + int(actual.sum())) if hits else 0.0


def best_f1_threshold(score: Floats, actual: Flags) -> float:
    """The threshold at which `score >= threshold` has the largest F1."""
    order = np.argsort(-score, kind="stable")
    hits = np.cumsum(actual[order])
    quality = 2 * hits / (np.arange(1, len(score) + 1) + actual.sum())
    last = np.append(score[order][1:] != score[order][:-1], True)
    return float(score[order][np.argmax(np.where(last, quality, -1))])


@dataclass(frozen=True)
class Comparison:
    """Held-out F1: of the classifier, of the best confidence threshold, and of always going on (fixed lookahead)."""

    classifier: float
    confidence: float
    fixed: float
    error: float
    """Standard error of the difference between the first two, by bootstrap over requests."""

    @property
    def better(self) -> bool:
        """Whether the classifier beats the threshold by more than chance."""
        return self.classifier - self.confidence > self.error


def train(records: Verifications, seed: int = 0) -> tuple[Classifier, Comparison]:
    """Fit a classifier on 3/4 of the requests and compare it with the confidence threshold on the others.

    Raises:
        ValueError: too few records, or of one kind or one request only.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    rng = np.random.default_rng(seed)
    kinds = [int(records.accepted.sum()), int((~records.accepted).sum())]
    if min(kinds) < MIN_TOKENS:
        raise ValueError(
            f"disco: {kinds[0]} accepted and {kinds[1]} rejected tokens are recorded; at least {MIN_TOKENS} of each "
            "are needed: record more traffic"
        )
    requests = rng.permutation(np.unique(records.request))
    if len(requests) < 4:
        raise ValueError(f"disco: the records are of {len(requests)} requests; at least 4 are needed, some to test on")
    held_out = np.isin(records.request, requests[: max(1, len(requests) // 4)])
    learned, tested = records.where(~held_out), records.where(held_out)
    if len(set(learned.accepted.tolist())) < 2 or len(set(tested.accepted.tolist())) < 2:
        raise ValueError("disco: the requests differ too much to be split for a test: record more traffic")
    x = np.concatenate([learned.top, learned.entropy[:, None], learned.position[:, None]], 1).astype(np.float32)
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-6)
    network = MLPClassifier((HIDDEN,), alpha=1e-3, early_stopping=len(x) >= 1000, max_iter=200, random_state=seed)
    with warnings.catch_warnings():
        # Where it stops is of no matter: what counts is measured below.
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.fit((x - mean) / scale, learned.accepted)
    w1, b1, w2, b2 = (
        w.astype(np.float32) for pair in zip(network.coefs_, network.intercepts_, strict=True) for w in pair
    )
    raw = Classifier(mean, scale, w1, b1, w2, b2, threshold=0.5, model=records.model)
    score = raw.probability(learned.top, learned.entropy, learned.position)
    classifier = replace(raw, threshold=best_f1_threshold(score, learned.accepted))
    return classifier, compare(classifier, best_f1_threshold(learned.top[:, 0], learned.accepted), tested, rng)


def compare(
    classifier: Classifier, threshold: float, tested: Verifications, rng: np.random.Generator, draws: int = 200
) -> Comparison:
    """The classifier, the confidence threshold and fixed lookahead on records that neither has seen."""
    by_classifier = classifier.probability(tested.top, tested.entropy, tested.position) >= classifier.threshold
    by_confidence = tested.top[:, 0] >= threshold
    requests, number = np.unique(tested.request, return_inverse=True)

    def sums(predicted: Flags) -> NDArray[np.float64]:
        parts = (predicted & tested.accepted, predicted, tested.accepted)
        return np.stack([np.bincount(number, weights=part, minlength=len(requests)) for part in parts])

    first, second = sums(by_classifier), sums(by_confidence)
    chosen = rng.integers(0, len(requests), (draws, len(requests)))

    def drawn(parts: NDArray[np.float64]) -> NDArray[np.float64]:
        hits, predicted, actual = parts[:, chosen].sum(2)
        return 2 * hits / np.maximum(predicted + actual, 1)

    error = float((drawn(first) - drawn(second)).std())
    always = np.ones(len(tested), np.bool_)
    scores = [f1(go_on, tested.accepted) for go_on in (by_classifier, by_confidence, always)]
    return Comparison(scores[0], scores[1], scores[2], error)
