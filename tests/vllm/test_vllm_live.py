"""Learning while serving, through the real engine: more is accepted the second time, and the answers stay the same."""

from __future__ import annotations

from prometheus_client import REGISTRY
from vllm_cases import parameters, tokens_of
from vllm_engines import engine, failures, runner_of, settle, spied

from freedraft.tenants import tenant_key
from sssd_plugin import metrics as source_metrics
from sssd_plugin.datastore.live.maintenance import forget
from sssd_plugin.scoring.attribution import SOURCES
from tests.support.stores import documents_of
from tests.support.waiting import wait_until

TOKENS = 30


def generate(llm, prompts, salt=None):
    given = [prompt | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    outputs = llm.generate(given, parameters(TOKENS, ignore_eos=True, detokenize=False), use_tqdm=False)
    settle(llm)
    return tokens_of(outputs)


def accepted(llm, prompts, salt=None):
    """Draft tokens accepted while these are answered, and the answers."""
    total = 0

    def record(step, drafts):
        nonlocal total
        total += int(step.accepted.sum())

    with spied(runner_of(llm).drafter, record):
        answers = generate(llm, prompts, salt)
    return total, answers


def learnt_by(method, tenant):
    return [text for run in method.live.tenants[tenant].all_runs for text in documents_of(run.sub)]


def value(name, **labels):
    found = REGISTRY.get_sample_value(f"freedraft_{name}", labels)
    assert found is not None, name
    return found


def counters():
    """Counters add up over all engines of this process."""
    names = ["lookups", "live_documents", "live_inserted_tokens", "live_merges", "live_merge_seconds"]
    found = {name: value(f"{name}_total") for name in names}
    found |= {f"{s} hits": value("hits_total", source=s) for s in SOURCES}
    return found | {f"{s} tokens": value("sourced_tokens_total", source=s) for s in (*SOURCES, "other")}


def show(method):
    """Bring the live metrics up to date, which they are not at every request's end."""
    method.live_metrics._next = 0.0
    method.live_metrics.show(method.live)


def gained(before):
    return {name: number - before[name] for name, number in counters().items()}


def test_learns_from_what_it_said(tiny_model, plain_tiny, live_prompts, tmp_path, monkeypatch):
    prompts, plain = live_prompts, plain_tiny.answers
    monkeypatch.setattr(source_metrics, "EVERY", 1)
    settings = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4}
    method = {
        "method": "sssd", "num_speculative_tokens": 6, "policy": "fixed", "live": True, "datastore": str(tmp_path),
        "recycle": "off",
    }  # fmt: skip
    with engine(tiny_model, speculative_config=method, **settings) as llm:
        proposer = runner_of(llm).drafter
        learning = proposer.guarded.method
        before = counters()
        first, answers = accepted(llm, prompts, "main")
        assert answers == plain
        said = [[*prompt["prompt_token_ids"][-8:], *answer] for prompt, answer in zip(prompts, plain, strict=True)]
        (tenant,) = (number for number in learning.live.tenants if number)
        assert sorted(learnt_by(learning, tenant)) == sorted(said), "every output, whole, behind the end of its prompt"
        show(learning)
        one = gained(before)
        assert sum(one[f"{source} tokens"] for source in (*SOURCES, "other")) == first
        assert one["input tokens"] > 0 and one["static tokens"] == 0
        before = counters()
        second, answers = accepted(llm, prompts, "main")
        assert answers == plain and second > first
        show(learning)
        two = gained(before)
        assert sum(two[f"{source} tokens"] for source in (*SOURCES, "other")) == second
        assert two["live tokens"] > one["live tokens"] and two["live hits"] > one["live hits"]
        assert two["live hits"] <= two["lookups"]
        assert two["live_documents"] == 6 and two["live_inserted_tokens"] == 6 * (8 + TOKENS)
        assert 0 == two["live_merges"] == two["live_merge_seconds"]
        assert value("live_tokens") == 12 * (8 + TOKENS + 1)
        assert value("live_sub_indices") == 1 and value("live_bytes") > 8 * value("live_tokens")
        assert value("static_tokens") == value("static_sub_indices") == 0
        assert value("drafting_seconds_count", method="sssd") > 0 < value("drafting_seconds_sum", method="sssd")

        # A tenant profits from its own answers only.
        alone, answers = accepted(llm, prompts, "one")
        assert alone == first and answers == plain
        assert accepted(llm, prompts, "two")[0] == first
        again, answers = accepted(llm, prompts, "one")
        assert again > first and answers == plain
        # Requests without a salt profit from one another's.
        (unsalted, answers), (again, _) = (accepted(llm, prompts) for _ in range(2))
        assert unsalted == first < again and answers == plain
        learning.live.flush()  # else the newest are not on disk yet
        held = learning.live.stats().tokens
        gone = forget(tmp_path, [str(tenant_key("one"))])
        assert gone.documents == 12 and not gone.alone
        wait_until(lambda: learning.live.stats().tokens < held)
        alone, answers = accepted(llm, prompts, "one")
        assert alone == first and answers == plain, "forgotten while serving"
        assert accepted(llm, prompts, "main")[0] > first, "others go on"
        assert not failures(proposer) and learning.live.stats().tenants == 3
        proposer.guarded.close()

    with engine(tiny_model, speculative_config=method, **settings) as llm:
        restarted, answers = accepted(llm, prompts, "main")
        assert restarted > first and answers == plain
        runner_of(llm).drafter.guarded.close()


def test_embeddings_in_place_of_a_prompt_are_neither_drafted_for_nor_learnt(tiny_model, plain_tiny, live_prompts):
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
    method |= {"live": True, "live_prompts": True, "isolation": "shared"}
    with engine(tiny_model, speculative_config=method, **settings) as llm:
        proposer = runner_of(llm).drafter
        texts: set[tuple[int, ...]] = set()

        def record(step, drafts):
            texts.update(tuple(step.history(b).tolist()) for b in range(step.batch_size))

        with spied(proposer, record):
            for _ in range(2):
                assert generate(llm, given) == plain_tiny.answers
        known = [
            tuple(prompt["prompt_token_ids"]) + tuple(answer)
            for i, (prompt, answer) in enumerate(zip(live_prompts, plain_tiny.answers, strict=True))
            if i not in (1, 4)
        ]
        # A step may accept tokens beyond the end of an answer.
        assert texts and all(any(whole[: len(text)] == text[: len(whole)] for whole in known) for text in texts)
        assert set(map(tuple, learnt_by(proposer.guarded.method, 0))) == set(known)
        assert not failures(proposer) and not proposer.guarded.running and not proposer.limits
        proposer.guarded.close()


def test_what_stands_behind_a_stop_string_is_not_learnt(demo_model):
    method = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed", "live": True, "isolation": "shared"}
    with engine(demo_model, speculative_config=method, max_model_len=256, max_num_seqs=2) as llm:
        text = "Once upon a time, in a village by the sea, there lived"

        def ask(**settings):
            output = llm.generate(text, parameters(60, ignore_eos=True, **settings), use_tqdm=False)
            settle(llm)
            return output[0]

        first = ask()
        whole, lead = first.outputs[0], first.prompt_token_ids[-8:]
        stop = whole.text[len(whole.text) // 2 :][:6]
        ended = ask(stop=[stop]).outputs[0]
        assert ended.finish_reason == "stop" and len(ended.token_ids) < len(whole.token_ids) - 8
        learnt = learnt_by(runner_of(llm).drafter.guarded.method, 0)
        assert learnt == [[*lead, *whole.token_ids], [*lead, *ended.token_ids]]
