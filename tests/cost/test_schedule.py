"""Draft lengths by batch size: the most expected tokens per second by the roofline, by enumeration."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from known import LLAMA3_8B

from freedraft.cost.explain import CHAIN_TOKENS_PER_STEP
from freedraft.cost.hardware import choose_profile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline
from freedraft.cost.schedule import CONTEXT, draft_lengths
from freedraft.step import EngineContext


def context(most: int, shape: dict[str, Any] = LLAMA3_8B) -> EngineContext:
    return EngineContext(hf_config=SimpleNamespace(to_dict=lambda: shape), max_draft_tokens=most)


def length_at(schedule: Any, batch: int) -> int:
    (length,) = [length for first, last, length in schedule if first <= batch <= last]
    return length


@pytest.mark.parametrize("hardware", ["h100", "h200", "a100", "cpu"])
@pytest.mark.parametrize("most", [1, 4, 8])
def test_no_other_length_has_more_tokens_per_second(hardware: str, most: int) -> None:
    schedule = draft_lengths(context(most), "auto", hardware=hardware)
    assert schedule is not None and schedule.learnt[0] == 0 and schedule.learnt[-1] == most
    roofline = Roofline(ModelShape.from_config(LLAMA3_8B, dtype="bfloat16"), choose_profile(hardware))
    nodes, tokens = np.array([*CHAIN_TOKENS_PER_STEP]), np.array([*CHAIN_TOKENS_PER_STEP.values()])
    for batch in (1, 3, 6, 24, 96, 384):
        rates = []
        for n in (1 + length for length in schedule.learnt):
            expected = np.interp(np.log2(n), np.log2(nodes), tokens)
            rates.append(expected / float(roofline.seconds(batch, batch * n, CONTEXT)))
        assert rates[schedule.learnt.index(length_at(schedule.rows, batch))] >= 0.97 * max(rates), batch


def test_ranges_have_no_gaps_and_lengths_fall() -> None:
    schedule = draft_lengths(context(8), "knee", hardware="h100")
    assert schedule is not None and schedule.rows[0][0] == 1 and schedule.rows[-1][2] == 0
    assert not schedule.learnt, "a rule stays as it is"
    for (_, last, length), (first, _, shorter) in itertools.pairwise(schedule.rows):
        assert first == last + 1 and shorter < length <= 8


def test_the_rule_decides_for_a_model_of_unknown_shape() -> None:
    unknown = draft_lengths(context(8, {}), "auto", hardware="h100")
    assert unknown == draft_lengths(context(8), "knee", hardware="h100") is not None
