"""Figures of bench/lib/forcing.py, of answers and steps. The rest: runs of bench/forced.py on both engines."""

from __future__ import annotations

import pytest

from bench.lib import forcing
from bench.lib.forcing import Answer


def test_figures():
    """One request at a time, three answers of five tokens in three passes each, drafts of two."""
    came = [(1.0, 1), (1.1, 3), (1.2, 4), (1.3, 5)]
    answers = [Answer(n, float(n), [0] * 5, [(at + n, tokens) for at, tokens in came]) for n in range(3)]
    steps = [[at + n, 1, at > 1.0, 3 if at > 1.0 else 1] for n in range(3) for at, _ in came]
    found = forcing.figures(answers, 1, steps)
    assert found["tokens_per_step"] == 4 / 3 and found["accepted"] == 3 / 18 and found["steps"] == 6
    assert found["step_ms"] == pytest.approx(100) and found["tpot_ms"] == pytest.approx(75)
    assert found["tokens_per_s"] == pytest.approx(5.0)  # four of the first answer behind 1.0, and one at 2.0
    answers[0].passes = 4
    assert forcing.figures(answers, 1, steps)["tokens_per_step"] == 12 / 10
