"""Through the real engine: seeded requests have the tokens of requests without drafts, whatever is drafted."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.sglang.conftest import make_tiny, read_counts, sglang_engine
from tests.support.prompts import random_ids

# Seeds are heeded by stock SGLang under --enable-deterministic-inference alone, where a request without one has 42, and
# one with min_p ends the server. See the tests' plugin for what it takes on a CPU.
SEEDED_VOCAB, ROWS = 200, 5
SEEDS = (1, 2**40 + 7, None)
# Noise belongs to ranks where some request of a batch has a filter, and to token ids where none has: not to be mixed.
FILTERED = [
    {"temperature": 0.3, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8},
    {"temperature": 0.0},
]
PLAIN = [{"temperature": 0.3}, {"temperature": 0.9}, {"temperature": 1.3}]


def seeded_requests(kinds):
    """(prompt, sampling parameters), those of one seed after those of the other."""
    prompts = random_ids((3, 5, 8, 13, 21, 34, 55, 89), SEEDED_VOCAB)
    for seed, prompt, kind in itertools.product(SEEDS, prompts, kinds):
        yield prompt, {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": seed} | kind


def answer(engine, given, together, extra=None):
    """Tokens and mean accepted lengths of a tenant's requests, of this many at a time; extra: for the drafter."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    outputs = []
    for first in range(0, len(given), together):
        prompts, sampling = zip(*given[first : first + together], strict=True)
        sampling = [each | {"custom_params": extra} for each in sampling]
        request = GenerateReqInput(input_ids=list(prompts), sampling_params=sampling, extra_key="tenant")
        outputs += engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))
    return [o["output_ids"] for o in outputs], [o["meta_info"].get("spec_accept_length", 1.0) for o in outputs]


async def give_up(engine, given):
    """Start requests beside whatever runs, and abort them soon."""
    names = [f"given-up-{i}" for i in range(len(given))]
    prompts, sampling = zip(*given, strict=True)
    long = [each | {"max_new_tokens": 150} for each in sampling]
    running = engine.async_generate(input_ids=list(prompts), sampling_params=long, rid=names)
    running = asyncio.create_task(running)
    await asyncio.sleep(0.5)
    for name in names:
        engine.tokenizer_manager.abort_request(rid=name)
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_seeded_requests_have_the_tokens_of_requests_without_drafts(tmp_path, overlap):
    """While the drafter learns from their answers: what is drafted changes, and what is said does not. Requests with
    filters, and without."""
    model = make_tiny(tmp_path / "seeded", vocab_size=SEEDED_VOCAB, tokenizer=None)
    counts, options = tmp_path / "counts.json", {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 8}
    options |= {"enable_deterministic_inference": True, "skip_tokenizer_init": True}
    env = {"FREEDRAFT_LIVE": "store", "FREEDRAFT_DATASTORE": str(tmp_path / "store")}
    env["TREE_TEST_PROBABILITIES"] = str(ROWS * SEEDED_VOCAB)  # batches are sampled in parts
    env["TORCHDYNAMO_DISABLE"] = "1"  # SGLang would compile its sampler with a C++ compiler
    with sglang_engine(model, counts, env, disable_overlap_schedule=not overlap, **options) as engine:
        for kinds in (FILTERED, PLAIN):
            given = list(seeded_requests(kinds))
            expected, _ = answer(engine, given, 4, {"freedraft": "off"})
            of_each_seed = len(given) // len(SEEDS)
            others = sum(a != b for a, b in zip(expected[:of_each_seed], expected[of_each_seed:], strict=False))
            assert others > of_each_seed / 2, "seeds are not heeded"
            together, accepted = answer(engine, given, 4)
            assert together == expected
            beside = engine.loop.create_task(give_up(engine, given[:4]))
            again, _ = answer(engine, given[::3], 4)
            engine.loop.run_until_complete(beside)
            assert again == expected[::3]
            assert answer(engine, given[1::3], 1)[0] == expected[1::3]
            assert sum(accepted) > 1.2 * len(accepted), "nothing was learned"
    done = read_counts(counts)
    assert done["batch 4"] > 0 and done["most rows sampled"] == ROWS
