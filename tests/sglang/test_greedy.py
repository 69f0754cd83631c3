"""Through real engines: with us, every request gets the tokens that stock SGLang gives it."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from tests.sglang.conftest import GREEDY, ids, read_counts, sglang_engine, token_ids
from tests.support.models import continuations
from tests.support.prompts import LONG
from tests.support.prompts import REPETITIVE as PROMPTS
from tests.support.waiting import wait_until

HIDDEN = 64
SIX = {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 6, "maxItems": 6}
PROPERTIES = {"a": SIX, "b": {"type": "boolean"}}
SCHEMA = json.dumps({"type": "object", "properties": PROPERTIES, "required": ["a", "b"]})


def logprobs(engine):
    """float and int lists: the answers' tokens and each step's three likeliest, one after the other."""
    outputs = engine.generate(PROMPTS[:2], GREEDY, return_logprob=True, top_logprobs_num=3)
    metas = [output["meta_info"] for output in outputs]
    rows = [row for meta in metas for row in (meta["output_token_logprobs"], *meta["output_top_logprobs"])]
    return [p for row in rows for p, *_ in row], [token for row in rows for _, token, *_ in row]


def answers(engine):
    """Everything that must not differ, over one engine."""
    out = {"batch 4": ids(engine.generate(PROMPTS, GREEDY))}
    out["batch 1"] = ids([engine.generate(prompt, GREEDY) for prompt in PROMPTS[:3]])
    out["long, in chunks"] = ids(engine.generate([LONG, LONG + " again", PROMPTS[0], LONG[100:]], GREEDY))
    grammar = {"temperature": 0, "max_new_tokens": 60, "json_schema": SCHEMA}
    out["grammar"] = [o["text"] for o in engine.generate([PROMPTS[0], PROMPTS[1]], grammar)]
    # Not with ignore_eos: past the end of its grammar a request goes on in plain decoding and stops in any speculation.
    mixed = [grammar, GREEDY, {"temperature": 0, "max_new_tokens": 40, "regex": "(ab|cd)+"}]
    out["grammar beside others"] = ids(engine.generate(PROMPTS[:3], mixed))
    out["logprobs"], out["logprobs' tokens"] = logprobs(engine)
    # Over five tokens a random model repeats itself, so that much is accepted.
    narrow = {**GREEDY, "max_new_tokens": 80, "logit_bias": {str(token): 1e4 for token in range(300, 305)}}
    out["bias"] = ids(engine.generate(PROMPTS, narrow))
    out["stop"] = ids(engine.generate(PROMPTS[:2], {**GREEDY, "stop_token_ids": [out["batch 4"][0][17]]}))
    return out


# All that makes a distribution depend on tokens of the very step, and a request without.
PENALTIES = [
    {**GREEDY, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {**GREEDY, "repetition_penalty": 1.3, "logit_bias": {"300": 2.0}},
    GREEDY,
    {"temperature": 0, "max_new_tokens": 40, "min_new_tokens": 12},
]


def penalised(engine):
    """The last two requests have drafts all the while, and after their first twelve tokens."""
    out = {"penalties": ids(engine.generate(PROMPTS[:4], PENALTIES))}
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    processor = DisallowedTokensLogitsProcessor.to_str()
    params = [{**GREEDY, "custom_params": {"token_ids": list(range(0, 49152, 2))}}, GREEDY]
    out["processor"] = ids(engine.generate(PROMPTS[:2], params, custom_logit_processor=[processor, None]))
    return out


def hidden_states(engine, which):
    """float [tokens, H] of each answer. SGLang gives those of prompts as far as they were not cached: left out."""
    outputs = engine.generate(PROMPTS[:3], GREEDY, return_hidden_states=which)
    found = [output["meta_info"]["hidden_states"] for output in outputs]
    return [np.concatenate([np.ravel(state) for state in states]).reshape(-1, HIDDEN)[-40:] for states in found]


LONGER = {**GREEDY, "max_new_tokens": 150}
FEATURES = {"chunked_prefill_size": 64, "enable_return_hidden_states": True, "enable_custom_logit_processor": True}


@pytest.fixture(scope="module")
def stock(tiny):
    with sglang_engine(tiny, disable_overlap_schedule=True, **FEATURES) as engine:
        states = {which: hidden_states(engine, which) for which in (True, "last")}
        longer = ids(engine.generate(PROMPTS[:4], LONGER))
        found = {**answers(engine), "sync": penalised(engine), "longer": longer, "states": states}
    # Under overlap scheduling SGLang counts a token for its penalties one step later.
    with sglang_engine(tiny, **FEATURES) as engine:
        return found | {"overlap": penalised(engine)}


def abort_some(engine):
    """Start requests, abort half of them in the middle, and serve another one."""

    async def run():
        names = [f"abort-{i}" for i in range(4)]
        long = engine.async_generate(PROMPTS[:4], {**GREEDY, "max_new_tokens": 400}, rid=names)
        running = asyncio.create_task(long)
        await asyncio.sleep(1.0)
        for name in names:
            engine.tokenizer_manager.abort_request(rid=name)
        await asyncio.gather(running, return_exceptions=True)
        return await engine.async_generate(PROMPTS[0], GREEDY)

    return engine.loop.run_until_complete(run())["output_ids"]


# Settings of the engines with us. The last one's KV pool is too small for four requests.
FIXED = {"speculative_algorithm": "sssd", "page_size": 16, "disable_overlap_schedule": False, **FEATURES}
CYCLING = {"speculative_algorithm": "sssd_cycle", "page_size": 1, **FEATURES}
SYNC = {"disable_overlap_schedule": True}
# With and without overlap, pages of several tokens and of one; SMALL_POOL drafts with cycling widths under overlap.
ENGINES = [FIXED, CYCLING | SYNC]
# As on a GPU: a few widths, each with graphs of its own, and one.
WIDTHS = {"sssd": "16", "sssd_cycle": "1,2,4,8,16"}
NAMES = ["fixed width, pages", "cycling width, sync"]
SMALL_POOL = {"speculative_algorithm": "sssd_cycle", "max_total_tokens": 512}


@pytest.fixture(scope="module")
def drafting(request, tiny, stock, tmp_path_factory):
    """An engine with us, of these settings."""
    counts = tmp_path_factory.mktemp("engine") / "counts.json"
    env = {"SGLANG_INIT_NEW_TOKEN_RATIO": "0.01"} if request.param is SMALL_POOL else {}
    if not request.param.get("disable_overlap_schedule"):
        env["TREE_TEST_WIDTHS"] = WIDTHS[request.param["speculative_algorithm"]]
    with sglang_engine(tiny, counts, env, speculative_num_draft_tokens=16, **request.param) as engine:
        engine.counts, engine.settings = counts, request.param
        yield engine


def settled(engine):
    """What the worker has done, once it has heard of every request's end and holds nothing of any."""
    wait_until(lambda: read_counts(engine.counts)["held"] == 0)
    return read_counts(engine.counts)


