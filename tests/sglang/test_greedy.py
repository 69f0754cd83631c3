"""Through real engines: with us, every request gets the tokens that stock SGLang gives it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.sglang.conftest import read_counts, sglang_engine

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu"]
PROMPTS = [f"{word}: " + " ".join(WORDS[i : i + 4] * 3) for i, word in enumerate(WORDS[:12])]
LONG = " ".join(WORDS * 12)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 6, "maxItems": 6},
            "b": {"type": "boolean"},
        },
        "required": ["a", "b"],
    }
)


def ids(outputs):
    return [output["output_ids"] for output in outputs]


def strip_logprobs(output):
    meta = output["meta_info"]
    rows = [meta["output_token_logprobs"], *meta["output_top_logprobs"]]
    return [[(round(p, 3), token) for p, token, *_ in row] for row in rows]


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
    logprobs = engine.generate(PROMPTS[:2], GREEDY, return_logprob=True, top_logprobs_num=3)
    out["logprobs"] = [strip_logprobs(o) for o in logprobs]
    # Over five tokens a random model repeats itself, so that much is accepted.
    narrow = {**GREEDY, "max_new_tokens": 80, "logit_bias": {str(token): 1e4 for token in range(300, 305)}}
    out["bias"] = ids(engine.generate(PROMPTS, narrow))
    out["stop"] = ids(engine.generate(PROMPTS[:2], {**GREEDY, "stop_token_ids": [out["batch 4"][0][17]]}))
    return out


def penalised(engine):
    return ids(engine.generate(PROMPTS[:2], {**GREEDY, "frequency_penalty": 1.5, "min_new_tokens": 4}))


LONGER = {**GREEDY, "max_new_tokens": 150}
CHUNKS = {"chunked_prefill_size": 64}


@pytest.fixture(scope="module")
def stock(tiny):
    with sglang_engine(tiny, disable_overlap_schedule=True, **CHUNKS) as engine:
        longer = ids(engine.generate(PROMPTS[:4], LONGER))
        return {**answers(engine), "penalties": penalised(engine), "longer": longer}


def abort_some(engine, counts):
    """Start requests, abort half of them in the middle, and serve another one."""

    async def run():
        long = {**GREEDY, "max_new_tokens": 400}
        streams = [
            asyncio.create_task(engine.async_generate(prompt, long, rid=f"abort-{i}"))
            for i, prompt in enumerate(PROMPTS[:4])
        ]
        await asyncio.sleep(1.0)
        for i in range(4):
            engine.tokenizer_manager.abort_request(rid=f"abort-{i}")
        await asyncio.gather(*streams, return_exceptions=True)
        return await engine.async_generate(PROMPTS[0], GREEDY)

    return engine.loop.run_until_complete(run())["output_ids"]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
@pytest.mark.parametrize(
    "algorithm, page", [("sssd_cycle", 1), ("sssd", 16)], ids=["cycling width", "fixed width, pages"]
)
def test_same_answers(tiny, stock, tmp_path, overlap, algorithm, page):
    counts = tmp_path / "counts.json"
    with sglang_engine(
        tiny,
        counts,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=16,
        disable_overlap_schedule=not overlap,
        page_size=page,
        **CHUNKS,
    ) as engine:
        expected = dict(stock)
        got = answers(engine)
        if not overlap:
            got["penalties"] = penalised(engine)
        for name, value in got.items():
            assert value == expected[name], name
        assert abort_some(engine, counts) == stock["batch 4"][0]
    done = read_counts(counts)
    assert done["held"] == 0, "a request's n-grams outlive it"
    assert done["tokens"] > done["request_steps"], "nothing was accepted"
    assert done["rebuilt"] == 0, "a request's tokens had to be read again although nothing was retracted"
    assert done["batch 4"] > 0
    if algorithm == "sssd_cycle":
        assert done["compacted"] >= 50
        assert sum(name.startswith("width") for name in done) >= 4, "the width did not change"


def test_retraction(tiny, stock, tmp_path):
    """A KV pool too small for the batch: requests are thrown out, prefilled again, and end with the same tokens."""
    counts = tmp_path / "counts.json"
    with sglang_engine(
        tiny,
        counts,
        env={"SGLANG_INIT_NEW_TOKEN_RATIO": "0.01"},
        speculative_algorithm="sssd_cycle",
        speculative_num_draft_tokens=16,
        max_total_tokens=512,
    ) as engine:
        got = engine.generate(PROMPTS[:4], LONGER)
        assert ids(got) == stock["longer"]
        assert any(o["meta_info"].get("num_retractions", 0) for o in got), "the pool was not small enough to retract"
    assert read_counts(counts)["held"] == 0


def test_failing_source(tiny, stock):
    """Drafting that raises costs speed, not answers."""
    with sglang_engine(tiny, speculative_algorithm="broken", speculative_num_draft_tokens=4) as engine:
        assert ids(engine.generate(PROMPTS[:4], GREEDY)) == stock["batch 4"][:4]
