"""Greedy decoding through the real engine gives the tokens that it gives without us, whatever happens to requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_cases import MAX_MODEL_LEN, STRUCTURED_PROMPTS, metric, parameters, penalised, structured, tokens_of
from vllm_engines import cramped, drafting_to_the_end, engine, failures, runner_of, settle, spied

TOKENS = 40
K = 8


@pytest.fixture(scope="module")
def prompts(demo_prompts: list) -> list[dict[str, list[int]]]:
    return demo_prompts


@pytest.fixture(scope="module")
def plain(plain_demo: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    return plain_demo | {"prompts": [tokens[:TOKENS] for tokens in plain_demo["prompts"]]}


@pytest.fixture(scope="module")
def sssd(plain: dict, demo_model: Path) -> Iterator[Any]:
    """The engine under test, cramped: prompts in chunks of at most 96 tokens, KV for one and a half long requests.

    It depends on `plain` only so that this engine is not there yet when that one is.
    """
    cramped = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 160, "block_size": 32}
    cramped |= {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    given = {"method": "sssd", "num_speculative_tokens": K, "knee": 40}
    with engine(demo_model, speculative_config=given, **cramped) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_failed_or_leaked(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "sssd" in request.fixturenames:
        llm = request.getfixturevalue("sssd")
        settle(llm)
        proposer = runner_of(llm).drafter
        assert not failures(proposer)
        assert not proposer.guarded.running and len(proposer.guarded.method.drafter) == 0


def test_one_at_a_time(sssd: Any, prompts: list, plain: dict) -> None:
    for index in (0, 3, 8, 14):
        assert tokens_of(sssd.generate([prompts[index]], parameters(TOKENS), use_tqdm=False)) == [
            plain["prompts"][index]
        ]
    assert metric(sssd, "vllm:spec_decode_num_accepted_tokens") > 0


def test_a_batch_with_chunked_prefill_and_preemption(sssd: Any, prompts: list, plain: dict) -> None:
    with cramped(sssd):
        assert tokens_of(sssd.generate(prompts, parameters(TOKENS), use_tqdm=False)) == plain["prompts"]


def test_again_from_the_prefix_cache(sssd: Any, prompts: list, plain: dict) -> None:
    sssd.reset_prefix_cache()
    some = prompts[:3]
    assert tokens_of(sssd.generate(some, parameters(TOKENS), use_tqdm=False)) == plain["prompts"][:3]
    before = metric(sssd, "vllm:prefix_cache_hits")
    held: list[bool] = []

    def whole_prompts_are_known(step: Any, drafts: list[list[int]]) -> None:
        lengths = step.contexts.tolist()
        drafter = runner_of(sssd).drafter.guarded.method.drafter
        held.extend(len(drafter.tokens(i)) == n for i, n in zip(step.request_ids, lengths, strict=True))

    with spied(runner_of(sssd).drafter, whole_prompts_are_known):
        assert tokens_of(sssd.generate(some, parameters(TOKENS), use_tqdm=False)) == plain["prompts"][:3]
    assert metric(sssd, "vllm:prefix_cache_hits") > before
    assert held and all(held)


def test_near_max_model_len_others_still_draft(sssd: Any, prompts: list, long_prompts: list, plain: dict) -> None:
    with drafting_to_the_end(sssd, MAX_MODEL_LEN, K):
        for index, long in enumerate(long_prompts):
            outputs = sssd.generate([long, prompts[0]], parameters(TOKENS), use_tqdm=False)
            assert tokens_of(outputs) == [plain["long"][index], plain["prompts"][0]]


def test_structured_output(sssd: Any, prompts: list, plain: dict) -> None:
    import json

    outputs = sssd.generate(prompts[STRUCTURED_PROMPTS], structured(), use_tqdm=False)
    assert tokens_of(outputs) == plain["structured"]
    finished = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert finished and all(set(json.loads(text)) == {"name", "age"} for text in finished)


def test_penalties_and_logprobs(sssd: Any, prompts: list, plain: dict) -> None:
    outputs = sssd.generate(prompts[:4], penalised(), use_tqdm=False)
    assert tokens_of(outputs) == plain["penalised"]
    assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in outputs)


def test_requests_that_are_aborted_are_forgotten(sssd: Any, prompts: list, plain: dict) -> None:
    llm_engine = sssd.llm_engine
    drafter = runner_of(sssd).drafter.guarded.method.drafter
    for index in range(4):
        llm_engine.add_request(f"job-{index}", prompts[index], parameters(TOKENS))
    finished: dict[str, list[int]] = {}
    for step in range(10_000):
        if not llm_engine.has_unfinished_requests():
            break
        if step == 4:
            assert len(drafter) > 0
            llm_engine.abort_request(["job-1", "job-2"])
        for output in llm_engine.step():
            if output.finished and not output.request_id.startswith("again"):
                finished[output.request_id] = list(output.outputs[0].token_ids)
    assert finished["job-0"] == plain["prompts"][0] and finished["job-3"] == plain["prompts"][3]
    # The same id again, at once, with another prompt.
    llm_engine.add_request("job-1", prompts[5], parameters(TOKENS))
    outputs = []
    while llm_engine.has_unfinished_requests():
        outputs += [output for output in llm_engine.step() if output.finished]
    assert tokens_of(outputs) == [plain["prompts"][5]]


def test_scheduled_draft_length_is_honoured(sssd: Any, prompts: list, plain: dict) -> None:
    scheduler = sssd.llm_engine.engine_core.engine_core.scheduler
    longest: list[int] = []
    scheduler.dynamic_sd_lookup = [3] * 9
    try:
        with spied(runner_of(sssd).drafter, lambda step, drafts: longest.append(max(map(len, drafts), default=0))):
            outputs = sssd.generate(prompts[:2], parameters(TOKENS), use_tqdm=False)
    finally:
        scheduler.dynamic_sd_lookup = None
    assert tokens_of(outputs) == plain["prompts"][:2]
    assert max(longest) == 3


def test_lengths_that_the_controller_chooses(sssd: Any, prompts: list, plain: dict) -> None:
    from freedraft.cost.controller import make_controller

    proposer = runner_of(sssd).drafter
    method = proposer.guarded.method
    rule, auto = method.controller, make_controller(method.context)
    assert auto is not None
    method.controller = auto
    chosen: list[int] = []
    try:
        with spied(proposer, lambda step, drafts: chosen.append(sum(map(len, drafts)))):
            for batch in (prompts, prompts[:2], [prompts[0]]):
                outputs = sssd.generate(batch, parameters(TOKENS), use_tqdm=False)
                assert tokens_of(outputs) == plain["prompts"][: len(batch)]
    finally:
        method.controller = rule
    assert len(set(chosen)) > 2, "the lengths never changed: the test does not test that"
    assert auto.times.seen > 20 and auto.acceptance.outcomes > 20


def test_a_drafter_that_fails_costs_drafts_and_nothing_else(
    sssd: Any, prompts: list, plain: dict, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = runner_of(sssd).drafter
    with monkeypatch.context() as patch:
        patch.setattr(proposer.guarded.method.drafter, "draft", None)
        patch.setattr(logging.getLogger("freedraft"), "propagate", True)
        outputs = sssd.generate(prompts[:2], parameters(TOKENS), use_tqdm=False)
    assert tokens_of(outputs) == plain["prompts"][:2]
    # A handler may stand at two loggers and see a record twice.
    lines = {id(record) for record in caplog.records if "drafting failed" in record.message}
    assert failures(proposer) == len(lines) >= 1
    proposer.guarded.metrics.failures.reset()
    # After its pause it drafts again.
    drafted: list[int] = []
    with spied(proposer, lambda step, drafts: drafted.append(sum(map(len, drafts)))):
        for _ in range(4):
            assert tokens_of(sssd.generate(prompts[:2], parameters(TOKENS), use_tqdm=False)) == plain["prompts"][:2]
    assert sum(drafted) > 0
