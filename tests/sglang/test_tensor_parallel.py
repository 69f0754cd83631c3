"""Two tensor-parallel ranks: they verify the same trees with the same outcome, and answer as one rank without us. And
two data-parallel replicas.

python -m tests.sglang.test_tensor_parallel MODEL FOLDER RANK asks an engine on two ranks, of which this one fails in
the midst of a draft pass; FOLDER is for what each rank writes.
"""

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lib.servers import free_port
from tests.sglang.conftest import GREEDY, give_up, ids, read_counts, sglang_engine
from tests.support.conformance import PROMPTS, make_model
from tests.support.models import VOCAB_SIZE, continuations, save, tiny_model
from tests.support.pages import sums
from tests.support.prompts import random_ids

ROOT, GIVEN = Path(__file__).parents[2], PROMPTS[-4:]
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
BINDING = "|".join(map(str, CORES[:2]))  # without it SGLang wants a NUMA node for each rank
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def llama(demo_model, tmp_path_factory):
    """A model with skip sets, and what it answers to prompts that repeat themselves."""
    folder = make_model(tmp_path_factory.mktemp("llama"), demo_model, num_key_value_heads=2)  # one of each rank
    return folder, continuations(folder, GIVEN, GREEDY["max_new_tokens"])


def ask(engine, word="asked", sampling=GREEDY, **extra):
    """Tokens of the answers to requests whose ids begin with this word; extra: for the drafter."""
    rids = [f"{word}-{i}" for i in range(len(GIVEN))]
    return ids(engine.generate(input_ids=GIVEN, sampling_params=sampling | {"custom_params": extra}, rid=rids))


def abort_one(engine):
    """Two clients, of which one goes away."""
    engine.loop.run_until_complete(give_up(engine, GIVEN[:2], GREEDY | {"max_new_tokens": 100}, leaving=1))


@contextmanager
def two_ranks(model, folder, **given):
    """An engine on two ranks, each of which writes what it verifies into the folder."""
    env = {"TREE_TEST_RANKS": str(folder), "SGLANG_CPU_OMP_THREADS_BIND": BINDING} | given.pop("env")
    with sglang_engine(model, env=env, tp_size=2, skip_tokenizer_init=True, **given) as engine:
        yield engine


def steps(folder, rank=0):
    """What each step verified: tokens, parents, depths, counts, accepted, lengths, new tokens."""
    paths = sorted(folder.glob("steps-*"))
    return [json.loads(line) for line in paths[rank].read_text().splitlines()] if paths else []


@pytest.mark.extended
def test_two_ranks(llama, tmp_path):
    env = {"FREEDRAFT_LIVE": "store", "FREEDRAFT_ISOLATION": "shared"}
    folder, expected = llama
    with two_ranks(folder, tmp_path, env=env, speculative_algorithm="sssd_cycle") as engine:
        assert ask(engine) == expected
        assert not (tmp_path / "shared").exists(), "greedy outcomes are broadcast"
        ask(engine, sampling=SAMPLED)
        assert (tmp_path / "shared").exists(), "sampled outcomes are not broadcast"
        abort_one(engine)
        # The drafter raises on the rank that drafts; the others wait for its trees.
        assert ask(engine, "broken") == ask(engine) == expected
    verified = steps(tmp_path)
    assert verified == steps(tmp_path, 1), "ranks disagree"
    assert len({len(tokens[0]) for tokens, *_ in verified}) >= 4, "the width did not change"
    assert any(max(lengths) > 1 for *_, lengths, _tokens in verified), "nothing was accepted"
    assert len(list(tmp_path.glob("drafter-*"))) == 1, "one rank drafts"


def skipping(folder, *names, **more):
    return {"FREEDRAFT_SKIP_SET": ",".join(str(folder / f"{name}.json") for name in names)} | more


@pytest.mark.extended
def test_two_ranks_do_the_same_draft_passes(llama, tmp_path):
    """Without skipping anything they draft what they verify, which shows whatever is wrong with a pass."""
    folder, expected = llama
    more = {"FREEDRAFT_LOOKAHEAD": "fixed", "FREEDRAFT_LENGTH": "3", "FREEDRAFT_SHAPE": "chain"}
    env = skipping(folder, "empty", "weak", **more)
    with two_ranks(folder, tmp_path, env=env, speculative_algorithm="layerskip") as engine:

        def counted(skip_set, word):
            """How many draft tokens were verified, and how many accepted."""
            before = len(steps(tmp_path))
            assert ask(engine, word, skip_set=skip_set) == expected
            new = steps(tmp_path)[before:]
            drafted = sum(sum(counts) - len(counts) for _, _, _, counts, *_ in new)
            return drafted, sum(sum(lengths) - len(lengths) for *_, lengths, _tokens in new)

        # Of 4 x 39 tokens three of four are drafts, where all of them are accepted.
        drafted, accepted = counted("empty", "whole")
        assert drafted == accepted > 110
        drafted, accepted = counted("weak", "part")
        assert drafted > accepted > drafted // 3
        abort_one(engine)
        # The second rank cannot do these passes: there are none, then none for a while, and then there are again.
        assert counted("empty", "broken") == (0, 0)
        found = [counted("empty", "paused") for _ in range(3)]
        assert all(drafted == accepted for drafted, accepted in found)
        assert found[-1][0] > 110
    assert steps(tmp_path) == steps(tmp_path, 1), "ranks disagree"