@pytest.mark.parametrize("drafting", ENGINES, indirect=True, ids=NAMES)
def test_same_answers(drafting, stock):
    found = answers(drafting)
    # Sums in another order differ in their last bits, so that rounded ones may differ, too.
    np.testing.assert_allclose(found.pop("logprobs"), stock["logprobs"], rtol=0, atol=1e-3)
    for name, value in found.items():
        assert value == stock[name], name
    assert penalised(drafting) == stock["sync" if drafting.settings["disable_overlap_schedule"] else "overlap"]
    for which, expected in stock["states"].items():
        for got, states in zip(hidden_states(drafting, which), expected, strict=True):
            np.testing.assert_allclose(got, states, rtol=0, atol=1e-3)
    assert abort_some(drafting) == stock["batch 4"][0]
    done = settled(drafting)
    assert done["tokens"] > done["request_steps"], "nothing was accepted"
    assert done.get("rebuilt", 0) == 0, "a request's tokens had to be read again although nothing was retracted"
    assert done["batch 4"] > 0
    # With overlap, drafting begins while SGLang still waits for the step before.
    assert done["prepared"] == (0 if drafting.settings["disable_overlap_schedule"] else done["steps"])
    if drafting.settings["speculative_algorithm"] == "sssd_cycle":
        assert done["compacted"] >= 50
        assert sum(name.startswith("width") for name in done) >= 4, "the width did not change"


