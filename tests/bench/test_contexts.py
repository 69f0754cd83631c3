"""Parts of the bench of KnapSpec by context length: times of sublayers, and the measured speed of drafts."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lib.contexts import LONGEST, over_plain, times_at
from layerskip_plugin.pass_times import tokens_per_time
from layerskip_plugin.skip_set import SkipSet


def test_attention_takes_over_and_a_whole_pass_takes_as_long_as_a_step() -> None:
    ratios = []
    for context in (256, 4096, 32768):
        times = times_at(60, context)
        assert times.draft(SkipSet.empty(60, "")) == pytest.approx(times.verify(1), rel=1e-3)
        ratios.append(times.attention / times.mlp)
    assert ratios == pytest.approx([0.34, 1.76, 12.2], rel=0.02)


def test_the_measured_speed_is_tokens_per_time_of_the_accepted_tokens() -> None:
    """Of drafts accepted as the formula assumes."""
    times, skip = times_at(60, 1024), SkipSet.of_sublayers(range(40, 80), 60)
    accepted = np.random.default_rng(0).geometric(0.2, 20_000)[:, None] - 1
    rates = over_plain(np.minimum(accepted, np.arange(1, LONGEST + 1)), times, skip).mean(0) / times.verify(1)
    expected = [tokens_per_time(0.8, times.draft(skip), times.verify, n) for n in range(1, LONGEST + 1)]
    assert rates == pytest.approx(expected, rel=0.02)