@pytest.mark.extended
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.rare), 1])
def test_a_rank_that_fails_in_the_midst_of_a_pass_ends_the_engine(llama, tmp_path, rank):
    """The others wait for it in the layers; what it would send next, they would take for a part of the pass."""
    command = [sys.executable, "-m", "tests.sglang.test_tensor_parallel", str(llama[0]), str(tmp_path), str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    log = done.stdout + done.stderr
    assert done.returncode != 0 and "ready" in done.stdout and "answered" not in done.stdout, log[-20000:]
    assert "this rank failed during a draft pass" in log, log[-20000:]


@pytest.mark.extended
def test_two_ranks_of_n_grams_on_top_of_draft_passes(llama, tmp_path):
    """Passes over a part of the KV cache; n-grams of answers that were learnt."""
    folder, expected = llama
    more = {"FREEDRAFT_WINDOW": "32", "FREEDRAFT_LOOKAHEAD": "fixed", "FREEDRAFT_POLICY": "fixed"}
    more |= {"FREEDRAFT_LENGTH": "2", "FREEDRAFT_LIVE": "store", "FREEDRAFT_ISOLATION": "shared"}
    env, counts = skipping(folder, "weak", "mixed", **more), tmp_path / "counts"
    with two_ranks(folder, tmp_path, counts=counts, env=env, speculative_algorithm="sssd+layerskip") as engine:
        for _ in range(3):
            assert ask(engine) == expected
    done = read_counts(counts)
    assert min(done["of passes"], done["of n-grams"]) > 0
    assert steps(tmp_path) == steps(tmp_path, 1), "ranks disagree"


@pytest.mark.extended
def test_experts_of_two_ranks(tmp_path):
    """Each has half of them."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = save(tiny_model("Qwen3Moe", seed=5, **experts), tmp_path / "model")
    given, env = random_ids((5, 23, 40, 12), VOCAB_SIZE), {"FREEDRAFT_LIVE": "store"}
    expected = continuations(model, given, GREEDY["max_new_tokens"])
    with two_ranks(model, tmp_path, env=env, speculative_algorithm="sssd", ep_size=2) as engine:
        for _ in range(2):
            assert ids(engine.generate(input_ids=given, sampling_params=GREEDY)) == expected
    assert sum(sum(lengths) - len(lengths) for *_, lengths, _tokens in steps(tmp_path)) > 100
    assert steps(tmp_path) == steps(tmp_path, 1), "ranks disagree"


@pytest.mark.extended
def test_two_replicas(llama, tmp_path):
    """Each has metrics of its own, and one of them writes what is learnt."""
    port = free_port()  # the second replica takes the next one
    env = {"FREEDRAFT_METRICS_PORT": str(port), "SGLANG_CPU_OMP_THREADS_BIND": BINDING}
    env |= {"FREEDRAFT_LIVE": "store", "FREEDRAFT_DATASTORE": str(tmp_path / "store")}
    folder, expected = llama
    options = {"speculative_algorithm": "sssd", "dp_size": 2, "skip_tokenizer_init": True}
    with sglang_engine(folder, env=env, **options) as engine:
        for number in range(2):
            assert ask(engine, str(number)) == expected
        for replica in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + replica}/metrics", timeout=10) as page:
                found = sums(page.read().decode())
            assert found["freedraft_draft_tokens_total"] > 0 == found["freedraft_failures_total"]


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    ENVIRONMENT = skipping(FOLDER, "empty", FREEDRAFT_LOOKAHEAD="fixed", FREEDRAFT_LENGTH="3")
    with two_ranks(FOLDER, Path(sys.argv[2]), env=ENVIRONMENT, speculative_algorithm="layerskip") as ENGINE:
        print("ready", flush=True)
        ask(ENGINE, f"ends{sys.argv[3]}")
        print("answered", flush=True)
