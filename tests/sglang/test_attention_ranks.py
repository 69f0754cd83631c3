"""DP attention: two attention ranks of one model with experts draft for requests of their own, in the same steps.

python -m tests.sglang.test_attention_ranks MODEL FOLDER asks such an engine, of which the second rank then fails;
FOLDER is for what each rank writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lib.servers import free_port
from tests.sglang.conftest import give_up, ids, sglang_engine
from tests.sglang.test_tensor_parallel import BINDING, CORES, steps
from tests.support.models import VOCAB_SIZE, save, tiny_model
from tests.support.pages import sums
from tests.support.prompts import random_ids

ROOT = Path(__file__).parents[2]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OPTIONS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "max_running_requests": 8}  # four of each rank
OPTIONS |= {"enable_deterministic_inference": True, "disable_radix_cache": True, "skip_tokenizer_init": True}
GIVEN = [(prompt * 12)[:100] for prompt in random_ids((5, 8, 11, 16), VOCAB_SIZE)]
LONG = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
SEEDED = LONG | {"temperature": 0.9, "top_k": 20}
ONE_LEAVES = [LONG, LONG | {"max_new_tokens": 5}] * 4  # requests take turns with the ranks
pytestmark = [pytest.mark.extended, pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")]


@contextmanager
def attention_ranks(model, folder, **given):
    """An engine with two attention ranks, each of which writes what it verifies into the folder."""
    env = {"TREE_TEST_RANKS": str(folder), "SGLANG_CPU_OMP_THREADS_BIND": BINDING, "TREE_TEST_ATTENTION_RANKS": "1"}
    env |= {"TORCHDYNAMO_DISABLE": "1", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"} | given.pop("env", {})
    with sglang_engine(model, env=env, port=free_port(), **OPTIONS, **given) as engine:  # SGLang keeps the last one's
        yield engine


def answers(engine):
    """To eight requests; to some of which one rank has all that last; to seeded ones; to one, and to three."""
    seeds = [SEEDED | {"sampling_seed": seed} for seed in range(8)]
    asked = [(GIVEN * 2, [LONG] * 8), (GIVEN * 2, ONE_LEAVES), (GIVEN * 2, seeds), (GIVEN[:1], [LONG])]
    asked.append((GIVEN[1:], [LONG] * 3))
    return [ids(engine.generate(input_ids=prompts, sampling_params=sampling)) for prompts, sampling in asked]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model, and what two attention ranks answer without us."""
    folder = save(tiny_model("Qwen3Moe", seed=1, **EXPERTS), tmp_path_factory.mktemp("experts"))
    with attention_ranks(folder, "") as engine:
        return folder, answers(engine)


def test_two_attention_ranks_with_their_experts_apart(served, tmp_path):
    """Answers, aborts, metrics of each rank; and in every step the same number of nodes for all."""
    folder, expected = served
    assert len({*map(tuple, expected[2])}) > 4, "seeds are not heeded"
    port = free_port()  # the second rank takes the next one
    env = {"FREEDRAFT_METRICS_PORT": str(port), "FREEDRAFT_POLICY": "auto"}
    with attention_ranks(folder, tmp_path, env=env, ep_size=2, speculative_algorithm="sssd") as engine:
        assert answers(engine) == expected
        before = [len(steps(tmp_path, rank)) for rank in range(2)]
        assert ids(engine.generate(input_ids=GIVEN[:1], sampling_params=[LONG])) == expected[3]
        after = [len(steps(tmp_path, rank)) for rank in range(2)]
        assert 0 in [new - old for new, old in zip(after, before, strict=True)], "no rank was without requests"
        engine.loop.run_until_complete(give_up(engine, GIVEN * 2, LONG | {"max_new_tokens": 200}, leaving=6))
        assert answers(engine)[0] == expected[0]
        for rank in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=10) as page:
                found = sums(page.read().decode())
            assert found["freedraft_draft_tokens_total"] > 0 == found["freedraft_failures_total"]
    for rank in range(2):
        verified = steps(tmp_path, rank)
        assert {len(tokens[0]) for tokens, *_ in verified} == {4}, "a step of another width"
        assert any(max(lengths) > 1 for *_, lengths, _tokens in verified), "nothing was accepted"
        assert max(len(tokens) for tokens, *_ in verified) == 4
    assert len(list(tmp_path.glob("drafter-*"))) == 2, "each rank drafts"


def test_a_rank_that_fails_ends_the_engine(served, tmp_path):
    """With all experts on both ranks, and the other one in the midst of a step."""
    folder, expected = served
    command = [sys.executable, "-m", "tests.sglang.test_attention_ranks", str(folder), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    log = done.stdout + done.stderr
    assert done.returncode != 0 and "answered" not in done.stdout, log[-20000:]
    found = [line.removeprefix("answers ") for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert [json.loads(line) for line in found] == [expected], log[-20000:]
    assert "this rank fails on purpose" in log, log[-20000:]


if __name__ == "__main__":
    with attention_ranks(Path(sys.argv[1]), Path(sys.argv[2]), speculative_algorithm="sssd") as ENGINE:
        print("answers", json.dumps(answers(ENGINE)), flush=True)
        ENGINE.generate(input_ids=GIVEN[:2], sampling_params=LONG, rid=["stays", "ends1"])
        print("answered", flush=True)
