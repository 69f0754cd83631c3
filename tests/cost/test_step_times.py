import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known import PROFILE, ROOFLINE, SHAPE

from freedraft.cost.roofline import Roofline
from freedraft.cost.step_times import StepTimes
from freedraft.draft_model import Window
from layerskip_plugin.skip_set import SkipSet


def machine(batch: int, query_tokens: int) -> float:
    """A machine with its knee at 6 tokens, far below the roofline's 18."""
    return 0.020 + 0.0015 * max(0, query_tokens - 6) + 0.0002 * batch


def test_outliers_are_clipped_and_impossible_times_dropped() -> None:
    learnt = StepTimes(ROOFLINE)
    slow, tokens = np.random.default_rng(1).random(600) < 0.04, np.arange(1, 9)
    for i in range(600):
        learnt.update(1, 1 + i % 8, 300.0, machine(1, 1 + i % 8) * (8.0 if slow[i] else 1.0))
    assert learnt.seconds(1, tokens, 300.0) == pytest.approx([machine(1, q) for q in tokens], rel=0.08)
    before = learnt.seconds(1, 4, 300.0)
    for wrong in (0.0, -1.0, math.nan, math.inf, 1e9, 1e-9):
        assert not learnt.update(1, 4, 300.0, wrong)
    assert not learnt.update(0, 4, 300.0, 1.0) and not learnt.update(5, 4, 300.0, 1.0)
    assert learnt.seconds(1, 4, 300.0) == before


def test_slow_first_times_of_a_size_are_soon_forgotten() -> None:
    """What is verified rarely, as a step without drafts where they pay, would else look slow for hundreds of times."""
    learnt = StepTimes(ROOFLINE)
    for q, slower, times in ((1, 3.0, 3), (8, 3.0, 3), (8, 1.0, 60), (1, 1.0, 2)):
        for _ in range(times):
            learnt.update(1, q, 300.0, slower * machine(1, q))
    short, long = learnt.seconds(1, [1, 8], 300.0)
    assert long / short == pytest.approx(machine(1, 8) / machine(1, 1), rel=0.05)


@pytest.mark.parametrize("damage", ["none", "other model", "", "{", "[]", "half", "nan", "cell"])
def test_saved_and_reloaded(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file, or another model's, is left with a warning."""
    path = tmp_path / "deep" / "times.json"
    learnt = StepTimes(ROOFLINE, path)
    for _ in range(30):
        for q in range(1, 9):
            learnt.update(1, q, 300.0, machine(1, q))
    learnt.save()
    assert [p.name for p in path.parent.iterdir()] == ["times.json"] and not caplog.text
    text = path.read_text()
    data = json.loads(text)
    texts = {"none": text, "other model": text, "half": text[: len(text) // 2]}
    texts |= {"nan": json.dumps(data | {"level": math.nan}), "cell": json.dumps(data | {"cells": [[99, 0, 0, 0.0, 1]]})}
    path.write_text(texts.get(damage, damage))
    again = StepTimes(Roofline(SHAPE, PROFILE, tensor_parallel=2 if damage == "other model" else 1), path)
    assert (again.seen > 0) == (damage == "none")
    if damage == "none":
        tokens = np.arange(1, 9)
        assert np.allclose(again.seconds(1, tokens, 300.0), learnt.seconds(1, tokens, 300.0), rtol=1e-3)
    else:
        assert ("another model, other hardware" if damage == "other model" else "learnt anew") in caplog.text


RECIPE = SkipSet(30, frozenset(range(10, 20)), frozenset(range(10, 16)))


def test_a_draft_pass_costs_its_share_until_it_is_timed() -> None:
    learnt = StepTimes(ROOFLINE)
    for _ in range(30):
        learnt.update(1, 1, 300.0, 0.030)
    prior = float(learnt.pass_seconds(RECIPE, 1, 300.0))
    assert 0.4 * 0.030 < prior < 0.030, "16 of 60 sublayers are skipped, the head is not"
    whole = SkipSet.empty(30)
    assert float(learnt.pass_seconds(whole, 1, 300.0)) == pytest.approx(0.030, rel=0.02)
    for _ in range(30):
        learnt.update_pass(RECIPE, 1, 300.0, 0.040)
    assert float(learnt.pass_seconds(RECIPE, 1, 300.0)) == pytest.approx(0.040, rel=0.03)
    assert float(learnt.pass_seconds(whole, 1, 300.0)) == pytest.approx(0.030, rel=0.02), "another recipe's are its own"
    assert float(learnt.seconds(1, 1, 300.0)) == pytest.approx(0.030, rel=0.02)


def test_times_grow_with_the_context_within_what_was_seen() -> None:
    """Seen at 3 k tokens only: at 3.9 k, in the same bucket, and at 7.5 k, a plain step takes longer, and a pass that
    reads 512 tokens does not."""
    learnt = StepTimes(ROOFLINE)
    window = replace(SkipSet.empty(30), window=Window(16, 496))
    for _ in range(30):
        learnt.update(4, 4, 3000.0, 2 * float(learnt.roofline.seconds(4, 4, 3000.0)))
        learnt.update_pass(window, 4, 3000.0, 2 * float(learnt.roofline.seconds(4, 4, 512.0)))
    for context in (3000.0, 3900.0, 7500.0):
        for found, read in ((learnt.seconds(4, 4, context), context), (learnt.pass_seconds(window, 4, context), 512.0)):
            assert float(found) == pytest.approx(2 * float(learnt.roofline.seconds(4, 4, read)), rel=0.05)


def test_a_busy_moment_does_not_change_what_is_compared() -> None:
    """Steps of a busy second must not make the passes of the quiet one before it look cheap."""
    learnt = StepTimes(ROOFLINE)
    for _ in range(60):
        learnt.update(1, 1, 300.0, 0.010)
        learnt.update_pass(RECIPE, 1, 300.0, 0.009)
    for _ in range(24):
        learnt.update(1, 1, 300.0, 0.030)
    ratio = float(learnt.pass_seconds(RECIPE, 1, 300.0)) / float(learnt.seconds(1, 1, 300.0))
    assert ratio == pytest.approx(0.9, rel=0.15)


def test_growth_by_query_tokens_is_known_at_a_context_of_which_only_plain_steps_were_timed() -> None:
    """Verification of 12 tokens takes three times a plain step where it was measured: so it does further on."""
    learnt = StepTimes(ROOFLINE)
    predicted = learnt.roofline.seconds
    for _ in range(20):
        learnt.update(4, 4, 3000.0, predicted(4, 4, 3000.0))
        learnt.update(4, 12, 3000.0, 3 * predicted(4, 12, 3000.0))
    for _ in range(3):
        learnt.update(4, 4, 20000.0, 1.3 * predicted(4, 4, 20000.0))

    def growth(seconds: Callable, context: float) -> float:
        return seconds(4, 12, context) / seconds(4, 4, context)

    assert growth(learnt.seconds, 20000.0) == pytest.approx(3 * growth(predicted, 20000.0), rel=0.05)
    for _ in range(40):  # what is measured there counts, and only there
        for q in (4, 12):
            learnt.update(4, q, 20000.0, 1.3 * predicted(4, q, 20000.0))
    assert growth(learnt.seconds, 20000.0) == pytest.approx(growth(predicted, 20000.0), rel=0.05)
    assert growth(learnt.seconds, 3000.0) > 2.5
