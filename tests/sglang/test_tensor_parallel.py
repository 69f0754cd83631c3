"""Two tensor-parallel ranks: they verify the same trees with the same outcome, and answer as one rank without us."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from tests.sglang.conftest import sglang_engine
from tests.support.models import continuations
from tests.support.prompts import REPETITIVE as PROMPTS

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True}


def ids(outputs):
    return [output["output_ids"] for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny):
    from transformers import AutoTokenizer

    return continuations(tiny, [AutoTokenizer.from_pretrained(tiny)(text)["input_ids"] for text in PROMPTS[:4]], 40)


def abort_one(engine):
    """Two clients, of which one goes away."""

    async def run():
        going = [
            asyncio.create_task(engine.async_generate(p, GREEDY | {"max_new_tokens": 300}, rid=p[:20]))
            for p in PROMPTS[:2]
        ]
        await asyncio.sleep(1.0)
        engine.tokenizer_manager.abort_request(rid=PROMPTS[0][:20])
        await asyncio.gather(*going, return_exceptions=True)

    engine.loop.run_until_complete(run())


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_two_ranks(tiny, plain, tmp_path):
    binding = "|".join(map(str, CORES[:2]))  # without it SGLang wants a NUMA node for each rank
    env = {"TREE_TEST_RANKS": str(tmp_path), "SGLANG_CPU_OMP_THREADS_BIND": binding}
    env |= {"FREEDRAFT_LIVE": "true", "FREEDRAFT_ISOLATION": "shared"}
    with sglang_engine(tiny, env=env, speculative_algorithm="sssd_cycle", tp_size=2) as engine:
        assert ids(engine.generate(PROMPTS[:4], GREEDY)) == plain
        engine.generate(PROMPTS[:4], SAMPLED)
        abort_one(engine)
        # The drafter raises on the rank that drafts; the others wait for its trees.
        assert ids(engine.generate(PROMPTS[:4], GREEDY, rid=[f"broken-{i}" for i in range(4)])) == plain
        assert ids(engine.generate(PROMPTS[:4], GREEDY)) == plain
    first, second = (path.read_text().splitlines() for path in sorted(tmp_path.glob("steps-*")))
    assert first == second, "ranks disagree"
    steps = [json.loads(line) for line in first]
    assert len({len(tokens[0]) for tokens, *_ in steps}) >= 4, "the width did not change"
    assert any(max(lengths) > 1 for *_, lengths, _tokens, _bonus in steps), "nothing was accepted"
    assert len(list(tmp_path.glob("drafter-*"))) == 1, "one rank drafts"
