"""A drafter of one's own: one class and one `MethodSpec`, served by the real engine; its mistakes cost drafts only."""

from __future__ import annotations

import json

import pytest

from freedraft.guarded_method import FIRST_PAUSE
from tests.sglang.conftest import read_counts, sglang_engine
from tests.support.models import continuations

TOKENS = 120
PROMPTS = [[1, 3, 5, 4], [2, 2], [5, 1, 0, 3, 3, 4, 1], [4]]
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(six, tmp_path_factory):
    counts = tmp_path_factory.mktemp("engine") / "counts.json"
    options = {"speculative_algorithm": "repeat", "speculative_num_draft_tokens": 6, "skip_tokenizer_init": True}
    with sglang_engine(six, counts, **options) as engine:
        engine.counts = counts
        engine.expected = continuations(six, PROMPTS, TOKENS)
        yield engine


def answers(engine, name):
    outputs = engine.generate(
        input_ids=PROMPTS, sampling_params=GREEDY, rid=[f"{name}-{i}" for i in range(len(PROMPTS))]
    )
    return [output["output_ids"] for output in outputs]


@pytest.mark.extended
def test_it_drafts_and_the_output_is_the_same(engine):
    assert answers(engine, "good") == engine.expected
    done = read_counts(engine.counts)
    assert done["tokens"] > 1.5 * done["request_steps"], "hardly anything was accepted"
    assert done["drafted"] > done["accepted"] > 50
    # What the last step of a request accepted the drafter is not told.
    verified = done["tokens"] - done["request_steps"]
    assert 0 <= verified - done["accepted"] <= 5 * len(PROMPTS)


@pytest.mark.extended
def test_what_it_raises_costs_drafts_and_it_gets_another_chance(engine):
    before = json.loads(engine.counts.read_text())
    assert answers(engine, "broken") == engine.expected
    after = json.loads(engine.counts.read_text())
    # One good call, one that raises, a pause, and again; each pause is twice as long.
    assert after["failures"] >= 2
    assert after["width 1"] - before.get("width 1", 0) >= FIRST_PAUSE
    assert after["drafts between failures"] > 0
