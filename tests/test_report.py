"""The log says once what drafting brings, and again when it ends or begins to bring something."""

import logging
import math

import numpy as np
import pytest

from freedraft.report import FEWEST_STEPS, SECONDS, Report
from tests.support.steps import make_step


def test_it_says_what_drafting_brings_when_that_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    report = Report("sssd")
    monkeypatch.setattr(report, "clock", lambda: now[0])

    def serve(drafted: list[int], gained: int, speedup: float, seconds: float = SECONDS + 2) -> list[str]:
        caplog.clear()
        step = make_step(["a", "b"], [[1] * gained, [1] * gained], drafted=drafted)
        for number in range(FEWEST_STEPS):
            now[0] += seconds / (FEWEST_STEPS - 1)
            report.add(step, speedup if number else math.nan)
        return caplog.messages

    with caplog.at_level(logging.INFO, logger="freedraft.report"):
        now[0] += 3600.0  # the engine starts
        assert serve([4, 0], 2, 1.5, seconds=1.0) == [], "too early"
        (line,) = serve([4, 0], 2, 1.5)
        assert "last 3 minutes: about 1.50 times as fast as without drafts; 2.00 tokens per step, 25% of draft" in line
        assert serve([4, 4], 3, 1.9) == [], "it is still on"
        (line,) = serve([0, 0], 1, 1.0)
        assert "drafting is off: 100% of requests had no draft" in line
        assert serve([0, 0], 1, 1.0) == []
        (line,) = serve([0, 4], 2, math.nan)  # another policy
        assert line.endswith("minutes: 2.00 tokens per step, 25% of draft tokens accepted")
        (line,) = serve([4, 4], 2, 0.9)
        assert "about 0.90 times" in line and caplog.records[0].levelno == logging.WARNING
        (line,) = serve([4, 4], 2, 1.1)
        assert "about 1.10 times" in line and caplog.records[0].levelno == logging.INFO
        assert serve([4, 4], 2, 1.1) == []
        now[0] += 86_400.0
        assert len(serve([4, 4], 2, 1.1)) == 1, "a day later"


@pytest.mark.parametrize("alone", [True, False])
def test_it_names_the_drafter_below_n_grams(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    now = [0.0]
    report = Report("sssd", "mtp", alone=alone)
    monkeypatch.setattr(report, "clock", lambda: now[0])
    with caplog.at_level(logging.INFO, logger="freedraft.report"):
        for _ in range(FEWEST_STEPS):
            now[0] += 1.0
            report.add(make_step(["a", "b"], [[1] * 5, [1] * 2], drafted=[8, 0]), 1.2)
            report.add_head(np.array([3, 1]))
    (line,) = caplog.messages
    compared = "'mtp' alone" if alone else "without drafts"
    assert "sssd+mtp, last 8 minutes" in line and f"1.20 times as fast as {compared}; 3.50 tokens per step" in line
    assert line.endswith("50% of n-gram tokens accepted, 2.00 tokens of 'mtp' per draft")