WORDS = [" the", " of", " and", " a", " to", " in", " is", " was", " for", " on", " with", " as", " by", " at"]


@pytest.mark.parametrize("drafting", [FIXED], indirect=True, ids=NAMES[:1])
def test_corpora(drafting, demo_model):
    """Added over SGLang's own call, a corpus is drafted from; removed, it is not."""
    from sglang.srt.managers.io_struct import AddExternalCorpusReqInput

    # Only words that tokenise back to themselves, so that the answer can be given as a document.
    words = token_ids(demo_model, WORDS)
    sampling = GREEDY | {"max_new_tokens": 60, "logit_bias": {str(token): 1e4 for (token,) in words}}
    manager, run = drafting.tokenizer_manager, drafting.loop.run_until_complete

    def answer():
        output = drafting.generate("one two three four", sampling)
        return output["output_ids"], output["text"], output["meta_info"]["spec_accept_length"]

    tokens, text, before = answer()
    for name, documents, refused in (("c", [text], None), ("c", ["x"], "already"), ("e", [], "no token")):
        request = AddExternalCorpusReqInput(corpus_id=name, documents=documents)
        added = run(manager.add_external_corpus(request))
        assert added.success == (refused is None) and (refused or "") in added.message
    assert run(manager.list_external_corpora()).corpus_token_counts == {"c": 60}
    same, _, during = answer()
    assert same == tokens
    assert during > before + 0.5, "the corpus is not drafted from"
    assert run(manager.remove_external_corpus("c")).success
    missing = run(manager.remove_external_corpus("c"))
    assert not missing.success and "no corpus 'c'" in missing.message
    same, _, after = answer()
    assert same == tokens and after == before


@pytest.mark.parametrize("drafting", [SMALL_POOL], indirect=True, ids=["small pool"])
def test_retraction(drafting, stock):
    """Requests are thrown out, prefilled again, and end with the same tokens."""
    got = drafting.generate(PROMPTS[:4], LONGER)
    assert ids(got) == stock["longer"]
    assert any(o["meta_info"].get("num_retractions", 0) for o in got), "the pool was not small enough to retract"
    settled(drafting)


@pytest.mark.parametrize("drafting", [SMALL_POOL], indirect=True, ids=["small pool"])
def test_failing_source(drafting, stock):
    """Drafting that raises costs speed, not answers, and is tried again."""
    names = [f"broken-{i}" for i in range(4)]
    assert ids(drafting.generate(PROMPTS[:4], GREEDY, rid=names)) == stock["batch 4"][:4]
    before = json.loads(drafting.counts.read_text())
    assert before["failures"] > 0
    for _ in range(2):
        assert ids(drafting.generate(PROMPTS[:4], LONGER)) == stock["longer"]
    after = json.loads(drafting.counts.read_text())
    assert after["failures"] == before["failures"]
    assert after["drafts between failures"] > before["drafts between failures"]


@pytest.mark.extended
def test_to_the_end_of_the_context(tiny, tmp_path):
    """SGLang's rows of KV slots end soon behind it: drafts as wide as they may be take no more than there are."""
    longest, prompts = 96, [[7, 8, 9] * n for n in (4, 9, 20, 28)]
    expected = [tokens[: longest - len(p)] for p, tokens in zip(prompts, continuations(tiny, prompts, 84), strict=True)]
    options = {"speculative_algorithm": "sssd_cycle", "speculative_num_draft_tokens": 16}
    options |= {"context_length": longest, "page_size": 1}
    asked = [GREEDY | {"max_new_tokens": longest - len(p)} for p in prompts]
    with sglang_engine(tiny, tmp_path / "counts.json", {"TREE_TEST_WIDTHS": "16"}, **options) as engine:
        for _ in range(2):
            found = ids(engine.generate(input_ids=prompts, sampling_params=asked))
            assert max(len(p) + len(a) for p, a in zip(prompts, found, strict=True)) >= longest - 2
            assert found == [tokens[: len(a)] for tokens, a in zip(expected, found, strict=True)]
