"""Stores that somebody has tampered with, as far as there is time in a test; all of it: `bench/fuzz_datastore.py`."""

from __future__ import annotations

import pytest

from bench.fuzz_datastore import fuzz


@pytest.mark.extended
def test_each_is_refused_in_one_line_or_harmless() -> None:
    counts, wrong = fuzz(60)
    assert wrong == [] and sum(counts.values()) == 60
    assert counts["numbers refused"] > 5 and counts["numbers harmless"] > 0 < counts["swap harmless"]
