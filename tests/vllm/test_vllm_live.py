"""Learning while serving, through the real engine: more is accepted the second time, and the answers stay the same."""

from __future__ import annotations

from collections import Counter

from prometheus_client import REGISTRY
from vllm_cases import generate, parameters
from vllm_engines import check_nothing_is_left, engine, runner_of, settle, spied

from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live.maintenance import forget
from sssd_plugin.scoring.origins import SOURCES
from tests.support.stores import documents_of
from tests.support.waiting import wait_until

TOKENS = 30
COUNTERS = "live_documents", "live_inserted_tokens", "live_merges", "live_merge_seconds"


def ask(llm, prompts, salt=None):
    given = [prompt | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    answers = generate(llm, given, parameters(TOKENS, ignore_eos=True, detokenize=False))
    settle(llm)
    return answers


def learnt_by(method, tenant):
    return [text for run in method.live.runs.tenants[tenant].all_runs for text in documents_of(run.sub)]


def value(name, **labels):
    found = REGISTRY.get_sample_value(f"freedraft_{name}", labels)
    assert found is not None, name
    return found


def gained(method, before):
    """What counters of sources and of the live datastore have gained, which all engines of this process add to."""
    method.live_metrics._next = 0.0  # else they are not brought up to date at every request's end
    method.live_metrics.show(method.live)
    found = Counter({name: value(f"{name}_total") for name in COUNTERS})
    found |= {f"{source} drafts": value("sourced_draft_tokens_total", source=source) for source in SOURCES}
    found |= {f"{source} tokens": value("sourced_tokens_total", source=source) for source in SOURCES}
    gain = Counter(found)
    gain.subtract(before)
    before.clear()
    before.update(found)
    return gain


def test_learns_from_what_it_said(tiny_model, tiny_answers, live_prompts, tmp_path):
    prompts, plain = live_prompts, tiny_answers
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4}
    method = {"method": "sssd", "num_speculative_tokens": 6, "policy": "fixed", "recycle": "off"}
    method |= {"live": "store", "datastore": str(tmp_path)}

    def accepted(salt=None):
        """Draft tokens accepted while all prompts are answered."""
        counts = []
        with spied(runner_of(llm).drafter, lambda step, drafts: counts.append(int(step.accepted.sum()))):
            assert ask(llm, prompts, salt) == plain
        return sum(counts)

    with engine(tiny_model, speculative_config=method, **settings) as llm:
        learning, before = runner_of(llm).drafter.guarded.method, Counter()
        gained(learning, before)
        first = accepted("main")
        said = [[*prompt["prompt_token_ids"][-8:], *answer] for prompt, answer in zip(prompts, plain, strict=True)]
        (tenant,) = (number for number in learning.live.runs.tenants if number)
        assert sorted(learnt_by(learning, tenant)) == sorted(said), "every output, whole, behind the end of its prompt"
        one = gained(learning, before)
        assert sum(one[f"{source} tokens"] for source in SOURCES) == first
        assert one["input tokens"] > 0
        second = accepted("main")
        assert second > first
        two = gained(learning, before)
        assert sum(two[f"{source} tokens"] for source in SOURCES) == second
        assert two["store tokens"] > one["store tokens"] and one["store drafts"] < two["store drafts"]
        assert two["live_documents"] == 6 and two["live_inserted_tokens"] == 6 * (8 + TOKENS)
        assert 0 == two["live_merges"] == two["live_merge_seconds"]
        assert value("live_tokens") == 12 * (8 + TOKENS + 1)
        assert value("live_sub_indices") == 1 and value("live_bytes") > 8 * value("live_tokens")
        assert value("static_tokens") == value("static_sub_indices") == 0
        assert value("drafting_seconds_count", method="sssd") > 0 < value("drafting_seconds_sum", method="sssd")

        # A tenant profits from its own answers only.
        assert accepted("one") == accepted("two") == first < accepted("one")
        # Requests without a salt profit from one another's.
        assert accepted() == first < accepted()
        learning.live.flush()  # else the newest are not on disk yet
        held = learning.live.stats().tokens
        gone = forget(tmp_path, [str(tenant_key("one"))])
        assert gone.documents == 12 and not gone.alone
        wait_until(lambda: learning.live.stats().tokens < held)
        assert accepted("one") == first, "forgotten while serving"
        assert accepted("main") > first, "others go on"
        assert learning.live.stats().tenants == 3
        check_nothing_is_left(llm)
        runner_of(llm).drafter.guarded.close()

    with engine(tiny_model, speculative_config=method, **settings) as llm:
        assert accepted("main") > first
        runner_of(llm).drafter.guarded.close()


def test_embeddings_in_place_of_a_prompt_are_neither_drafted_for_nor_learnt(tiny_model, tiny_answers, live_prompts):
    """vLLM's batch holds tokens of another request where a prompt has none."""
    import torch
    from transformers import AutoModelForCausalLM

    embedding = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_input_embeddings()
    given = [dict(prompt) for prompt in live_prompts]
    for i in (1, 4):
        with torch.no_grad():
            given[i] = {"prompt_embeds": embedding(torch.tensor(live_prompts[i]["prompt_token_ids"]))}
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4, "enable_prompt_embeds": True}
    method = {"method": "sssd", "num_speculative_tokens": 6, "policy": "fixed"}
    method |= {"live": "store", "isolation": "shared"}
    with engine(tiny_model, speculative_config=method, **settings) as llm:
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
        assert set(map(tuple, learnt_by(proposer.guarded.method, 0))) == learnt
        check_nothing_is_left(llm)
        proposer.guarded.close()


def test_what_stands_behind_a_stop_string_is_not_learnt(demo_model):
    method = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed", "live": "store", "isolation": "shared"}
    with engine(demo_model, speculative_config=method, max_model_len=256, max_num_seqs=2) as llm:
        text = "Once upon a time, in a village by the sea, there lived"

        def say(**settings):
            output = llm.generate(text, parameters(60, ignore_eos=True, **settings), use_tqdm=False)
            settle(llm)
            return output[0]

        first = say()
        whole, lead = first.outputs[0], first.prompt_token_ids[-8:]
        stop = whole.text[len(whole.text) // 2 :][:6]
        ended = say(stop=[stop]).outputs[0]
        assert ended.finish_reason == "stop" and len(ended.token_ids) < len(whole.token_ids) - 8
        learnt = learnt_by(runner_of(llm).drafter.guarded.method, 0)
        assert learnt == [[*lead, *whole.token_ids], [*lead, *ended.token_ids]]
