"""Pages of metrics, as Prometheus reads them."""

from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

LABELS = ("length", "reason", "source", "position")


def sums(*pages: str) -> Counter[Any]:
    """Sums of all samples by name, and by name and value of the label that tells them apart."""
    found: Counter[Any] = Counter()
    for family in (family for page in pages for family in text_string_to_metric_families(page)):
        for sample in family.samples:
            found[sample.name] += sample.value
            for label in LABELS:
                found[sample.name, sample.labels.get(label)] += sample.value
    return found
