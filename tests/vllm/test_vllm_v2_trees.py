"""Draft trees on model runner V2, with FlashAttention and with vLLM's Triton attention, and windowed drafts. See
`v2_engines`."""

import pytest
from test_vllm_v2 import LAUNCHES, check_launches
from v2_engines import SSSD_TREES, TREES, WINDOW, WINDOWED_IDS, serve
from vllm_cases import greedy_case, recycled, token_prompts
from windowed_reference import Reference

from tests.support.models import continuations

TOKENS = 30


@pytest.fixture(scope="module")
def served(on_flash):
    return on_flash["trees"]


def test_launches_of_a_step(served):
    more = {"match": (1, ["compact_kernel", "verify_kernel"]), "prepare trees": (1, [])}
    more["reach"] = 1, ["_combine_sampled_and_draft_tokens_kernel", "tree_queries_kernel"]
    check_launches(served["engine"]["launches"], LAUNCHES | more)


def test_drafts_are_trees(served):
    engine = served["engine"]
    assert engine["v2"] and engine["async"] and engine["trees"]
    assert not engine["failures"] and engine["held"] == [0, 0, 0]
    assert engine["preempted"] > 0
    chains, branches = engine["branches"]
    assert branches > 15, "paths that leave the first chain were accepted"
    assert chains > 15


def test_no_step_waits_before_its_attention_is_prepared(served):
    """Trees are read on the device only, when the model runs."""
    early, waits = served["engine"]["waits"]
    assert early == 0 and waits > 20


def test_trees_are_wide_before_the_last_token(served):
    """With few tokens to come, of which the last follows all drafts."""
    drafts = [
        (12 + TOKENS - len(text), len(drafted)) for text, drafted in served["engine"]["by case"]["mixed"]["drafts"]
    ]
    assert any(width >= left for left, width in drafts if 1 < left < 6)


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
    options = SSSD_TREES | {"shape": "tree"}
    engine = serve(tiny_model, "flash", cases=cases, speculative_config=options, **given)["engine"]
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


def test_greedy_answers_are_the_models_own(served, tiny_answers):
    assert served["mixed"] == tiny_answers


def test_requests_end_at_the_longest_context(served):
    """With trees as with chains, which vLLM verifies."""
    trees, chains = served["to the end"][:2], served["to the end"][2:]
    assert [len(answer) for answer in trees] == 2 * [64 - 12 - TOKENS] and trees == chains


def test_the_kv_cache_holds_what_plain_decoding_leaves(served):
    """At each step of a request, and when its text is read as a prompt, the same tokens have the same KV."""
    worst, pairs = served["engine"]["kv"]
    assert pairs > 60 and worst < 1e-4
    assert served["engine"]["cached"] >= 32, "pages that steps with trees had filled"
    assert served["from the cache"] == served["read"]


def test_a_seed_gives_the_tokens_of_an_engine_without_drafts(served, plain_seeded):
    """Greedy and sampled requests with trees and chains in one batch, few of whose logits are verified at once."""
    assert served["seeded"] == plain_seeded
    drafted, accepted = served["engine"]["counts"]["seeded"]
    assert accepted > 10 and drafted - accepted > 10


def test_logits_of_all_nodes_are_recycled(served, tiny_answers, live_prompts):
    """And of roots without drafts: nothing is drafted behind the last token of an answer but one."""
    checked, _ = recycled(served, tiny_answers, live_prompts)
    assert checked > 50
    said = {tuple(text[:-1]) for text in served["engine"]["said"]}
    for prompt, answer in zip(live_prompts, tiny_answers, strict=True):
        assert (*prompt["prompt_token_ids"], *answer[:-1]) in said


@pytest.mark.extended
@pytest.mark.parametrize("attention", ["triton", "flash"], ids=["trees in Triton's", "chains in one without masks"])
def test_where_nobody_asked_for_trees(tiny_model, tiny_answers, live_prompts, attention):
    cases = {"few": greedy_case(live_prompts[:3], 20, chains=[1], abort=5)}
    found = serve(tiny_model, attention, cases=cases, speculative_config=SSSD_TREES, **TREES)
    assert found["few"] == [answer[:20] for answer in tiny_answers[:3]]
    engine = found["engine"]
    assert engine["trees"] == (attention == "triton") and not engine["failures"]
    assert engine["branches"][1] > 2 or attention == "flash"


def test_drafts_are_those_of_a_masked_reference(on_flash, given):
    """With passes that run as CUDA graphs do and are read back once per round. A replay computes with the tensors and
    the forward context of the capture, for each skip set."""
    found, folder = on_flash["windowed"], given.folder / "windowed"
    expected = continuations(folder, WINDOWED_IDS, 24)
    assert found["greedy"] == expected and found["aborted"] == expected[:2]
    engine = found["engine"]
    assert engine["v2"] and engine["async"] and not engine["failures"]
    drafts = [(tokens, drafted) for tokens, drafted in engine["by case"]["greedy"]["drafts"] if drafted]
    assert min(len(tokens) for tokens, _ in drafts) > WINDOW.tokens, "nothing is left out of what is shorter"
    Reference(folder, 16).judge(drafts, WINDOW)
    # Passes for all three requests are larger than the largest graph.
    assert len(engine["replays"]) == 2 and min(engine["replays"]) > 5
    assert 20 < sum(engine["replays"]) < sum(engine["reads"]) and engine["reads"].count(3) > len(engine["reads"]) / 2
