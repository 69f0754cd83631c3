"""DISCO's classifier: trained on recorded verifications, and compared with plainer rules by tokens per time."""

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead.disco import Classifier, features
from layerskip_plugin.lookahead.records import Verifications
from layerskip_plugin.rounds import Floats

HIDDEN = 32
DRAWS = 200  # of the bootstrap
MIN_TOKENS = 100  # least number of accepted and of rejected tokens


class Prices(NamedTuple):
    """Times in plain steps of a draft pass, and of a further query token of verification."""

    draft_pass: float
    query_token: float


class Rule(NamedTuple):
    """Go on while a token's score is at least `threshold`, up to `max_length` tokens (the paper's tau and SL_max)."""

    threshold: float
    max_length: int


class RecordedRounds:
    """Recorded verifications by round: R rounds of at most L judged tokens."""

    def __init__(self, records: Verifications) -> None:
        order = np.lexsort((records.position, records.round, records.request))
        keys = np.stack((records.request, records.round))[:, order]
        first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(0)))
        self.lengths = np.diff(np.append(first, len(order)))  # int [R], judged tokens
        place = np.arange(self.lengths.max(initial=0))
        inside = place < self.lengths[:, None]
        # intp [R, L], places in the records, -1 for none
        self.entries = np.where(inside, order[np.minimum(first[:, None] + place, len(order) - 1)], -1)
        good = inside & records.accepted[self.entries]
        self.accepted, self.rejected = good.sum(1), (inside & ~good).any(1)  # [R]; whether the last one was rejected
        self.request = keys[0, first]

    def outcome(self, score: Floats, rule: Rule, prices: Prices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """float64 [R] each: tokens of a round under a rule, by the score of each record (float32 [N]), and its time in
        plain steps. Nothing was recorded after a rejected token: there the rule is taken to go on as often as at
        rejected tokens. It stops after the last token of a fully accepted draft."""
        scores = np.where(self.entries >= 0, score[self.entries], -np.inf)
        stops = np.append(scores < rule.threshold, np.ones((len(scores), 1), np.bool_), 1).argmax(1)
        drafted = np.minimum(np.minimum(stops + 1, self.lengths), rule.max_length)
        beyond = self.rejected & (stops >= self.lengths) & (self.lengths < rule.max_length)
        last = scores[np.arange(len(scores)), self.lengths - 1][self.rejected]
        again = float((last >= rule.threshold).mean()) if len(last) else 0.0
        wasted = np.cumsum(again ** np.arange(rule.max_length))[rule.max_length - self.lengths[beyond] - 1]
        total = drafted.astype(np.float64)
        total[beyond] += wasted
        return 1.0 + np.minimum(self.accepted, drafted), 1.0 + (prices.draft_pass + prices.query_token) * total

    def best_rule(self, score: Floats, prices: Prices) -> Rule:
        grid = [-np.inf, *np.unique(np.quantile(score, np.linspace(0, 1, 41)))]
        rules = [Rule(float(t), n) for t in grid for n in range(1, self.entries.shape[1] + 1)]
        return max(rules, key=lambda rule: np.divide(*(part.sum() for part in self.outcome(score, rule, prices))))


@dataclass(frozen=True)
class Comparison:
    """Held-out tokens per plain step (1: no drafting) of the classifier, of the best confidence threshold, and of the
    best fixed length; thresholds and lengths were chosen on other requests."""

    classifier: float
    confidence: float
    fixed: float
    error: float
    """Standard error of the difference between the first and the best of the others, by bootstrap over requests."""

    @property
    def better(self) -> bool:
        return self.classifier - max(self.confidence, self.fixed, 1.0) > self.error


def train(records: Verifications, prices: Prices, seed: int = 0) -> tuple[Classifier, Comparison]:
    """Fit a classifier on a half of the requests, choose threshold and length on a quarter by tokens per time, as the
    paper does by latency, and compare on the last quarter. Raises ValueError for too few records, requests or kinds."""
    rng = np.random.default_rng(seed)
    learned, chosen, tested = _split(records, rng)
    raw = fit(learned, seed)

    def scores(part: Verifications) -> tuple[Floats, Floats, Floats]:
        """Of the classifier, a confidence threshold and a fixed length."""
        probability = raw.probability(features(part.top, part.entropy, part.position))
        return probability, part.top[:, 0], np.ones(len(part), np.float32)

    rounds = RecordedRounds(chosen)
    rules = [rounds.best_rule(score, prices) for score in scores(chosen)]
    threshold, max_length = rules[0]
    classifier = replace(raw, threshold=max(threshold, 0.0), max_length=max_length)
    rounds = RecordedRounds(tested)
    outcomes = [rounds.outcome(score, rule, prices) for score, rule in zip(scores(tested), rules, strict=True)]
    return classifier, _compare(outcomes, rounds.request, rng)


def _split(records: Verifications, rng: np.random.Generator) -> list[Verifications]:
    kinds = [int(records.accepted.sum()), int((~records.accepted).sum())]
    if min(kinds) < MIN_TOKENS:
        raise ValueError(
            f"disco: {kinds[0]} accepted and {kinds[1]} rejected tokens are recorded; at least {MIN_TOKENS} of each "
            "are needed: record more traffic"
        )
    requests = rng.permutation(np.unique(records.request))
    if len(requests) < 4:
        raise ValueError(f"disco: the records are of {len(requests)} requests; at least 4 are needed, some to test on")
    quarter = len(requests) // 4
    parts = (requests[2 * quarter :], requests[:quarter], requests[quarter : 2 * quarter])
    learned, chosen, tested = (records.where(np.isin(records.request, part)) for part in parts)
    if len(np.unique(learned.accepted)) < 2 or not len(chosen) or not len(tested):
        raise ValueError("disco: the requests differ too much to be split for a test: record more traffic")
    return [learned, chosen, tested]


def fit(records: Verifications, seed: int) -> Classifier:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    x = features(records.top, records.entropy, records.position).astype(np.float32)
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-6)
    network = MLPClassifier((HIDDEN,), alpha=1e-3, early_stopping=len(x) >= 1000, max_iter=200, random_state=seed)
    with warnings.catch_warnings():
        # Convergence does not matter: the classifier is evaluated afterwards.
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.fit((x - mean) / scale, records.accepted)
    layers = [w for pair in zip(network.coefs_, network.intercepts_, strict=True) for w in pair]
    weights = (mean, scale, *(w.astype(np.float32) for w in layers))
    return Classifier(weights, threshold=0.5, max_length=1, model=records.model)


def _compare(outcomes: list[Any], request: NDArray[Any], rng: np.random.Generator) -> Comparison:
    """outcomes: of the classifier, a confidence threshold and a fixed length, see `RecordedRounds.outcome`."""
    _, number = np.unique(request, return_inverse=True)
    sums = np.stack([[np.bincount(number, weights=part) for part in outcome] for outcome in outcomes])  # [3, 2, Q]
    rates = sums[:, 0].sum(1) / sums[:, 1].sum(1)
    drawn = sums[:, :, rng.integers(0, sums.shape[2], (DRAWS, sums.shape[2]))].sum(3)
    drawn_rates = drawn[:, 0] / drawn[:, 1]
    other = 1 + int(rates[1:].argmax())
    classifier, confidence, fixed = rates.tolist()
    return Comparison(classifier, confidence, fixed, float((drawn_rates[0] - drawn_rates[other]).std()))
