"""Data-parallel ranks that share experts, on model runner V2: one draft length for all of them."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
from test_vllm_start import config_of
from v2_engines import FOLDER, ROOT
from vllm_server import client_of, get, server_of

from bench.lib import servers
from freedraft.engines.hooks import check
from freedraft.engines.vllm.context import configured
from freedraft.engines.vllm.hooks import RANKS_HOOKS
from tests.support.model_classes import save_config
from tests.support.models import continuations, save, tiny_model
from tests.support.pages import sums
from tests.support.prompts import random_ids
from tests.support.waiting import wait_until

SCHEDULE = "num_speculative_tokens_per_batch_size"
AUTO = {"method": "sssd", "policy": "auto", "live": "store", "isolation": "shared"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Heads of 64, which vLLM's CPU attention has.
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
TOKENS = 24
PROMPTS = random_ids([12] * 4, 500, first=2, seed=3)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def test_ranks_keep_their_lengths(tmp_path, monkeypatch):
    """Where the user asks for it, of ranks with processes of their own."""
    assert check(RANKS_HOOKS) == []
    save_config("Mixtral", tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = partial(config_of, tmp_path, data_parallel_size=2)
    auto = config(AUTO | {"hardware": "h100"})
    assert configured(auto).lengths == (0, 1, 3) and getattr(auto.speculative_config, SCHEDULE)
    others = {"policy": "fixed"}, {"policy": None}, {SCHEDULE: [(1, 4, 3), (5, 64, 0)]}
    for other in [*others, *({"policy": None} | other for other in others)]:
        given = config({key: value for key, value in (AUTO | other).items() if value})
        assert configured(given).lengths == () and not getattr(given.speculative_config, SCHEDULE)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert configured(config(AUTO)).lengths == ()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert configured(config(AUTO)).lengths == ()


@pytest.mark.parametrize(("size", "most"), [(2, 18), (8, 8), (64, 4), (128, 3), (256, 2), (2000, 1), (50000, 0)])
def test_votes_fit_what_vllm_adds_up(size, most):
    """The shortest length wins. A rank without freedraft, which adds 1, is recognised."""
    from freedraft.engines.vllm.v2.lengths import shortest, vote, votes_fit

    assert [n for n in range(31) if votes_fit(n, size)] == [*range(1, most + 1)]
    for index in range(most):
        for longer in range(index, most):
            votes = vote(index, size) + (size - 1) * vote(longer, size)
            assert votes + 1 < 2**31 and shortest(votes, size) == index and shortest(votes + 1, size) == -1


def test_votes_say_what_vllm_asks(monkeypatch):
    """By its own sum over ranks, of two here: whether one has requests left."""
    from datetime import timedelta

    from torch.distributed import HashStore
    from vllm.config import ParallelConfig
    from vllm.distributed import utils

    from freedraft.engines.vllm.v2.lengths import vote

    monkeypatch.setattr(utils, "suppress_stdout", nullcontext)  # which is not for two threads
    store = HashStore()

    def rank(number):
        limit = {"group_size": 2, "timeout": timedelta(seconds=60)}
        group = utils.init_gloo_process_group(prefix_store=store, group_rank=number, **limit)
        found = []
        for votes in ((1, 3), (3, None), (None, None)):
            left = votes[number] is not None and vote(votes[number], 2)
            found.append(ParallelConfig().sync_dp_state(group, left, False))
        utils.stateless_destroy_torch_distributed_process_group(group)
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(rank, range(2)):
            assert found == [(True, False), (True, False), (False, False)]


def server(model, log, *flags, speculative=None):
    """A server that interprets kernels, and notes its steps in the folder of its log."""
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--dp-sync-interval", "4", *flags]
    made = server_of(model, log, speculative, "--skip-tokenizer-init", *flags)
    made.env |= {"SERVED_AS_ON_GPUS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "SPLIT_EXPERTS": "1"}
    made.env |= {"PREFERRED": str(log.parent), "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2]))}
    made.env["VLLM_CPU_SIM_MULTI_NUMA"] = "0"  # else the second rank is to have memory of its own
    made.env["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return made


def prefer(folder, *lengths):
    (folder / "new").write_text(json.dumps(lengths))
    (folder / "new").rename(folder / "preferred.json")


def ask(port, prompt, tokens=TOKENS, temperature=0.0):
    asked = {"model": servers.MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 5}
    body = {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    return client_of(port).completions.create(**asked, extra_body=body).choices[0].token_ids


def noted(folder, name, rank, since=0):
    path = folder / f"{name}-{rank}.jsonl"  # from the first step on
    return [json.loads(line) for line in path.read_text().splitlines()[since:]] if path.exists() else []


def lengths(folder):
    """To draft, of each rank, by wave and number of its steps but a wave's first, before which ranks do not meet."""
    return [{(wave, n): k for _, wave, n, _, k in noted(folder, "steps", rank) if n} for rank in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_model("Qwen3Moe", seed=7, **SHAPE | EXPERTS), tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def said(model):
    return continuations(model, PROMPTS, TOKENS)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.extended
def test_all_ranks_draft_one_length(model, said, tmp_path, record_property):
    """The shortest that one of them prefers, also while one is idle; when one dies, all end, as without drafts."""
    made = server(model, tmp_path / "server.log", speculative=AUTO)

    def answers(prompts, mapped, *preferred):
        """They are the model's. Returns each rank's forwards meanwhile."""
        if preferred:
            prefer(tmp_path, *preferred)
        before = [len(noted(tmp_path, "forwards", rank)) for rank in range(2)]
        assert [*mapped(partial(ask, made.port), PROMPTS[:prompts])] == said[:prompts]
        wait_until(lambda: len({*map(len, map(partial(noted, tmp_path, "forwards"), range(2)))}) == 1)
        return [noted(tmp_path, "forwards", rank, since) for rank, since in enumerate(before)]

    with servers.running(made), ThreadPoolExecutor(4) as pool:
        answers(4, pool.map)
        learnt = lengths(tmp_path)
        together = answers(4, pool.map, [3, 0], [3, 1])
        alone = answers(4, map, [3, 0], [3, 1])
        answers(1, map, [0], [0])
        found, page = lengths(tmp_path), sums(get(made.port, "/metrics"))
        os.kill(noted(tmp_path, "steps", 1)[0][0], signal.SIGKILL)
        made.process.wait(120)
    assert "EngineDeadError" in made.log.read_text()
    record_property("lengths", sorted({*learnt[0].values()}))
    for each in (learnt, found):
        both = each[0].keys() & each[1].keys()
        assert len(both) > 0.8 * len(each[0]) and all(each[0][step] == each[1][step] for step in both)
    assert {*found[0].values()} >= {0, 3}
    assert page["vllm:spec_decode_num_accepted_tokens_total"] > 10, "asked again by a rank that has answered"
    for rank in range(2):  # tokens per request on which all agreed, which a CUDA graph needs: of most forwards
        in_each = [[agreed for *_, agreed in phase[rank]] for phase in (together, alone)]
        assert all(agreed.count(None) < 0.3 * len(agreed) for agreed in in_each)
        assert {1, 2} & {*in_each[0]} and 4 in in_each[1]
        assert [*found[rank].values()][-9:] == [0] * 9, "beside an idle rank"


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.extended
@pytest.mark.rare
def test_a_rank_without_freedraft(model, said, tmp_path):
    """Each rank is a server that was started by itself: one line says so, and nothing waits."""
    shared = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(servers.free_port())]
    ours = server(model, tmp_path / "ours.log", "--data-parallel-rank", "0", *shared, speculative=AUTO)
    plain = server(model, tmp_path / "plain.log", "--data-parallel-rank", "1", *shared)
    for made, core in zip((ours, plain), CORES, strict=False):
        made.env["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    prefer(tmp_path, [3], [3])
    with servers.running(ours, plain), ThreadPoolExecutor(4) as pool:
        drafted = []
        for ports in ([ours.port] * 2, [plain.port] * 2 + [ours.port] * 2, [ours.port] * 2):
            since = len(lengths(tmp_path)[0])
            assert [*pool.map(ask, ports, PROMPTS)] == said[: len(ports)]
            drafted.append([*lengths(tmp_path)[0].values()][since:])
        drawn = [[ask(made.port, prompt, temperature=0.7) for prompt in PROMPTS[:2]] for made in (plain, ours, ours)]
    assert drawn[0] == drawn[1] == drawn[2]
    alone, beside, again = drafted
    assert 0 not in alone and beside.count(0) > 0.7 * len(beside) and again.count(3) > 0.5 * len(again)
    assert ours.log.read_text().count("no drafts beside a rank") == 1
