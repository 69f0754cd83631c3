"""How far to draft: policies that are asked after every position of a round of draft passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from freedraft.draft_model import Recipe
from layerskip_plugin.lookahead.adaptive import DraftVerify, RocThreshold
from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.lookahead.confidence import Confidence
from layerskip_plugin.lookahead.cost import Cost, Costs
from layerskip_plugin.lookahead.disco import Classifier, Disco
from layerskip_plugin.lookahead.fixed import Fixed
from layerskip_plugin.lookahead.per_set import PerSet
from layerskip_plugin.lookahead.records import Recording, Verifications

POLICIES = ("cost", "confidence", "adaptive", "roc", "disco", "fixed")

__all__ = [
    "POLICIES",
    "Confidence",
    "Cost",
    "Disco",
    "DraftVerify",
    "Fixed",
    "Lookahead",
    "PerSet",
    "Recording",
    "RocThreshold",
    "Verifications",
    "make_lookahead",
]


def make_lookahead(
    policy: str = "cost",
    *,
    length: int = 5,
    threshold: float | None = None,
    classifier: Path | None = None,
    costs: Costs | None = None,
    recipes: Sequence[Recipe] = (),
    prior: float = 0.8,
    model: str | None = None,
    record: Path | None = None,
) -> Lookahead:
    """The policy of that name.

    Args:
        policy: one of `POLICIES`. "adaptive" is Draft & Verify's, "roc" transformers' adaptive threshold.
        length: of "fixed".
        threshold: of "confidence", the first one of "adaptive" and "roc"; by default the published ones.
        classifier: file of "disco".
        costs: what "cost" goes by.
        recipes: of the skip sets, in the order of their places; each has what is learnt for itself.
        prior: acceptance that "cost" believes in at first.
        model: fingerprint; a classifier of another model is refused.
        record: where verifications of the first skip set's drafts are to be recorded.

    Raises:
        ValueError: an unknown policy, something it needs is missing, or a value out of range; one line.
    """
    lookahead: Lookahead
    if policy == "cost":
        if costs is None:
            raise ValueError("lookahead cost needs measured costs of draft passes and steps")
        lookahead = Cost(costs, recipes, prior)
    else:
        make = _simple(policy, length, threshold, classifier, model)
        lookahead = PerSet(make, len(recipes)) if len(recipes) > 1 else make()
    return lookahead if record is None else Recording(lookahead, Path(record), model or "")


def _simple(
    policy: str, length: int, threshold: float | None, classifier: Path | None, model: str | None
) -> Callable[[], Lookahead]:
    """What makes a policy that knows of no costs."""
    if policy == "fixed":
        return lambda: Fixed(length)
    if policy == "confidence":
        return lambda: Confidence(0.7 if threshold is None else threshold)
    if policy == "adaptive":
        return lambda: DraftVerify(0.7 if threshold is None else threshold)
    if policy == "roc":
        return lambda: RocThreshold(0.4 if threshold is None else threshold)
    if policy == "disco":
        if classifier is None:
            raise ValueError("lookahead disco needs a classifier: train one with freedraft calibrate disco")
        trained = Classifier.load(Path(classifier), model)
        return lambda: Disco(trained)
    raise ValueError(f"lookahead: there is no policy {policy!r}; choose from: {', '.join(POLICIES)}")
