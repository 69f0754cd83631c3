"""Layer skip on other models, pages and schedules, sampled, where it cannot pay, and beside n-grams."""

from __future__ import annotations

import json

import pytest

from layerskip_plugin.skip_set import SkipSet
from tests.sglang.conftest import GREEDY, SIX_TOKENS, ids, sglang_engine
from tests.sglang.layerskip_tools import LAYERS, ask, checked_engine, logged, make_model, prompts
from tests.support.distributions import assert_distribution, enumerate_outputs
from tests.support.models import continuations

PAGES_SYNC = {"page_size": 16, "disable_overlap_schedule": True}
PAGES_OVERLAP = {"page_size": 16, "disable_overlap_schedule": False}
WINDOW = {"FREEDRAFT_WINDOW": "40"}


@pytest.mark.parametrize(
    "kind, more, window",
    [
        pytest.param("Qwen3", PAGES_SYNC, {}, marks=pytest.mark.extended),
        pytest.param("Qwen2", PAGES_OVERLAP, WINDOW, marks=pytest.mark.extended),
        ("Mistral", {"page_size": 1, "disable_overlap_schedule": False}, WINDOW),
    ],
    ids=["Qwen3, pages, sync", "Qwen2, pages, overlap, window", "Mistral, overlap, window"],
)
def test_pages_retraction_and_the_end_of_the_context(tmp_path, kind, more, window):
    """Pages of 16, requests that are thrown out of the KV pool and prefilled again, that stop drafting at different
    depths, and one that runs into the end of the context; drafts that read a window of the cache."""
    folder = make_model(tmp_path / kind, kind, context=192)
    # As if the KV pool were full, at every eleventh pass.
    changed = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11", **window}
    changed |= {"FREEDRAFT_LOOKAHEAD": "confidence", "FREEDRAFT_THRESHOLD": "0.4"}
    given = prompts((15, 16, 17, 31))
    expected = continuations(folder, given, 160)
    more = {**more, "speculative_num_draft_tokens": 6, "max_total_tokens": 768}
    with checked_engine(folder, "weak mixed", changed, **more) as engine:
        outputs = ask(engine, given, "set1", {**GREEDY, "max_new_tokens": 120})
        assert ids(outputs) == [tokens[:120] for tokens in expected]
        assert sum(o["meta_info"].get("num_retractions", 0) for o in outputs) >= 3
        # The context ends at 192 tokens, of which 31 are the prompt's.
        (output,) = ask(engine, given[-1:], "set0", {**GREEDY, "max_new_tokens": 160})
        assert len(output["output_ids"]) > 140
        assert output["output_ids"] == expected[-1][: len(output["output_ids"])]
        done = logged(engine)
        assert done["uneven"] > 5, "all requests drafted equally far"
        # Of contexts up to 191 tokens a pass reads a page or two of sinks, and the newest.
        assert (done["longest read"] < 80) == bool(window)


@pytest.mark.extended
def test_stops_by_itself_where_it_cannot_pay(tmp_path):
    """Default lookahead: with a skip set whose drafts are hardly ever accepted it stops, and looks again rarely."""
    folder = make_model(tmp_path / "Mistral", "Mistral")
    SkipSet(LAYERS, frozenset(range(LAYERS)), frozenset({0})).save(folder / "bad.json")
    expected = continuations(folder, prompts()[:3], 400)
    changed = {"LAYERSKIP_TEST_TIMES": "0.008 0.01"}
    with checked_engine(folder, "bad", changed, speculative_num_draft_tokens=4) as engine:
        sampling = {**GREEDY, "max_new_tokens": 400}
        assert ids(engine.generate(input_ids=prompts()[:1], sampling_params=sampling)) == expected[:1]
        learnt = json.loads(engine.log.read_text())
        assert learnt["rounds"] > 0
        for prompt, answer in zip(prompts()[1:3], expected[1:], strict=True):
            assert ids(engine.generate(input_ids=[prompt], sampling_params=sampling)) == [answer]
        done = json.loads(engine.log.read_text())
    steps = done["steps"] - learnt["steps"]
    assert steps > 700
    # It looks again in 1 % of the steps; text that repeats itself may make it look better for a few more.
    assert done["rounds"] - learnt["rounds"] <= 0.03 * steps


def test_sampled_distribution(six, tmp_path):
    """Trees and chains, sampled: exactly the target's distribution."""
    from tests.sglang.test_sampled import PROMPT, SAMPLES, TOKENS

    SkipSet(2, frozenset({1}), frozenset({0})).save(tmp_path / "s.json")
    env = {"FREEDRAFT_SKIP_SET": str(tmp_path / "s.json"), "LAYERSKIP_TEST_LOG": str(tmp_path / "log.json")}
    # So high that drafts end early and leave nodes for branches.
    env |= {"FREEDRAFT_LOOKAHEAD": "confidence", "FREEDRAFT_THRESHOLD": "0.5"}
    options = {"speculative_algorithm": "layerskip_checked", "speculative_num_draft_tokens": 8}
    options |= {"max_running_requests": 64, "max_total_tokens": 4096, "skip_tokenizer_init": True}
    with sglang_engine(six, env=env, **options) as engine:
        for shape, temperature, top_p in (("tree", 1.5, 1.0), ("chain", 2.0, 0.9)):
            sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": TOKENS, "ignore_eos": True}
            names = [f"{shape}-{i}" for i in range(SAMPLES)]
            outputs = engine.generate(input_ids=[PROMPT] * SAMPLES, sampling_params=sampling, rid=names)
            expected = enumerate_outputs(six, PROMPT, TOKENS, temperature=temperature, top_k=SIX_TOKENS, top_p=top_p)
            assert_distribution([*map(tuple, ids(outputs))], expected)
        log = json.loads((tmp_path / "log.json").read_text())
        assert log["branches"] > 0 and log["drafted"] > SAMPLES // 2
        assert log["written outside the window"] == 0


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """An engine with the hybrid method, which gives draft passes to random requests."""
    folder = make_model(tmp_path_factory.mktemp("llama"), "Llama")
    changed = {"FREEDRAFT_POLICY": "auto", "FREEDRAFT_SCORING": "learned"}
    given = {"speculative_algorithm": "hybrid_any", "speculative_num_draft_tokens": 8}
    with checked_engine(folder, "weak mixed", changed, **given) as engine:
        yield engine


@pytest.mark.parametrize("batch", [1, 4])
def test_any_choice_of_drafters(hybrid, batch):
    """n-grams and layer skip in one engine: outputs do not depend on which of them drafts for a request."""
    # Prompts that repeat themselves, so that n-grams have something to say.
    given = [(prompt * 8)[:96] for prompt in prompts()]
    expected = continuations(hybrid.folder, given, GREEDY["max_new_tokens"])
    got = []
    for start in range(0, len(given), batch):
        got += ids(hybrid.generate(input_ids=given[start : start + batch], sampling_params=GREEDY))
    assert got == expected
    log = json.loads(hybrid.log.read_text())
    assert log["of the model"] > 50 and log["of n-grams"] > 10
    assert batch == 1 or log["mixed"] > 5
