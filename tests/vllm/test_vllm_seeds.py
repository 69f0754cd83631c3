"""Requests with seeds get the tokens that the engine gives them without us, whatever is drafted: from text learnt
meanwhile, alone and in batches, through preemption and aborts, with every sampling parameter."""

from __future__ import annotations

import pytest
from vllm_cases import SAMPLING_ENGINE, generate, metric, parameters, seeded, with_logprobs
from vllm_engines import engine


@pytest.fixture(scope="module")
def sssd(plain_tiny, tiny_model):
    """Depends on `plain_tiny` so that the engines do not exist at the same time."""
    config = {"method": "sssd", "num_speculative_tokens": 5, "policy": "fixed", "live": "store", "isolation": "shared"}
    small = {"max_num_seqs": 8, "block_size": 32, "num_gpu_blocks_override": 9}
    with engine(tiny_model, speculative_config=config, **SAMPLING_ENGINE | small) as llm:
        yield llm


@pytest.fixture(autouse=True)
def drafts_were_accepted_and_rejected(sssd):
    def counts():
        return metric(sssd, "vllm:spec_decode_num_draft_tokens"), metric(sssd, "vllm:spec_decode_num_accepted_tokens")

    before = counts()
    yield
    drafted, accepted = (after - count for after, count in zip(counts(), before, strict=True))
    assert 50 < accepted < drafted - 50


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("at_once", [1, 4])
def test_tokens_and_logprobs_are_plains(sssd, plain_tiny, at_once, again):
    prompts, asked = seeded()
    for first in range(0, len(prompts), at_once):
        part = slice(first, first + at_once)
        outputs = with_logprobs(sssd.generate(prompts[part], asked[part], use_tqdm=False))
        for (tokens, logprobs), (plain_tokens, plain_logprobs) in zip(outputs, plain_tiny.seeded[part], strict=True):
            assert tokens == plain_tokens
            assert [one.keys() for one in logprobs] == [one.keys() for one in plain_logprobs]
            for one, plain_one in zip(logprobs, plain_logprobs, strict=True):
                assert one == pytest.approx(plain_one, abs=1e-4)


def test_through_preemption(sssd, plain_tiny):
    before = metric(sssd, "vllm:num_preemptions")
    assert generate(sssd, *seeded()) == [tokens for tokens, _ in plain_tiny.seeded]
    assert metric(sssd, "vllm:num_preemptions") > before + 5, "hardly anyone was preempted: the test does not test that"


def test_through_aborts_beside_requests_without_seeds(sssd, plain_tiny):
    llm = sssd.llm_engine
    requests = {f"job-{i}": request for i, request in enumerate(zip(*seeded(), strict=True))}
    unseeded = parameters(32, temperature=0.9, ignore_eos=True, detokenize=False)
    waiting, finished, step = list(requests), dict[str, list[int]](), 0
    aborted: set[str] = set()
    while waiting or llm.has_unfinished_requests():
        if step % 8 == 0 and waiting:
            for name in waiting[:4]:
                llm.add_request(name, *requests[name])
            llm.add_request(f"other-{step}", requests[waiting[0]][0], unseeded)
            del waiting[:4]
        running = [name for name in requests if name not in {*finished, *waiting, *aborted}]
        if step % 8 == 4 and running:  # this one begins again, under its id
            llm.abort_request(running[:1])
            waiting.append(running[0])
            aborted.add(running[0])
        finished |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
        step += 1
    assert len(aborted & finished.keys()) > 5
    assert [finished[name] for name in requests] == [tokens for tokens, _ in plain_tiny.seeded]
