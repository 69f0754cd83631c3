"""Plugins of vLLM, for all its processes that have this folder on PYTHONPATH, as the environment asks for them."""

import itertools
import json
import os
from pathlib import Path


def install():
    """SERVED_AS_ON_GPUS: what an API server needs to run model runner V2 here as on GPUs.
    SPLIT_EXPERTS: experts that are split between ranks. PREFERRED: folder for `note_lengths`."""
    if os.environ.get("SERVED_AS_ON_GPUS") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from tests.vllm.v2_interpreted import serve

        serve.as_on_devices()
    if os.environ.get("SPLIT_EXPERTS"):
        compute_own_experts()
    if os.environ.get("PREFERRED"):
        note_lengths(Path(os.environ["PREFERRED"]))
    if os.environ.get("ADAPTIVE"):
        import by_score

        by_score.install()
    if os.environ.get("FAILING"):
        fail_on_a_rank(*os.environ["FAILING"].split())


def compute_own_experts():
    """In place of vLLM's kernel of experts for CPUs, which takes all of them to be on each rank; and collectives over
    different numbers of tokens, which its communicator of CPUs lacks."""
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *, expert_map, **more):
        output.zero_()
        for expert in range(len(w1)):
            weight = torch.where(expert_map[topk_ids.long()] == expert, topk_weights, 0).sum(1, keepdim=True)
            gate, up = (hidden_states @ w1[expert].T).chunk(2, 1)
            output += weight * ((torch.nn.functional.silu(gate) * up) @ w2[expert].T)

    def all_gatherv(self, given, dim=0, sizes=None):
        if isinstance(given, list):
            return [all_gatherv(self, one, dim, sizes) for one in given]
        padded = given.new_zeros(max(sizes), *given.shape[1:])
        padded[: len(given)] = given
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(self, given, dim=-1, sizes=None):
        torch.distributed.all_reduce(total := given.clone(), group=self.device_group)
        return total.split(sizes)[self.rank_in_group]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = apply


def note_lengths(folder):
    """Data-parallel ranks prefer the lengths that `preferred.json` has by rank and number of requests, the last one for
    more; without it, those that step times tell. Each notes its steps, before they begin: process, wave, number,
    requests, and the length to draft; and of each forward its tokens, and on how many per request all ranks agreed."""
    from vllm.distributed import get_dp_group
    from vllm.v1.engine.core import DPEngineCoreProc
    from vllm.v1.worker.gpu import model_runner

    from freedraft.engines.vllm.v2.drafting import HostDrafting

    step, dispatch = DPEngineCoreProc._process_engine_step, model_runner.dispatch_cg_and_sync_dp
    learnt, preferred = HostDrafting.decide, folder / "preferred.json"

    def note(name, rank, *figures):
        with (folder / f"{name}-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")

    def decide(self, batch):
        if not preferred.exists():
            return learnt(self, batch)
        lengths = json.loads(preferred.read_text())[get_dp_group().rank_in_group]
        return [(n, n if n < len(lengths) else 1 << 30, length) for n, length in enumerate(lengths, 1)]

    def process(core):
        table = core.scheduler.dynamic_sd_lookup
        length = table[-1] if table else None
        at = core.current_wave, core.step_counter
        note("steps", core.dp_rank, os.getpid(), *at, len(core.scheduler.running), length)
        return step(core)

    def noted(manager, requests, tokens, *args, **kwargs):
        made, agreed = dispatch(manager, requests, tokens, *args, **kwargs)
        note("forwards", get_dp_group().rank_in_group, requests, tokens, agreed and agreed.uniform_token_count)
        return made, agreed

    DPEngineCoreProc._process_engine_step, HostDrafting.decide = process, decide
    model_runner.dispatch_cg_and_sync_dp = noted


def fail_on_a_rank(part, time, rank):
    """A part of drafting fails on one tensor-parallel rank: its name, which time it fails, counted from 1 in each rank,
    and the rank, as in FAILING="ready 7 1"."""
    from vllm.distributed import get_tp_group

    from freedraft.engines.vllm.draft_model import PagedDraftModel, PagedDraftRound

    owner, name = {
        "model": (PagedDraftModel, "__init__"),
        "ready": (PagedDraftRound, "_ready"),  # before all ranks have agreed that they can
        "pass": (PagedDraftRound, "_output"),  # and behind it
    }[part]
    original, counted = getattr(owner, name), itertools.count(1)

    def fail(self, *args, **kwargs):
        if next(counted) == int(time) and get_tp_group().rank_in_group == int(rank):
            raise RuntimeError("this rank fails on purpose")
        return original(self, *args, **kwargs)

    setattr(owner, name, fail)
