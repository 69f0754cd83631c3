"""An engine whose batches are no larger than a draft: prompts that are embeddings, or come in turns, or are cached, and
new weights."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm_cases import TINY, generate, metric, parameters, token_prompts
from vllm_engines import answer_turns, engine, runner_of, settle, spied

from tests.support.models import continuations, save
from tests.support.models import tiny_model as make_tiny
from tests.support.prompts import random_ids
from tests.support.stores import documents_of

TOKENS = 30
SMALL = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 192, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def llm(tiny_model):
    method = {"method": "sssd", "policy": "fixed", "live": "store", "isolation": "shared"}
    with engine(tiny_model, speculative_config=method, enable_prompt_embeds=True, **SMALL) as llm:
        yield llm


def ask(llm, prompts):
    answers = generate(llm, prompts, parameters(TOKENS, ignore_eos=True, detokenize=False))
    settle(llm)
    return answers


def test_embeddings_in_place_of_a_prompt_are_neither_drafted_for_nor_learnt(
    llm, tiny_model, tiny_answers, live_prompts
):
    """vLLM's batch holds tokens of another request where a prompt has none."""
    embedding = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_input_embeddings()
    given = [dict(prompt) for prompt in live_prompts]
    for i in (1, 4):
        with torch.no_grad():
            given[i] = {"prompt_embeds": embedding(torch.tensor(live_prompts[i]["prompt_token_ids"]))}
    proposer = runner_of(llm).drafter
    texts: set[tuple[int, ...]] = set()

    def record(step, drafts):
        texts.update(tuple(step.history(b).tolist()) for b in range(step.batch_size))

    with spied(proposer, record):
        for _ in range(2):
            assert ask(llm, given) == tiny_answers
    known = [
        tuple(prompt["prompt_token_ids"]) + tuple(answer)
        for i, (prompt, answer) in enumerate(zip(live_prompts, tiny_answers, strict=True))
        if i not in (1, 4)
    ]
    # A step may accept tokens beyond the end of an answer.
    assert texts and all(any(whole[: len(text)] == text[: len(whole)] for whole in known) for text in texts)
    learnt = {whole[4:] for whole in known}  # the last 8 of 12 tokens of a prompt, and its answer
    runs = proposer.guarded.method.live.runs.tenants[0].all_runs
    assert {tuple(text) for run in runs for text in documents_of(run.sub)} == learnt


def test_a_cached_prompt_is_scheduled_in_the_smallest_batches(llm):
    """Its last token comes with room for all drafts, for which vLLM would wait for ever."""
    (prompt,) = random_ids([129], 24, first=2, seed=4)
    asked = parameters(12, ignore_eos=True, detokenize=False)
    before, answers = metric(llm, "vllm:prefix_cache_hits"), []
    for name in ("first", "cached"):
        llm.llm_engine.add_request(name, token_prompts([prompt])[0], asked)
        steps = [llm.llm_engine.step() for _ in range(40)]
        answers += [list(done.outputs[0].token_ids) for step in steps for done in step if done.finished]
    assert len(answers) == 2 and answers[0] == answers[1] and len(answers[0]) == 12
    assert metric(llm, "vllm:prefix_cache_hits") - before == 128, "the test does not test that"


def test_turns_go_on_behind_their_stop(llm, monkeypatch):
    """What a step accepts behind it is no context of the next turn, which may be shorter."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.scheduler import Scheduler

    update, cuts = Scheduler._update_request_with_output, []

    def noted(scheduler, request, new_token_ids, *args, **kwargs):
        gained = len(new_token_ids)
        kept, stopped = update(scheduler, request, new_token_ids, *args, **kwargs)
        cuts.append(gained - len(kept))
        return kept, stopped

    turns = random_ids([12, 3, 9, 1, 6], 24, first=2, seed=5)
    shared = {"detokenize": False, "output_kind": RequestOutputKind.DELTA}
    whole = answer_turns(llm, turns, parameters(24, ignore_eos=True, **shared))
    stopping = shared | {"stop_token_ids": [whole[0][7], whole[2][9]]}
    plain = answer_turns(llm, turns, parameters(24, **stopping, extra_args={"freedraft": "off"}))
    monkeypatch.setattr(Scheduler, "_update_request_with_output", noted)
    for _ in range(2):
        assert answer_turns(llm, turns, parameters(24, **stopping)) == plain
    assert sum(cuts) > 5, "nothing was accepted behind a stop: the test does not test that"


@pytest.mark.extended
def test_answers_are_of_the_new_weights_and_what_was_learnt_stays(llm, tiny_model, tmp_path):
    """As between the epochs of reinforcement learning."""
    other, prompts = save(make_tiny(seed=8, **TINY), tmp_path / "other"), random_ids([12] * 4, 24, first=2, seed=6)
    expected, accepted = [continuations(model, prompts, TOKENS) for model in (tiny_model, other)], []
    assert expected[0] != expected[1]
    for turn, model in enumerate((tiny_model, other) * 2):
        llm.sleep(level=2)  # memory is kept on a CPU
        llm.wake_up(tags=["weights"])
        if turn < 3:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        else:  # as a trainer that sends tensors
            llm.collective_rpc("reload_weights", args=([*load_file(model / "model.safetensors").items()],))
        llm.wake_up(tags=["kv_cache"])
        llm.reset_prefix_cache()
        accepted.append(0)

        def count(step, _):
            accepted[-1] += int(step.accepted.sum())

        with spied(runner_of(llm).drafter, count):
            assert ask(llm, token_prompts(prompts)) == expected[turn % 2]
    assert min(accepted[2:]) > 3 * TOKENS > accepted[0]
