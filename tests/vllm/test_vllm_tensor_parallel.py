"""Two tensor-parallel ranks, one core each, on both model runners: the answers are those of one rank without us. Also
two stages of a pipeline, and a server of two data-parallel replicas."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from transformers import AutoTokenizer
from v2_engines import FOLDER, ROOT, start
from vllm_cases import two_skip_sets
from vllm_server import TOKENS, clients_that_go_away, complete, metric, metrics, serving

from tests.support.built_head import save_on_top
from tests.support.models import continuations, save, tiny_model
from tests.support.prompts import SHORT, random_ids

SSSD = {"method": "sssd", "num_speculative_tokens": 3, "policy": "fixed", "live": "store", "isolation": "shared"}
PROMPTS = random_ids([12] * 4, 500, first=2, seed=3)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
# Heads of 64, which vLLM's CPU attention has, and enough of them for two ranks.
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_model(seed=7, **SHAPE), tmp_path_factory.mktemp("ranks"))


def run(model, ranks, changed, **given):
    """ranks.py in an environment with these changes."""
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:ranks]))}
    return start("ranks.py", model, ranks, json.dumps(given | {"prompts": PROMPTS}), **binding | changed)


def answers(model, ranks, changed, **given):
    if "VLLM_USE_V2_MODEL_RUNNER" in changed:
        pytest.importorskip("triton")
    done = run(model, ranks, changed, **given)
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]  # engines log there, too
    return json.loads(line)


@pytest.fixture(scope="module")
def plain(model):
    return continuations(model, PROMPTS, 30)


# Triton's interpreter stands in for a compiler; inductor, which vLLM compiles the embedding with, needs a real one.
INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TORCH_COMPILE_DISABLE": "1"}
TREES = INTERPRETED | {"INTERPRETED_ATTENTION": "triton"}
STAGES = INTERPRETED | {"SERVED_AS_ON_GPUS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
BY_SCORE = INTERPRETED | {"INTERPRETED_ATTENTION": "flash", "ADAPTIVE": "1"}


@pytest.mark.parametrize(
    "changed",
    [{}, *(pytest.param(changed, marks=pytest.mark.extended) for changed in (TREES, BY_SCORE))],
    ids=["V1", "V2, trees", "V2, by score"],
)
def test_two_ranks_answer_as_one_does_plainly(model, plain, changed):
    found = answers(model, 2, changed, speculative_config=SSSD)
    assert found["answers"] == [plain, plain]
    assert found["accepted"] > (40 if "ADAPTIVE" in changed else 60), "the second time, from what was learnt"


@pytest.mark.extended
def test_two_stages_of_a_pipeline(model, plain):
    """Steps hold two requests, so that two are on their way at a time."""
    found = answers(model, 2, STAGES, speculative_config=SSSD, stages=2, max_num_batched_tokens=32)
    assert found["answers"] == [plain, plain]
    assert found["accepted"] > 40, "the second time, from what was learnt"


@pytest.mark.extended
def test_two_ranks_draw_as_one_does_plainly(model):
    plain = answers(model, 1, {}, temperature=0.7)["answers"]
    found = answers(model, 2, {}, temperature=0.7, speculative_config=SSSD)
    assert found["answers"] == plain
    assert found["accepted"] > 40, "the second time they are drafted from what was learnt"


@pytest.mark.extended
@pytest.mark.parametrize("changed", [{}, pytest.param(INTERPRETED, marks=pytest.mark.rare)], ids=["V1", "V2"])
def test_experts_of_two_ranks(changed, tmp_path):
    """Each has half of them. vLLM's kernel for CPUs knows no other experts than a rank's own."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = save(tiny_model("Qwen3Moe", seed=7, **SHAPE | experts), tmp_path)
    changed = {"SPLIT_EXPERTS": "1"} | changed
    found = answers(model, 2, changed, speculative_config=SSSD, enable_expert_parallel=True)
    assert found["answers"] == 2 * [continuations(model, PROMPTS, 30)]
    assert found["accepted"] > 60


@pytest.fixture(scope="module")
def layerskip(model, tmp_path_factory):
    """A method whose first set skips nothing, which some requests get, and whose second one something."""
    return two_skip_sets(model, tmp_path_factory.mktemp("skip_sets"))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changed", "accepted"),
    [
        pytest.param({}, range(111, 999), marks=pytest.mark.rare),
        (INTERPRETED, range(111, 999)),
        ({"FAILING": "ready 7 1"}, range(21, 999)),
        pytest.param({"FAILING": "model 1 1"}, [0], marks=pytest.mark.rare),
    ],
    ids=["V1", "V2", "a rank that fails", "a rank without a draft model"],
)
def test_two_ranks_do_the_same_draft_passes(model, plain, layerskip, changed, accepted):
    """Without skipping anything both ranks draft what both verify; a rank that cannot ends drafting for a while, and
    one without a draft model for all."""
    found = answers(model, 2, changed, speculative_config=layerskip, skip_sets=["empty", "some", "empty", "empty"])
    assert found["answers"] == [plain, plain]
    # Of 4 x 29 tokens, twice: three of four where everything is accepted.
    assert found["accepted"] in accepted


