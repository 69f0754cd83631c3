"""Two tensor-parallel ranks: they verify the same trees with the same outcome, and answer as one rank without us."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.sglang.conftest import sglang_engine
from tests.support.prompts import REPETITIVE as PROMPTS

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True}


def ids(outputs):
    return [output["output_ids"] for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny):
    with sglang_engine(tiny) as engine:
        return ids(engine.generate(PROMPTS[:4], GREEDY))


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


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sync"])
def test_two_ranks(tiny, plain, tmp_path, overlap):
    options = {"speculative_algorithm": "sssd_cycle", "tp_size": 2, "disable_overlap_schedule": not overlap}
    env = {"TREE_TEST_RANKS": str(tmp_path), "FREEDRAFT_LIVE": "true"}
    with sglang_engine(tiny, env=env, **options) as engine:
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
