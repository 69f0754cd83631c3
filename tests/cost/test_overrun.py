"""Steps with draft passes that take longer than their parts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from freedraft.cost.controller import Auto
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.overrun import MOST, Overrun
from freedraft.cost.roofline import Roofline
from layerskip_plugin.skip_set import SkipSet
from tests.support.steps import make_step

SHAPE = ModelShape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
PROFILE = HardwareProfile(name="x", peak_flops=9.2e11, bandwidth=5.1e10, source="measured")


def seen(factor: float, noise: float, common: float = 1.0, steps: int = 600, every: int = 4, seed: int = 0) -> Overrun:
    """Every so many steps drafts; those take a factor more than their parts, and all of them `common` times as long."""
    rng, overrun = np.random.default_rng(seed), Overrun()
    for step in range(steps):
        drafted = step % every == 0
        real = common * (factor if drafted else 1.0) * math.exp(noise * rng.standard_normal())
        overrun.update(drafted, 0.02, 0.02 * real)
    return overrun


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.3])
@pytest.mark.parametrize("common", [0.7, 1.0, 1.4])
def test_it_is_found_whatever_all_steps_have_in_common(factor: float, common: float) -> None:
    found = [seen(factor, 0.08, common, seed=seed).factor for seed in range(20)]
    assert np.mean(found) == pytest.approx(factor, abs=0.03) and min(found) >= 1.0


def test_it_never_makes_drafting_look_better_and_is_bounded() -> None:
    assert seen(0.8, 0.0).factor == 1.0
    assert seen(9.0, 0.0).factor == pytest.approx(math.exp(MOST))


def test_a_controller_notices_what_rounds_take_besides() -> None:
    """A pass takes .4 of a step, and each round half as much again that nobody is charged for."""
    now = 0.0
    auto = Auto(Roofline(SHAPE, PROFILE), 8, clock=lambda: now)
    recipe, batch, text = SkipSet(30, frozenset({1}), frozenset()), 1, [1, 2, 3]
    for number in range(200):
        drafted = number % 3 == 0
        step = make_step(["a"], [[3]], previous=(batch, 2 if number % 3 == 1 else 1) if number else None, texts=[text])
        auto.update(step)
        if drafted:
            now += 0.02
            auto.record_pass(recipe, batch, 0.02)
            now += 0.01
        auto.end(step)
        now += 0.05
    assert auto.overrun == pytest.approx(0.08 / 0.07, rel=0.02)
    assert float(auto.pass_seconds(recipe, 1)) == pytest.approx(0.02, rel=0.05)
    assert float(auto.step_seconds(1, 2)) == pytest.approx(0.05, rel=0.05), "which steps are not charged for"
