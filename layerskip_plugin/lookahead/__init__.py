"""How far to draft: policies that both engines' draft runners ask after every drafted token."""

from __future__ import annotations

from pathlib import Path

from layerskip_plugin.lookahead.adaptive import DraftVerify, RocThreshold
from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.lookahead.confidence import Confidence
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.lookahead.disco import Classifier, Disco
from layerskip_plugin.lookahead.fixed import Fixed
from layerskip_plugin.lookahead.prices import Prices
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
    "Prices",
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
    prices: Prices | None = None,
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
        prices: of "cost".
        prior: acceptance that "cost" believes in at first.
        model: fingerprint; a classifier of another model is refused.
        record: where verifications are to be recorded.

    Raises:
        ValueError: an unknown policy, something it needs is missing, or a value out of range; one line.
    """
    made: Lookahead
    if policy == "fixed":
        made = Fixed(length)
    elif policy == "confidence":
        made = Confidence(0.7 if threshold is None else threshold)
    elif policy == "adaptive":
        made = DraftVerify(0.7 if threshold is None else threshold)
    elif policy == "roc":
        made = RocThreshold(0.4 if threshold is None else threshold)
    elif policy == "disco":
        if classifier is None:
            raise ValueError("lookahead disco needs a classifier: train one with freedraft calibrate disco")
        made = Disco(Classifier.load(Path(classifier), model))
    elif policy == "cost":
        if prices is None:
            raise ValueError("lookahead cost needs measured prices of draft and verify passes")
        made = Cost(prices, prior)
    else:
        raise ValueError(f"lookahead: there is no policy {policy!r}; choose from: {', '.join(POLICIES)}")
    return made if record is None else Recording(made, Path(record), model or "")