@pytest.mark.extended
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.rare), 1])
def test_a_rank_that_fails_in_the_midst_of_a_pass_ends_the_engine(model, layerskip, rank):
    """The others wait for it in the layers; what it would send next, they would take for a part of the pass."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "FAILING": f"pass 7 {rank}"}
    done = run(model, 2, own, speculative_config=layerskip)
    log = done.stdout + done.stderr
    assert done.returncode != 0 and "EngineDeadError" in log, log[-20000:]
    assert log.count("this rank failed during a draft pass") >= 1


def test_a_search_on_several_ranks_is_refused(model):
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "layerskip", "num_speculative_tokens": 3, "selection": "swift"}
    with pytest.raises(ValueError, match=r"selection 'swift'.*rank"):
        EngineArgs(str(model), tensor_parallel_size=2, speculative_config=given).create_engine_config()


@pytest.mark.extended
@pytest.mark.rare
def test_two_data_parallel_replicas(demo_model, tmp_path):
    """Each serves its metrics at a port of its own and learns, into one folder."""
    model = save(tiny_model(seed=7, **SHAPE | {"vocab_size": 49152}), tmp_path / "model", demo_model)
    replicas, speculative = ("--data-parallel-size", "2"), SSSD | {"datastore": str(tmp_path / "store")}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2])), "VLLM_USE_AOT_COMPILE": "0"}
    with serving(model, tmp_path, speculative, *replicas, drafters=2, **environment) as server:
        clients_that_go_away(server, SHORT[:4], rounds=3)
        assert min(metrics(server, "freedraft_draft_tokens_total")) > 0, "both draft"
    assert sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file()) > 0
    with serving(model, tmp_path, speculative, *replicas, drafters=2, **environment) as server:
        before = metric(server, "freedraft_accepted_tokens_total")
        assert complete(server.port, SHORT[0]) and metric(server, "freedraft_accepted_tokens_total") > before


@pytest.mark.extended
def test_replicas_that_share_experts(demo_model, tmp_path):
    """Each steps with the other, also while it has no request: with as many draft tokens, of which few are the
    default."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "vocab_size": 49152}
    model = save(tiny_model("Qwen3Moe", seed=7, **SHAPE | experts), tmp_path / "model", demo_model)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2])), "VLLM_USE_AOT_COMPILE": "0"}
    environment |= {"SPLIT_EXPERTS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    flags, method = ("--data-parallel-size", "2", "--enable-expert-parallel"), {"method": "sssd", "policy": "fixed"}
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    said = continuations(model, [tokenizer(prompt)["input_ids"] for prompt in SHORT[:4]], TOKENS)
    with serving(model, tmp_path, method, *flags, drafters=2, **environment) as server:
        ask = partial(complete, server.port)
        for answer in (map, ThreadPoolExecutor(4).map):  # alone, while the other replica is idle, and together
            assert list(answer(ask, 2 * SHORT[:4])) == 2 * tokenizer.batch_decode(said)
        assert metric(server, "freedraft_accepted_tokens_total") > 20
        assert min(metrics(server, "freedraft_draft_tokens_total")) > 0, "both draft"
        assert "up to 3 draft tokens per request by default: ranks that share experts" in server.log.read_text()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "changed"),
    [("eagle", BY_SCORE), *(pytest.param(kind, INTERPRETED, marks=pytest.mark.rare) for kind in ("eagle3", "mtp"))],
    ids=["eagle, by score", "eagle3", "mtp"],
)
def test_n_grams_on_top_of_a_head(kind, changed, tmp_path):
    """Each rank has the head's drafts, and behind them n-grams of rank 0, which knows the answers the second time."""
    model, method = save_on_top(kind, tmp_path, 0.03, **SHAPE)
    found = answers(model, 2, changed, speculative_config=method)
    plain = answers(model, 1, INTERPRETED)["answers"] if kind == "mtp" else 2 * [continuations(model, PROMPTS, 30)]
    assert found["answers"] == plain
    assert 20 < found["at first"] < found["accepted"] - found["at first"] - 10
