"""Data-parallel ranks that share experts, on model runner V2: one draft length for all of them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from test_vllm_start import config_of, save_mixtral
from v2_engines import FOLDER, ROOT
from vllm_server import client_of, server_of

from bench.lib import servers
from freedraft.engines.hooks import check
from freedraft.engines.vllm.context import configured
from freedraft.engines.vllm.hooks import RANKS_HOOKS
from tests.support.models import continuations, save, tiny_model
from tests.support.prompts import random_ids

SCHEDULE = "num_speculative_tokens_per_batch_size"
AUTO = {"method": "sssd", "live": "store", "isolation": "shared"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Heads of 64, which vLLM's CPU attention has.
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PROMPTS = random_ids([12] * 4, 500, first=2, seed=3)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def test_ranks_keep_their_lengths(tiny_model, tmp_path, monkeypatch):
    """Also one that the user has set; but no rank of one process, nor where a head drafts, whose passes are steps."""
    assert check(RANKS_HOOKS) == []
    save_mixtral(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = partial(config_of, tmp_path, data_parallel_size=2)
    auto = config(AUTO | {"hardware": "h100"})
    assert configured(auto).lengths == (0, 1, 3) and getattr(auto.speculative_config, SCHEDULE)
    assert getattr(config(AUTO | {SCHEDULE: [(1, 4, 3), (5, 64, 0)]}).speculative_config, SCHEDULE)
    assert configured(config(AUTO | {"policy": "fixed"})).lengths == ()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert configured(config(AUTO)).lengths == ()


@pytest.mark.parametrize("size", [2, 3, 8, 34, 35, 300, 2000])
def test_votes_fit_what_vllm_adds_up(size):
    """The shortest one wins; a rank that adds what vLLM does is told apart."""
    from freedraft.engines.vllm.v2.agreement import Ballot

    ballot = Ballot(size)
    most = max(i for i in range(7) if ballot.vote(i) > ballot.vote(i - 1))
    assert most >= {2: 6, 3: 6, 8: 6, 34: 4, 35: 4, 300: 1, 2000: 1}[size]
    for index in range(7):
        assert 0 < size * ballot.vote(index) < 2**31, "the sum is an int32"
        for longer in range(index, 7):
            votes = ballot.vote(index) + (size - 1) * ballot.vote(longer)
            assert ballot.shortest(votes) == min(index, most) and ballot.shortest(votes + 1) == -1


def test_votes_say_what_vllm_asks():
    """By its own sum over ranks, of two here: whether one has requests left."""
    from datetime import timedelta

    from torch.distributed import HashStore
    from vllm.config import ParallelConfig
    from vllm.distributed.utils import init_gloo_process_group, stateless_destroy_torch_distributed_process_group

    from freedraft.engines.vllm.v2.agreement import Ballot

    ballot, store = Ballot(2), HashStore()

    def rank(number):
        limit = {"group_size": 2, "timeout": timedelta(seconds=60)}
        group = init_gloo_process_group(prefix_store=store, group_rank=number, **limit)
        found = []
        for votes in ((1, 3), (3, None), (None, None)):
            left = votes[number] is not None and ballot.vote(votes[number])
            found.append(ParallelConfig().sync_dp_state(group, left, False))
        stateless_destroy_torch_distributed_process_group(group)
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(rank, range(2)):
            assert found == [(True, False), (True, False), (False, False)]


def server(model, folder, *flags, speculative=None):
    """A server that interprets kernels, and notes its steps in a folder."""
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--dp-sync-interval", "4", *flags]
    made = server_of(model, folder / f"{len(flags)}.log", speculative, "--skip-tokenizer-init", *flags)
    made.env |= {"SERVED_AS_ON_GPUS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "SPLIT_EXPERTS": "1"}
    made.env |= {"PREFERRED": str(folder), "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2]))}
    made.env["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return made


def prefer(folder, *lengths):
    (folder / "new").write_text(json.dumps(lengths))
    (folder / "new").rename(folder / "preferred.json")


def ask(port, prompt, tokens=40, temperature=0.0):
    asked = {"model": servers.MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 5}
    body = {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    return client_of(port).completions.create(**asked, extra_body=body).choices[0].token_ids


def noted(folder, name, rank):
    path = folder / f"{name}-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_model("Qwen3Moe", seed=7, **SHAPE | EXPERTS), tmp_path_factory.mktemp("experts"))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.extended
def test_all_ranks_draft_one_length(model, tmp_path):
    said = continuations(model, PROMPTS, 40)
    made = server(model, tmp_path, speculative=AUTO)
    prefer(tmp_path, [3, 0], [3, 1])
    with servers.running(made), ThreadPoolExecutor(4) as pool:
        answer = partial(ask, made.port)
        assert [answer(prompt) for prompt in PROMPTS] == said
        alone = [len(noted(tmp_path, "steps", rank)) for rank in range(2)]
        assert [*pool.map(answer, PROMPTS)] == said
        print(alone)
        for rank in range(2):
            print(noted(tmp_path, "steps", rank)[:400])
            print(noted(tmp_path, "forwards", rank)[:400])
