"""Draft trees on model runner V2 in Triton's interpreter, with FlashAttention and vLLM's Triton attention, async.

Most with FlashAttention, whose own kernels PyTorch computes: the interpreter takes a third longer for Triton's.
"""

from __future__ import annotations

import pytest
from test_vllm_v2 import serve
from vllm_cases import alone, greedy_case, recycled, seeded_case, token_prompts

TOKENS = 30
SSSD = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed", "recycle": "on"}
ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 18}
ENGINE |= {"block_size": 16, "gpu_memory_utilization": 0.2, "skip_tokenizer_init": True}
FLASH, TRITON = {"attention": "flash"}, {"attention": "triton"}


@pytest.fixture(scope="module")
def served(tiny_model, tiny_answers, live_prompts):
    """What an engine with too little room for all requests says: prompts in parts, among trees and chains."""
    whole = token_prompts(
        [p["prompt_token_ids"] + answer for p, answer in zip(live_prompts, tiny_answers, strict=True)]
    )
    cases = {
        "trees": greedy_case(live_prompts),
        "from the cache": greedy_case(whole[-2:], 6),
        "mixed": greedy_case(live_prompts, chains=[1, 3, 4], abort=5),
        "to the end": greedy_case(2 * live_prompts[:2], 64, chains=[2, 3]),
        "read": greedy_case(whole[-2:], 6, salt="other "),
        "seeded": seeded_case() | {"chains": [1, 4, 7], "abort": 6},
        "seeded, alone": alone(seeded_case(), 2),
    }
    noted = {"kv": True, "warm_up": True, "drafts": True, "rows": 20}
    return serve(tiny_model, cases=cases, speculative_config=SSSD | {"shape": "tree"}, **noted, **ENGINE | FLASH)


def test_drafts_are_trees(served):
    engine = served["engine"]
    assert engine["v2"] and engine["async"] and engine["trees"]
    assert not engine["failures"] and engine["held"] == [0, 0, 0]
    assert engine["preempted"] > 0
    chains, branches = engine["branches"]
    assert branches > 30, "paths that leave the first chain were accepted"
    assert chains > 30


def test_no_step_waits_before_its_attention_is_prepared(served):
    """Trees are read on the device only, when the model runs."""
    early, waits = served["engine"]["waits"]
    assert early == 0 and waits > 20


def test_trees_are_wide_before_the_last_token(served, live_prompts):
    """With two tokens to come, of which the second follows all drafts. (The first prompts have longer answers, too.)"""
    prompts = [prompt["prompt_token_ids"] for prompt in live_prompts][2:]
    widths = [
        len(drafted)
        for text, drafted in served["engine"]["drafts"]
        for prompt in prompts
        if text[: len(prompt)] == prompt and len(text) == len(prompt) + TOKENS - 2
    ]
    assert max(widths) > 1


def test_kernels_are_compiled_before_requests_come(served):
    """Of the widths, types and addresses of steps to come, with vLLM's own made-up requests and with ours; those that
    CUDA graphs replay, too, which this CPU has not."""
    engine = served["engine"]
    assert engine["compiled"] >= 6 and engine["compiled late"] == []


@pytest.mark.extended
def test_a_request_alone_finds_all_kernels_compiled(tiny_model):
    """Whose keys are read in several parts, of which there are the more the longer it is."""
    cases = {"long": greedy_case(token_prompts([[2 + 7 * i % 22 for i in range(280)]]), 12)}
    given = {"skip_tokenizer_init": True, "max_model_len": 600, "max_num_seqs": 1, "max_num_batched_tokens": 512}
    given |= {"hf_overrides": {"max_position_embeddings": 1024}, "warm_up": True}
    engine = serve(tiny_model, cases=cases, speculative_config=SSSD | {"shape": "tree"}, **given, **FLASH)["engine"]
    assert engine["trees"] and engine["drafted"] > 20
    assert engine["compiled"] >= 6 and engine["compiled late"] == []


def test_what_trees_would_break_has_chains(served):
    none, invariant, experts, sampler = served["engine"]["reasons for chains"]
    assert none is None and "batch invariance" in invariant and "routed experts" in experts
    assert "a sampler of the model's own" in sampler


def test_a_runner_that_is_built_otherwise_has_chains(served):
    """A version in between, say, without something that is read: it starts, and one line says what was not found."""
    enabled, line = served["engine"]["built otherwise"]
    assert not enabled and "drafts are chains" in line and "fast_prefill" in line and "\n" not in line


def test_graphs_have_one_kernel_of_attention_each(served):
    """Though they are captured while vLLM warms up, when steps run all that others may need."""
    assert served["engine"]["trees of graphs"] == {"half": [1, 5, 0], "all": [1, 9, 0], "any step": [1, 9, 1]}


@pytest.mark.parametrize("case", ["trees", "mixed"])
def test_greedy_answers_are_the_models_own(served, tiny_answers, case):
    assert served[case] == tiny_answers


def test_requests_end_at_the_longest_context(served, live_prompts):
    """With trees as with chains, which vLLM verifies."""
    trees, chains = served["to the end"][:2], served["to the end"][2:]
    assert [len(answer) for answer in trees] == [64 - len(prompt["prompt_token_ids"]) for prompt in live_prompts[:2]]
    assert trees == chains


def test_the_kv_cache_holds_what_plain_decoding_leaves(served):
    """At each step of a request, and when its text is read as a prompt, the same tokens have the same KV."""
    worst, pairs = served["engine"]["kv"]
    assert pairs > 100 and worst < 1e-4
    assert served["engine"]["cached"] >= 32, "pages that steps with trees had filled"
    assert served["from the cache"] == served["read"]


def test_a_seed_gives_the_tokens_of_an_engine_without_drafts(served, plain_seeded):
    """Greedy and sampled requests with trees and chains in one batch, few of whose logits are verified at once."""
    assert served["seeded"] == plain_seeded and served["seeded, alone"] == plain_seeded[2:3]
    drafted, accepted = served["engine"]["counts"]["seeded"]
    assert accepted > 10 and drafted - accepted > 10


def test_logits_of_all_nodes_are_recycled(served, tiny_answers, live_prompts):
    """And of roots without drafts: nothing is drafted behind the last token of an answer but one."""
    checked, _ = recycled(served, tiny_answers, live_prompts)
    assert checked > 50
    said = {tuple(text[:-1]) for text in served["engine"]["said"]}
    for prompt, answer in zip(live_prompts, tiny_answers, strict=True):
        assert (*prompt["prompt_token_ids"], *answer[:-1]) in said


@pytest.mark.parametrize(
    "attention",
    [TRITON, pytest.param(FLASH, marks=pytest.mark.extended)],
    ids=["trees in Triton's", "chains in one without masks"],
)
def test_where_nobody_asked_for_trees(tiny_model, tiny_answers, live_prompts, attention):
    cases = {"few": greedy_case(live_prompts[:3], 20, chains=[1], abort=5)}
    found = serve(tiny_model, cases=cases, speculative_config=SSSD, **ENGINE | attention)
    assert found["few"] == [answer[:20] for answer in tiny_answers[:3]]
    engine = found["engine"]
    assert engine["trees"] == (attention is TRITON) and not engine["failures"]
    assert engine["branches"][1] > 2 or attention is FLASH
