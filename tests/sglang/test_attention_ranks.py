"""DP attention: two attention ranks of one model with experts draft for requests of their own, in the same steps.

python -m tests.sglang.test_attention_ranks MODEL FOLDER asks such an engine, with half of the experts on each rank, and
one rank fails in the end; FOLDER is for what each rank writes.
"""

import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lib.servers import free_port
from tests.sglang.conftest import give_up, ids, sglang_engine
from tests.sglang.test_tensor_parallel import BINDING, CORES, steps
from tests.support.models import VOCAB_SIZE, continuations, save, tiny_model
from tests.support.pages import sums
from tests.support.prompts import random_ids

ROOT = Path(__file__).parents[2]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OPTIONS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "max_running_requests": 8}  # four of each rank
OPTIONS |= {"enable_deterministic_inference": True, "disable_radix_cache": True, "skip_tokenizer_init": True}
GIVEN = [(prompt * 12)[:100] for prompt in random_ids((5, 8, 11, 16), VOCAB_SIZE)]
LONG = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
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


def answers(engine, **more):
    """To eight requests; with all that last on one rank; to seeded ones; to three."""
    seeds = [SEEDED | {"sampling_seed": seed} for seed in range(8)]
    asked = [(GIVEN * 2, [LONG] * 8), (GIVEN * 2, ONE_LEAVES), (GIVEN * 2, seeds), (GIVEN[1:], [LONG] * 3)]
    asked = [(prompts, [one | more for one in sampling]) for prompts, sampling in asked]
    return [ids(engine.generate(input_ids=prompts, sampling_params=sampling)) for prompts, sampling in asked]


def counts(folder):
    """Number of verified steps of each rank."""
    return [len(steps(folder, rank)) for rank in range(2)]


def test_two_attention_ranks(tmp_path):
    """Answers, aborts and metrics of each; in every step the same number of nodes for both; and the end of one."""
    folder = save(tiny_model("Qwen3Moe", seed=1, **EXPERTS), tmp_path / "experts")
    command = [sys.executable, "-m", "tests.sglang.test_attention_ranks", str(folder), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    log = (done.stdout + done.stderr)[-20000:]
    assert "this rank fails on purpose" in log and done.returncode != 0 and "answered" not in done.stdout, log
    (found,) = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    expected = found["plain"]
    assert expected[0] == continuations(folder, GIVEN * 2, LONG["max_new_tokens"])
    assert len({*map(tuple, expected[2])}) > 4, "seeds are not heeded"
    assert found["answers"] == expected and found["after aborts"] == expected[0]
    assert sorted(found["steps of one"])[0] == 0 < max(found["steps of one"]), "no rank was without requests"
    assert all(drafted > 0 == failures for drafted, failures in found["metrics"])
    for rank in range(2):
        verified = steps(tmp_path, rank)
        assert {len(tokens[0]) for tokens, *_ in verified} == {4}, "a step of another width"
        assert any(max(lengths) > 1 for *_, lengths, _tokens in verified), "nothing was accepted"
        assert max(len(tokens) for tokens, *_ in verified) == 4
    assert len(list(tmp_path.glob("drafter-*"))) == 2, "each rank drafts"


def drafting(engine, folder, port):
    """What is found of two ranks that draft."""
    found = {"plain": answers(engine, custom_params={"freedraft": "off"}), "answers": answers(engine)}
    before = counts(folder)
    engine.generate(input_ids=GIVEN[:1], sampling_params=[LONG])
    found["steps of one"] = [new - old for new, old in zip(counts(folder), before, strict=True)]
    engine.loop.run_until_complete(give_up(engine, GIVEN * 2, LONG | {"max_new_tokens": 200}, leaving=6))
    found["after aborts"] = ids(engine.generate(input_ids=GIVEN * 2, sampling_params=[LONG] * 8))
    urls = [f"http://127.0.0.1:{port + rank}/metrics" for rank in range(2)]
    pages = [sums(urllib.request.urlopen(url, timeout=10).read().decode()) for url in urls]
    found["metrics"] = [[page[f"freedraft_{name}_total"] for name in ("draft_tokens", "failures")] for page in pages]
    return found


if __name__ == "__main__":
    FOLDER, PORT = Path(sys.argv[2]), free_port()  # the second rank takes the next one
    SETTINGS = {"FREEDRAFT_METRICS_PORT": str(PORT), "FREEDRAFT_POLICY": "auto"}
    with attention_ranks(sys.argv[1], FOLDER, env=SETTINGS, ep_size=2, speculative_algorithm="sssd") as ENGINE:
        print("found", json.dumps(drafting(ENGINE, FOLDER, PORT)), flush=True)
        ENGINE.generate(input_ids=GIVEN[:2], sampling_params=LONG, rid=["stays", "ends"])
        print("answered", flush=True)
