"""Two tensor-parallel ranks: they verify the same trees with the same outcome, and answer as one rank without us. And
two data-parallel replicas."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lib.servers import free_port
from tests.sglang.conftest import GREEDY, ids, read_counts, sglang_engine, token_ids
from tests.support.conformance import PROMPTS as TOKEN_PROMPTS
from tests.support.conformance import make_model
from tests.support.models import continuations
from tests.support.pages import sums
from tests.support.prompts import REPETITIVE as PROMPTS

ROOT = Path(__file__).parents[2]
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
BINDING = "|".join(map(str, CORES[:2]))  # without it SGLang wants a NUMA node for each rank
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain(tiny):
    return continuations(tiny, token_ids(tiny, PROMPTS[:4]), 40)


def abort_one(engine, given):
    """Two clients, of which one goes away."""
    name = "prompt" if isinstance(given[0], str) else "input_ids"

    async def run():
        going = [
            asyncio.create_task(
                engine.async_generate(**{name: p}, sampling_params=GREEDY | {"max_new_tokens": 300}, rid=f"going-{i}")
            )
            for i, p in enumerate(given)
        ]
        await asyncio.sleep(1.0)
        engine.tokenizer_manager.abort_request(rid="going-0")
        await asyncio.gather(*going, return_exceptions=True)

    engine.loop.run_until_complete(run())


@contextmanager
def two_ranks(model, folder, **given):
    """An engine on two ranks, each of which writes what it verifies into the folder."""
    env = {"TREE_TEST_RANKS": str(folder), "SGLANG_CPU_OMP_THREADS_BIND": BINDING} | given.pop("env")
    with sglang_engine(model, env=env, tp_size=2, **given) as engine:
        yield engine


def steps(folder, rank=0):
    """What each step verified: tokens, parents, depths, counts, accepted, lengths, new tokens."""
    paths = sorted(folder.glob("steps-*"))
    return [json.loads(line) for line in paths[rank].read_text().splitlines()] if paths else []


def test_two_ranks(tiny, plain, tmp_path):
    env = {"FREEDRAFT_LIVE": "store", "FREEDRAFT_ISOLATION": "shared"}
    with two_ranks(tiny, tmp_path, env=env, speculative_algorithm="sssd_cycle") as engine:
        assert ids(engine.generate(PROMPTS[:4], GREEDY)) == plain
        assert not (tmp_path / "shared").exists(), "greedy outcomes are broadcast"
        engine.generate(PROMPTS[:4], SAMPLED)
        assert (tmp_path / "shared").exists(), "sampled outcomes are not broadcast"
        abort_one(engine, PROMPTS[:2])
        # The drafter raises on the rank that drafts; the others wait for its trees.
        assert ids(engine.generate(PROMPTS[:4], GREEDY, rid=[f"broken-{i}" for i in range(4)])) == plain
        assert ids(engine.generate(PROMPTS[:4], GREEDY)) == plain
    verified = steps(tmp_path)
    assert verified == steps(tmp_path, 1), "ranks disagree"
    assert len({len(tokens[0]) for tokens, *_ in verified}) >= 4, "the width did not change"
    assert any(max(lengths) > 1 for *_, lengths, _tokens in verified), "nothing was accepted"
    assert len(list(tmp_path.glob("drafter-*"))) == 1, "one rank drafts"


@pytest.fixture(scope="module")
def llama(demo_model, tmp_path_factory):
    """A model with skip sets, prompts that repeat themselves, and what it answers."""
    each_rank_has_one = {"num_key_value_heads": 2}
    folder, given = make_model(tmp_path_factory.mktemp("llama"), demo_model, **each_rank_has_one), TOKEN_PROMPTS[-4:]
    return folder, given, continuations(folder, given, GREEDY["max_new_tokens"])


def skipping(folder, *names, **more):
    return {"FREEDRAFT_SKIP_SET": ",".join(str(folder / f"{name}.json") for name in names)} | more


@pytest.mark.extended
def test_two_ranks_do_the_same_draft_passes(llama, tmp_path):
    """Without skipping anything they draft what they verify, which shows whatever is wrong with a pass."""
    folder, given, expected = llama
    more = {"FREEDRAFT_LOOKAHEAD": "fixed", "FREEDRAFT_LENGTH": "3", "FREEDRAFT_SHAPE": "chain"}
    env = skipping(folder, "empty", "weak", **more)
    with two_ranks(folder, tmp_path, env=env, speculative_algorithm="layerskip", skip_tokenizer_init=True) as engine:

        def ask(skip_set, word):
            """How many draft tokens were verified, and how many accepted."""
            before = len(steps(tmp_path))
            sampling = GREEDY | {"custom_params": {"skip_set": skip_set}}
            rids = [f"{word}-{i}" for i in range(len(given))]
            assert ids(engine.generate(input_ids=given, sampling_params=sampling, rid=rids)) == expected
            new = steps(tmp_path)[before:]
            drafted = sum(sum(counts) - len(counts) for _, _, _, counts, *_ in new)
            return drafted, sum(sum(lengths) - len(lengths) for *_, lengths, _tokens in new)

        # Of 4 x 39 tokens three of four are drafts, where all of them are accepted.
        drafted, accepted = ask("empty", "whole")
        assert drafted == accepted > 110
        drafted, accepted = ask("weak", "part")
        assert drafted > accepted > drafted // 3
        abort_one(engine, given[:2])
        # The second rank cannot do these passes: there are none, then none for a while, and then there are again.
        assert ask("empty", "broken") == (0, 0)
        found = [ask("empty", "paused") for _ in range(3)]
        assert all(drafted == accepted for drafted, accepted in found)
        assert found[-1][0] > 110
    assert steps(tmp_path) == steps(tmp_path, 1), "ranks disagree"


@pytest.mark.extended
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_the_midst_of_a_pass_ends_the_engine(llama, tmp_path, rank):
    """The others wait for it in the layers; what it would send next, they would take for a part of the pass."""
    command = [sys.executable, "-m", "tests.sglang.ending_rank", str(llama[0]), str(tmp_path), str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    log = done.stdout + done.stderr
    assert done.returncode != 0 and "ready" in done.stdout and "answered" not in done.stdout, log[-20000:]
    assert "this rank failed during a draft pass" in log, log[-20000:]


@pytest.mark.extended
def test_two_ranks_of_the_hybrid_method(llama, tmp_path):
    """Draft passes for requests at random, over a part of the KV cache."""
    folder, given, expected = llama
    more = {"FREEDRAFT_POLICY": "auto", "FREEDRAFT_SCORING": "learned", "FREEDRAFT_WINDOW": "32"}
    env, counts = skipping(folder, "weak", "mixed", **more), tmp_path / "counts"
    with two_ranks(
        folder, tmp_path, counts=counts, env=env, speculative_algorithm="any", skip_tokenizer_init=True
    ) as engine:
        for _ in range(3):
            assert ids(engine.generate(input_ids=given, sampling_params=GREEDY)) == expected
    done = read_counts(counts)
    assert min(done["of passes"], done["of n-grams"]) > 0
    assert steps(tmp_path) == steps(tmp_path, 1), "ranks disagree"


@pytest.mark.extended
def test_two_replicas(tiny, plain, tmp_path):
    """Each has metrics of its own, and one of them writes what is learnt."""
    port = free_port()  # the second replica takes the next one
    env = {"FREEDRAFT_METRICS_PORT": str(port), "SGLANG_CPU_OMP_THREADS_BIND": BINDING}
    env |= {"FREEDRAFT_LIVE": "store", "FREEDRAFT_DATASTORE": str(tmp_path / "store")}
    with sglang_engine(tiny, env=env, speculative_algorithm="sssd", dp_size=2) as engine:
        for _ in range(2):
            assert ids(engine.generate(PROMPTS[:4], GREEDY)) == plain
        for replica in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + replica}/metrics", timeout=10) as page:
                found = sums(page.read().decode())
            assert found["freedraft_draft_tokens_total"] > 0 == found["freedraft_failures_total"]
