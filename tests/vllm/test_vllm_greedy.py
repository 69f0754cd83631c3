"""Greedy decoding through the real engine gives the tokens that it gives without us, whatever happens to requests."""

from __future__ import annotations

import json
import logging

import pytest
from vllm_cases import (
    MAX_MODEL_LEN,
    STRUCTURED_PROMPTS,
    TOKENS,
    greedily,
    metric,
    parameters,
    penalised,
    structured,
    tokens_of,
)
from vllm_engines import cramped, drafting_to_the_end, engine, failures, runner_of, spied

K = 8


@pytest.fixture(scope="module")
def sssd(plain_demo, demo_model):
    """The engine under test, cramped: prompts in chunks of at most 96 tokens, KV for one and a half long requests.

    It depends on `plain_demo` only so that this engine is not there yet when that one is.
    """
    cramped = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 160, "block_size": 32}
    cramped |= {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    given = {"method": "sssd", "num_speculative_tokens": K, "knee": 40}
    with engine(demo_model, speculative_config=given, **cramped) as llm:
        yield llm


def test_one_at_a_time(sssd, demo_prompts, plain_demo):
    for index in (0, 3, 8, 14):
        assert greedily(sssd, [demo_prompts[index]]) == [plain_demo["prompts"][index]]
    assert metric(sssd, "vllm:spec_decode_num_accepted_tokens") > 0


def test_a_batch_with_chunked_prefill_and_preemption(sssd, demo_prompts, plain_demo):
    with cramped(sssd):
        assert greedily(sssd, demo_prompts) == plain_demo["prompts"]


def test_again_from_the_prefix_cache(sssd, demo_prompts, plain_demo):
    sssd.reset_prefix_cache()
    assert greedily(sssd, demo_prompts[:3]) == plain_demo["prompts"][:3]
    before = metric(sssd, "vllm:prefix_cache_hits")
    held: list[bool] = []

    def whole_prompts_are_known(step, drafts):
        drafter = runner_of(sssd).drafter.guarded.method.drafter
        held.extend(len(drafter.tokens(i)) == n for i, n in zip(step.request_ids, step.contexts.tolist(), strict=True))

    with spied(runner_of(sssd).drafter, whole_prompts_are_known):
        assert greedily(sssd, demo_prompts[:3]) == plain_demo["prompts"][:3]
    assert metric(sssd, "vllm:prefix_cache_hits") > before
    assert held and all(held)


def test_near_max_model_len_others_still_draft(sssd, demo_prompts, long_prompts, plain_demo):
    with drafting_to_the_end(sssd, MAX_MODEL_LEN, K):
        for index, long in enumerate(long_prompts):
            both = greedily(sssd, [long, demo_prompts[0]])
            assert both == [plain_demo["long"][index], plain_demo["prompts"][0]]


def test_structured_output(sssd, demo_prompts, plain_demo):
    outputs = sssd.generate(demo_prompts[STRUCTURED_PROMPTS], structured(), use_tqdm=False)
    assert tokens_of(outputs) == plain_demo["structured"]
    finished = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert finished and all(set(json.loads(text)) == {"name", "age"} for text in finished)


def test_penalties_and_logprobs(sssd, demo_prompts, plain_demo):
    outputs = sssd.generate(demo_prompts[:4], penalised(), use_tqdm=False)
    assert tokens_of(outputs) == plain_demo["penalised"]
    assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in outputs)


def test_requests_that_are_aborted_are_forgotten(sssd, demo_prompts, plain_demo):
    llm, drafter = sssd.llm_engine, runner_of(sssd).drafter.guarded.method.drafter
    for index in range(4):
        llm.add_request(f"job-{index}", demo_prompts[index], parameters(TOKENS))
    finished: dict[str, list[int]] = {}

    def step():
        finished.update((out.request_id, list(out.outputs[0].token_ids)) for out in llm.step() if out.finished)

    for _ in range(4):
        step()
    assert len(drafter) > 0
    llm.abort_request(["job-1", "job-2"])
    while llm.has_unfinished_requests():
        step()
    assert finished["job-0"] == plain_demo["prompts"][0] and finished["job-3"] == plain_demo["prompts"][3]
    # The same id again, at once, with another prompt.
    llm.add_request("job-1", demo_prompts[5], parameters(TOKENS))
    while llm.has_unfinished_requests():
        step()
    assert finished["job-1"] == plain_demo["prompts"][5]


def test_scheduled_draft_length_is_honoured(sssd, demo_prompts, plain_demo, monkeypatch):
    longest: list[int] = []
    monkeypatch.setattr(sssd.llm_engine.engine_core.engine_core.scheduler, "dynamic_sd_lookup", [3] * 9)
    with spied(runner_of(sssd).drafter, lambda step, drafts: longest.append(max(map(len, drafts), default=0))):
        assert greedily(sssd, demo_prompts[:2]) == plain_demo["prompts"][:2]
    assert max(longest) == 3


def test_lengths_that_the_controller_chooses(sssd, demo_prompts, plain_demo, monkeypatch):
    from freedraft.cost.auto import make_controller

    proposer, chosen = runner_of(sssd).drafter, list[int]()
    method = proposer.guarded.method
    auto = make_controller(method.context)
    assert auto is not None
    monkeypatch.setattr(method, "controller", auto)
    with spied(proposer, lambda step, drafts: chosen.append(sum(map(len, drafts)))):
        for n in (len(demo_prompts), 2, 1):
            assert greedily(sssd, demo_prompts[:n]) == plain_demo["prompts"][:n]
    assert len(set(chosen)) > 2, "the lengths never changed: the test does not test that"
    assert auto.times.seen > 20 and auto.acceptance.outcomes > 20


def test_a_drafter_that_fails_costs_drafts_and_nothing_else(sssd, demo_prompts, plain_demo, monkeypatch, caplog):
    proposer, drafted = runner_of(sssd).drafter, list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(proposer.guarded.method.drafter, "draft", None)
        patch.setattr(logging.getLogger("freedraft"), "propagate", True)
        assert greedily(sssd, demo_prompts[:2]) == plain_demo["prompts"][:2]
    # A handler may stand at two loggers and see a record twice.
    lines = {id(record) for record in caplog.records if "drafting failed" in record.message}
    assert failures(proposer) == len(lines) >= 1
    proposer.guarded.metrics.failures.reset()
    with spied(proposer, lambda step, drafts: drafted.append(sum(map(len, drafts)))):  # after its pause
        for _ in range(4):
            assert greedily(sssd, demo_prompts[:2]) == plain_demo["prompts"][:2]
    assert sum(drafted) > 0
