"""Steps of an engine on model runner V2 in Triton's interpreter that are launched before their drafts are there.

Tensor-parallel ranks take this as a plugin of vLLM, where GATED names a file for the first rank's events.

A thread stands for the device's stream: it runs what is queued in order, and waits at the gate until the host has
opened it. Steps that only decode are full graphs of vLLM's own manager; their replay computes anew, from the runner's
buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.cpu import shm
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from freedraft.engines.vllm.v2 import gate
from freedraft.engines.vllm.v2.gate import Gate, stream_wait
from freedraft.engines.vllm.v2.install import SPECULATOR
from freedraft.engines.vllm.v2.speculator import MethodSpeculator

SIZES = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]  # of graphs, in tokens


class Stream:
    """Runs work in the order in which it is queued, in a thread of its own."""

    def __init__(self):
        self.pool, self.queued, self.events = ThreadPoolExecutor(1), [], []

    def queue(self, name, work):
        @torch.inference_mode()
        def run():
            result = work()
            self.events.append(name)
            return result

        self.queued.append(self.pool.submit(run))

    def synchronize(self):
        for future in self.queued:
            future.result()
        self.queued.clear()


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations, except views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view and func._schema.name not in ("aten::detach", "aten::alias")
        return result


def decode_by_graphs(runner, stream, patch):
    """Make steps that only decode replays of full graphs."""
    dispatch, slots, step = model_runner.dispatch_cg_and_sync_dp, model_runner.build_slot_mappings_by_layer, {}

    def dispatched(*args, **kwargs):
        description, state = dispatch(*args, **kwargs)
        adaptive = runner.adaptive_verification is not None
        decodes = kwargs.get("max_query_len") is not None and (adaptive or args[3] is not None)
        mode = CUDAGraphMode.FULL if decodes else description.cg_mode
        if decodes and adaptive:  # a graph for any lengths
            tokens = next(size for size in SIZES if size >= args[2])
            description = dataclasses.replace(
                description, num_tokens=tokens, num_reqs=min(tokens, runner.max_num_reqs), max_query_len=1 + 3
            )
        return dataclasses.replace(description, cg_mode=mode), state

    def noted_slots(*args):
        step["slots"] = slots(*args)
        return step["slots"]

    def pre_forward(scheduled, batch, attn_metadata=None):
        step["metadata"] = attn_metadata

    def replay(self, description):
        n, buffers, metadata, of_layers = description.num_tokens, runner.input_buffers, step["metadata"], step["slots"]

        def run():
            with set_forward_context(metadata, runner.vllm_config, num_tokens=n, slot_mapping=of_layers):
                self.hidden_states = runner.model(
                    input_ids=buffers.input_ids[:n], positions=buffers.positions[:n], inputs_embeds=None,
                    intermediate_tensors=None,
                )  # fmt: skip

        self.hidden_states = torch.empty(n, 0)
        stream.queue("replay", run)

    patch.setattr(model_runner, "dispatch_cg_and_sync_dp", dispatched)
    patch.setattr(model_runner, "build_slot_mappings_by_layer", noted_slots)
    patch.setattr(CudaGraphManager, "run_fullgraph", replay)
    runner.kv_connector.pre_forward = pre_forward


def verify_by_score(runner):
    """As vLLM and `prepare` do where graphs are captured; returns of each choice how many draft tokens were to be
    verified, the scores, and how many of each request were, and whether drafts were learnt from as they had been."""
    torch.cuda.Stream, torch.cuda.Event = shm._StreamPlaceholder, shm._EventPlaceholder
    states, speculator = runner.req_states, runner.speculator
    runner.adaptive_verification = AdaptiveVerificationManager(states, runner.input_buffers.query_start_loc, 1, 1000)
    runner.adaptive_verification.set_cost_curves([(1, 0.0)], [(size, 10.0 + 0.6 * size) for size in SIZES])
    runner.rejection_sampler.enable_adaptive_verification = True
    speculator.verify_by_score()
    ours = speculator.by_score
    noted, followed, choose, learn = {"chosen": [], "learnt": []}, [], ours.choose, ours.acceptance.update

    def chosen(draft, slots, counts, batch):
        choose(draft, slots, counts, batch)
        followed[:] = [] if draft is None else [draft.tokens.copy()]
        if ours.late:
            scores = ours._scores[batch.idx_mapping_np, 1:].tolist()
            noted["chosen"].append([ours._budget, scores, ours._counts.tolist()])

    def learnt(step):
        for tokens, nodes in zip(followed, ours.acceptance._followed, strict=bool(followed)):
            noted["learnt"].append(bool((nodes.tokens == tokens).all()))
        followed.clear()
        learn(step)

    ours.choose, ours.acceptance.update = chosen, learnt
    return noted


def use_gate(speculator, manager, stream, kernel=False):
    """As on a device; returns how many operations of PyTorch each draft at the gate took, and of each other draft
    whether it was made before the next step was prepared. A rank that does not draft has no gate: its stream waits for
    the drafting rank's."""
    flag, operations, others = torch.zeros(1, dtype=torch.int32), [], []
    by_kernel = stream_wait(flag)

    def spin(number):
        while flag.numpy()[0] < number:
            time.sleep(1e-4)

    wait = by_kernel if kernel else spin
    if (host := speculator.host) is not None:
        speculator.gate = Gate(flag, lambda number: stream.queue("open", lambda: wait(number)))
        draft, host.draft = host.draft, lambda *given: drafted(*given)
    setattr(manager, SPECULATOR, speculator)
    send, launch = speculator._send, speculator.launch

    def sent(*given):
        if speculator.launching:
            stream.queue("drafts", lambda: send(*given))
        else:
            send(*given)

    def drafted(most, batch, at=None):
        if at is None:
            others.append(batch is None)
            return draft(most, batch)
        stream.events.append("drafting")
        with Operations() as counted:
            result = draft(most, batch, at)
        operations.append(counted.count)
        return result

    def launched(replay):
        speculator.launching = True
        try:
            launch(replay)
        finally:
            stream.synchronize()
            speculator.launching = False
        return manager.hidden_states

    if speculator.trees is not None:
        write = speculator.trees.write_queries
        speculator.trees.write_queries = lambda batch: (
            stream.queue("queries", lambda: write(batch)) if speculator.launching else write(batch)
        )
    speculator.launching = False
    speculator._send, speculator.launch = sent, launched
    return operations, others


