"""A drafter of one's own: one class and one `MethodSpec`, served by the real engine; its mistakes cost drafts only."""

from __future__ import annotations

import pytest
from vllm_cases import MAX_MODEL_LEN, greedily, metric
from vllm_engines import engine, failures, runner_of, spied, verified

from freedraft.engines.vllm.methods import register
from freedraft.guarded_method import FIRST_PAUSE
from tests.support.repeat_drafter import SPEC, RepeatMethod, RepeatOptions


@pytest.fixture(scope="module")
def llm(plain_demo, demo_model):
    assert register(SPEC)
    config = {"method": "repeat", "num_speculative_tokens": 6}
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 160}
    with engine(demo_model, speculative_config=config, **settings) as llm:
        yield llm
        assert not runner_of(llm).drafter.guarded.method.tokens


def test_it_drafts_and_the_output_is_the_same(llm, demo_prompts, plain_demo):
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    before = [metric(llm, name) for name in names]
    seen: list[tuple[int, int]] = []
    with spied(runner_of(llm).drafter, lambda step, drafts: seen.append(verified(step))):
        assert greedily(llm, demo_prompts) == plain_demo["prompts"]
    drafted, accepted = (int(metric(llm, name) - b) for name, b in zip(names, before, strict=True))
    assert drafted > accepted > 100
    # Of the last step of all, which accepts up to the end only, the drafter is told nothing.
    told, confirmed = (sum(column) for column in zip(*seen, strict=True))
    assert 0 <= drafted - told <= 6 * len(demo_prompts) and abs(confirmed - accepted) <= 6 * len(demo_prompts)


def test_what_it_raises_costs_drafts_and_it_gets_another_chance(llm, demo_prompts, plain_demo, monkeypatch):
    method, lengths = runner_of(llm).drafter.guarded.method, list[int]()
    assert isinstance(method, RepeatMethod)
    monkeypatch.setattr(method, "options", RepeatOptions(fail_every=2))
    monkeypatch.setattr(method, "calls", 0)
    with spied(runner_of(llm).drafter, lambda step, drafts: lengths.append(sum(map(len, drafts)))):
        assert greedily(llm, demo_prompts) == plain_demo["prompts"]
    # One good call, one that raises, a pause, and again; each pause is twice as long.
    assert method.calls >= 3 and failures(runner_of(llm).drafter) == method.calls // 2
    paused = [i for i, length in enumerate(lengths) if length == 0]
    assert len(paused) >= FIRST_PAUSE and any(lengths[i] for i in range(paused[FIRST_PAUSE - 1], len(lengths)))
    runner_of(llm).drafter.guarded.metrics.failures.reset()