def break_drafter(guarded, how):
    """Drafts that fail ("raises"), or take too long ("sleeps"); returns a list of which do."""
    draft, broke = guarded.method.drafter.draft, []

    def broken(*args, **kwargs):
        broke.append((1 + len(broke)) % (3 if how == "raises" else 12) == 0)
        if broke[-1]:
            if how == "raises":
                guarded._next_pause = 1
                raise ValueError("on purpose")
            time.sleep(1.5)
        return draft(*args, **kwargs)

    guarded.method.drafter.draft = broken
    return broke


def begin(runner, patch, *, adaptive=False, drafter="", kernel=False):
    """Launch the steps of an engine without requests before their drafts are there, from now on; what happens then.
    adaptive: with vLLM's adaptive verification, in steps that are padded; drafter: it "raises" in every third step, or
    "sleeps" in every twelfth; kernel: wait as without the driver."""
    patch.setattr(gate, "LONGEST", 0.5 if drafter == "sleeps" else 60.0)  # the interpreter takes its time
    speculator, stream = runner.speculator, Stream()
    noted = {"events": stream.events, "by score": verify_by_score(runner) if adaptive else {}}
    decode_by_graphs(runner, stream, patch)
    noted["operations"], noted["at once"] = use_gate(speculator, runner.cudagraph_manager, stream, kernel)
    noted["broken"] = break_drafter(speculator.host.guarded, drafter) if drafter else []
    return noted


def install():
    """In a tensor-parallel rank."""
    path, prepare, gate.LONGEST = os.environ["GATED"], MethodSpeculator.prepare, 60.0

    @functools.wraps(prepare)
    def prepared(self, runner):
        prepare(self, runner)
        if os.environ.get("ADAPTIVE"):
            verify_by_score(runner)
        stream = Stream()
        decode_by_graphs(runner, stream, pytest.MonkeyPatch())
        use_gate(self, runner.cudagraph_manager, stream)
        launch = self.launch

        def launched(replay):
            result = launch(replay)
            if self.gate is not None:
                Path(path).write_text(json.dumps(stream.events))
            return result

        self.launch = launched

    MethodSpeculator.prepare = prepared
