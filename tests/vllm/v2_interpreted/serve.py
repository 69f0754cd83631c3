"""Engines on model runner V2 in Triton's interpreter, one after the other: what each answers, as a list of JSON on the
last line.

    python serve.py '[{"model": ..., "speculative_config": ..., "cases": {name: {"prompts": ..., ...}}, ...}, ...]'

Cases come one after the other: all prompts of one at once. "parameters" are those of all requests, "each" has others of
each; "abort" is a number of steps after which each request is given up, and asked anew under the same id; "chains" are
the requests with parameters that allow no trees; "salt" stands in front of the prompts' own; "speech" stands before
prompts. Of an engine, "by_score"
verifies by score, "kv" notes the KV of all steps, "drafts" those of chains, "launches" what a step launches, "graphs"
runs draft passes as CUDA graphs do, "graph_sizes" are those of vLLM's own, "warm_up" compiles kernels as vLLM does on
devices, and notes which of ours are launched that were not then, "rows" is how many rows of logits are verified at
once, "seconds" what a step is measured to take, and each of its query tokens. The rest are arguments of vLLM's `LLM`;
without a "speculative_config" there are answers alone.
"""

import copy
import functools
import gc
import itertools
import json
import logging
import sys
from contextlib import contextmanager

import by_score
import numpy as np
import pytest
import torch
from freedraft_kernels import KVPool
from numba.core.dispatcher import Dispatcher
from vllm import LLM, SamplingParams, envs
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

from bench.lib import launches
from freedraft.cost.auto_by_batch import BatchLengths
from freedraft.engines import copies
from freedraft.engines.vllm.draft_graphs import DraftGraphs
from freedraft.engines.vllm.draft_model import PagedDraftRound
from freedraft.engines.vllm.v2.requests import GainedTokens
from freedraft.engines.vllm.v2.speculator import MethodSpeculator
from freedraft.engines.vllm.v2.trees import why_chains
from tests.support.interpreter import take_any_mask
from tests.support.random_trees import path_to
from tests.support.speech import speech_prompt
from tests.support.triton_launches import record_launches

METRICS = {"drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
METRICS |= {"drafts": "spec_decode_num_drafts", "preempted": "num_preemptions", "cached": "prefix_cache_hits"}
PATCH = pytest.MonkeyPatch()  # undone behind each engine
STEPS = []  # tokens of each step that vLLM makes up to compile kernels
GRAPH_LENGTHS = []  # draft lengths that vLLM lists graphs for, each time that it does


def after(owner, name, note):
    """Call `note(result, *args)` after each call of this function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args, **kwargs):
        result = original(*args, **kwargs)
        note(result, *args)
        return result

    PATCH.setattr(owner, name, called)


class Recorded:
    """In place of vLLM's CUDAGraphWrapper: a replay computes anew, with the very tensors of the capture and with the
    forward context of then, whatever it is called with."""

    def __init__(self, runnable, vllm_config, runtime_mode):
        self.runnable, self.mode, self.replays = runnable, runtime_mode, 0
        self.captured = {}

    def __call__(self, *args):
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.mode:
            return self.runnable(*args)
        if context.batch_descriptor not in self.captured:
            self.captured[context.batch_descriptor] = args, copy.copy(context)
        else:
            self.replays += 1
        args, context = self.captured[context.batch_descriptor]
        with override_forward_context(context):
            return self.runnable(*args)


def record_graphs(runner, sizes):
    """As `DraftGraphs.capture` does, where vLLM's own graphs have these sizes."""
    made = []

    def wrap(*args):
        made.append(Recorded(*args))
        return made[-1]

    model = runner.speculator.draft_model
    model.waits = True  # as a device does
    runner.vllm_config.compilation_config.cudagraph_capture_sizes = sizes
    PATCH.setattr(DraftGraphs, "capture", lambda self, passes: self.record(passes, wrap))
    model.capture(runner.block_tables.block_tables[0].gpu.shape[1])
    return made


def note_reads():
    """How many draft passes of each recipe are read back at once."""
    reads = []
    after(PagedDraftRound, "read", lambda result, self, launched: reads.append(len(launched)))
    return reads


def note_skipped():
    """In how many steps vLLM 0.33 has no drafts made, since no request of the step could verify them; how many there
    are; and in how many some rows have drafts and others a token alone."""
    counts = [0, 0, 0]

    def scheduled(output, *args):
        counts[0] += bool(getattr(output, "skip_drafts", False))
        counts[1] += 1
        drafts, tokens = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        counts[2] += bool(drafts) and any(tokens[name] == 1 and name not in drafts for name in tokens)

    after(Scheduler, "schedule", scheduled)
    return counts


def note_waits():
    """How often the host waits for a step's tokens while requests end and begin, before the next step's attention is
    prepared, or before the outputs of the step before it have left, and how often at all."""
    finish_requests, wait, copy_tokens = GPUModelRunner.finish_requests, GainedTokens.wait, GainedTokens.copy
    update, counts, launching, steps, outputs = Scheduler.update_from_output, [0, 0], False, 0, 0
    prepared = False

    def finish(self, scheduled):
        nonlocal launching, prepared
        launching = scheduled.total_num_scheduled_tokens > 0
        prepared &= not launching
        finish_requests(self, scheduled)
        launching = False

    def attention(*args):
        nonlocal prepared
        prepared = True

    def copy(self, *args):
        nonlocal steps
        steps += 1
        self.step = steps
        copy_tokens(self, *args)

    def wait_for(self):
        counts[0] += launching or not prepared or outputs < self.step - 1
        counts[1] += 1
        return wait(self)

    def update_from_output(self, scheduled, *args):
        nonlocal outputs
        outputs += scheduled.total_num_scheduled_tokens > 0
        return update(self, scheduled, *args)

    PATCH.setattr(GainedTokens, "step", 0, raising=False)  # of one from before
    after(DefaultModelState, "prepare_attn", attention)
    PATCH.setattr(GPUModelRunner, "finish_requests", finish)
    PATCH.setattr(GainedTokens, "copy", copy)
    PATCH.setattr(GainedTokens, "wait", wait_for)
    PATCH.setattr(Scheduler, "update_from_output", update_from_output)
    return counts


def note_gone(runner):
    """How many of the requests that the method is passed have lost their slots meanwhile, and how many it is passed at
    all; how many rows of steps are of requests that have."""
    guarded, states, counts, left = runner.speculator.host.guarded, runner.req_states, [0, 0], [0]
    requests = runner.speculator.host.requests

    def passed(result, step, *_):
        slots = (step.starts // runner.max_model_len).tolist()
        pairs = zip(step.request_ids, slots, strict=True)
        counts[0] += sum(states.req_id_to_index.get(name) != slot for name, slot in pairs)
        counts[1] += len(slots)

    def appended(result, gained, *_):
        left[0] += int((requests.generations[gained.slots] != gained.generations).sum())

    after(requests, "append", appended)
    after(guarded, "step", passed)
    return counts, left


def figures(llm):
    """Of all cases so far."""
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {name: found.get(f"vllm:{metric}", 0) for name, metric in METRICS.items()}


def answers(llm, prompts, parameters, each=(), abort=0, chains=(), salt="", speech=False, weights=""):
    engine = llm.llm_engine
    found = {}
    if weights:
        llm.sleep(level=2)  # memory is kept on a CPU
        llm.wake_up()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        llm.reset_prefix_cache()

    def add(i):
        prompt = TokensPrompt(prompt_token_ids=prompts[i], cache_salt=f"{salt}salt {i % 2}")
        prompt = speech_prompt(prompts[i], i) if speech else prompt
        asked = parameters | (each[i] if each else {}) | ({"logprobs": 1} if i in chains else {})
        if "structured_outputs" in asked:
            asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
        engine.add_request(f"request {i}", prompt, SamplingParams(detokenize=False, **asked))

    for i in range(len(prompts)):
        add(i)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == abort:
            engine.abort_request([f"request {i}" for i in range(len(prompts)) if f"request {i}" not in found])
            for i in range(len(prompts)):
                if f"request {i}" not in found:
                    add(i)
    return [found[f"request {i}"] for i in range(len(prompts))]


def as_on_devices():
    """As far as this CPU can."""
    take_any_mask()
    filter_as_on_cpus()
    schedule_asynchronously()


def schedule_asynchronously():
    """As on GPUs; vLLM's CPU platform turns it off."""
    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


def filter_as_on_cpus():
    """Top-k and top-p by PyTorch, vLLM's own way on CPUs: the interpreter does not run its kernel."""
    topk_topp_sampler.HAS_TRITON = False


def warm_up_as_on_devices():
    """vLLM's worker for devices compiles kernels with made-up requests, by functions that are called here in its
    place."""

    def compile_or_warm_up_model(worker):
        def execute_model(scheduled):
            STEPS.append(scheduled.total_num_scheduled_tokens)
            return worker.execute_model(scheduled)

        synchronize, torch.accelerator.synchronize = torch.accelerator.synchronize, lambda *args: None
        run_mixed_prefill_decode_warmup(worker.model_runner, execute_model, worker.sample_tokens, 16)
        warmup_kernels(worker.model_runner, execute_model, worker.sample_tokens)
        torch.accelerator.synchronize = synchronize

    # The interpreter does not run vLLM's kernels for all that is in its parameters.
    SamplingParams.for_sampler_warmup = classmethod(lambda cls: cls(logprobs=5))
    gpu_worker.Worker.compile_or_warm_up_model = compile_or_warm_up_model


def profile_graphs_as_on_devices():
    """vLLM's worker for devices first gives the runner a small KV cache, to see what memory its graphs take."""
    initialize = GPUModelRunner.initialize_kv_cache

    def listed(self, mode):
        schedule = self._vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        GRAPH_LENGTHS.append(sorted({length for _, _, length in schedule or ()}))

    def initialize_kv_cache(self, config, is_profiling=False, *args, **kwargs):
        if not is_profiling:
            synchronize, torch.accelerator.synchronize = torch.accelerator.synchronize, lambda *args: None
            empty_cache, torch.accelerator.empty_cache = torch.accelerator.empty_cache, lambda: None
            blocks, self.compilation_config.max_cudagraph_capture_size = self.cache_config.num_gpu_blocks, 8
            cudagraph_utils._init_minimal_kv_cache_for_profiling(self)
            cudagraph_utils._teardown_profiling_state(self)
            self.cache_config.num_gpu_blocks, self.compilation_config.max_cudagraph_capture_size = blocks, None
            torch.accelerator.synchronize, torch.accelerator.empty_cache = synchronize, empty_cache
        initialize(self, config, is_profiling, *args, **kwargs)

    MethodSpeculator.init_cudagraph_manager = listed  # which does nothing
    GPUModelRunner.initialize_kv_cache = initialize_kv_cache


def warm_up(worker, guarded):
    """What is known of documents, step times and acceptance before and after, where it is learnt."""
    method, controller = guarded.method, guarded.method.controller

    def known():
        if method.live is None or not isinstance(controller, BatchLengths):
            return []
        return [method.live.stats().documents, controller.measured.times.seen, controller.tokens().tolist()]

    before = known()
    gpu_worker.Worker.compile_or_warm_up_model(worker)
    return {"before": before, "after": known(), "steps": STEPS}


def note_tokens():
    """Tensors of requests by tokens say whether they were to be in the host's memory, which the device reads."""
    original = StagedWriteTensor.__init__

    @functools.wraps(original)
    def __init__(self, size, *args, uva_instead_of_gpu=False, **kwargs):
        original(self, size, *args, uva_instead_of_gpu=uva_instead_of_gpu, **kwargs)
        if not isinstance(size, int) and len(size) == 2:
            self.on_host = uva_instead_of_gpu

    StagedWriteTensor.__init__ = __init__


def reasons_for_chains(runner):
    """What speaks against trees as it is, in batch-invariant mode, where routed experts are asked for, and with a
    sampler of the model's own."""
    with pytest.MonkeyPatch.context() as patch:
        said = [why_chains(runner, runner.vllm_config)]
        patch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
        said.append(why_chains(runner, runner.vllm_config))
        patch.setattr(envs, "VLLM_BATCH_INVARIANT", False)
        patch.setattr(type(runner.vllm_config.aux_output_config), "enabled", True)
        said.append(why_chains(runner, runner.vllm_config))
        patch.setattr(type(runner.vllm_config.aux_output_config), "enabled", False)
        patch.setattr(runner, "rejection_sampler", runner.sampler)
        return [*said, why_chains(runner, runner.vllm_config)]


def prepared_without(name, runner, trees):
    """Whether there are trees in a runner that lacks this, and what is said."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("freedraft").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(runner, name)
        trees.buffers.enabled = False
        trees.prepare(runner)
    return [trees.buffers.enabled, *lines]


def note_branches():
    """How many accepted paths were chains of first nodes, and how many were not."""
    counts = [0, 0]

    def compacted(result, pool, slots, verification):
        accepted = verification.accepted
        off = ((accepted != torch.arange(accepted.shape[1])) & (accepted >= 0)).any(1)
        counts[0] += int((~off).sum())
        counts[1] += int(off.sum())

    after(KVPool, "compact", compacted)
    return counts


def note_kv(runner):
    """By the tokens that a request has in its KV cache: float [layers, tokens, ...], what stands there."""
    noted = {}

    def proposed(drafts, batch, *args):
        for slot in batch.idx_mapping_np.tolist():
            known = int(runner.req_states.num_computed_tokens.gpu[slot])
            tokens = tuple(runner.req_states.all_token_ids.gpu[slot, :known].tolist())
            at, size = torch.arange(known), runner.block_tables.block_sizes[0]
            pages = runner.block_tables.block_tables[0].gpu[slot][at // size].long()
            noted[tokens] = torch.stack([cache[pages, :, at % size] for cache in runner.kv_caches])

    after(runner.speculator, "propose", proposed)
    return noted


def note_drafts(guarded):
    """A request's tokens, and what was drafted behind them."""
    noted = []

    def drafted(drafts, step, *undrafted):
        if undrafted:
            return
        for b, n in enumerate(np.minimum(drafts.counts - 1, step.capacities).tolist()):
            noted.append((step.history(b).tolist(), drafts.tokens[b, 1 : n + 1].tolist()))

    after(guarded, "step", drafted)
    return noted


def note_recycled(guarded):
    """The likeliest token behind each text that logits are recycled of."""
    drafter, original, said = guarded.method.drafter, guarded.method.recycle, {}

    def recycle(logits):
        request_ids, draft, top_tokens, _, contexts = logits
        for b, request_id in enumerate(request_ids):
            if not request_id:  # it has begun anew: see `LogitsCopy.forget`
                continue
            text = drafter.tokens(request_id).tolist()
            if contexts is not None:
                if len(text) < contexts[b]:  # it has ended meanwhile
                    continue
                text = text[: contexts[b]]
            assert text[-1] == draft.tokens[b, 0]
            for node in range(draft.counts[b]):
                path = draft.tokens[b, path_to(draft, b, node)[1:]].tolist()
                said.setdefault((*text, *path), set()).add(int(top_tokens[b, node, 0]))
        original(logits)

    guarded.method.recycle = recycle
    return said


def largest_difference(kv):
    """How much the KV of equal tokens differs at most, and how many pairs of texts were compared."""
    worst, pairs = 0.0, 0
    texts = sorted(kv)
    for shorter, longer in itertools.pairwise(texts):
        if shorter == longer[: len(shorter)]:
            worst = max(worst, float((kv[shorter] - kv[longer][:, : len(shorter)]).abs().max()))
            pairs += 1
    return [worst, pairs]


@contextmanager
def engine(model, seconds, **given):
    """An engine, after the memory of the one before is free."""
    gc.collect()
    if seconds:
        PATCH.setattr(GainedTokens, "seconds_since", lambda self, other: seconds[0] + seconds[1] * self.query_tokens)
    given |= {"dtype": "float32", "enforce_eager": True, "seed": 0, "disable_log_stats": False}
    llm = LLM(model, **{"gpu_memory_utilization": 0.2} | given)
    try:
        yield llm
    finally:
        PATCH.undo()
        llm.llm_engine.engine_core.shutdown()


def served(model, cases, speculative_config=None, *, seconds=(), rows=0, **given):
    """What one engine says."""
    noting = {name: given.pop(name, None) for name in ("kv", "drafts", "graphs", "graph_sizes", "warm_up", "launches")}
    noting["by_score"] = given.pop("by_score", False)
    if rows:
        PATCH.setattr(rejection_sampler, "get_max_chunk_logits", lambda vocab_size: rows)
    with engine(model, seconds, speculative_config=speculative_config, **given) as llm:
        if speculative_config is None:
            return {name: answers(llm, **case) for name, case in cases.items()}
        return asked(llm, cases, noting)


def signatures():
    """Functions of ours with the types of arguments that numba has compiled, or loaded from its cache, them for."""
    ours = ("freedraft", "sssd_plugin", "layerskip_plugin")
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(ours)]
    found = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {f"{one.__module__}.{one.__name__}{kinds}" for one in found.values() for kinds in one.signatures}


def asked(llm, cases, noting):
    at_start = signatures()
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner
    PATCH.setattr(model_runner, "_profile_cudagraph_memory", lambda runner: 2**20)
    assert runner.profile_cudagraph_memory() >= 2**20, "as at a start on a device"
    guarded = runner.speculator.guarded
    failed = guarded.metrics.failures._value.get()  # in engines before this one
    engine, result = {}, {}
    if noting["warm_up"]:
        launched = record_launches(PATCH, run=True)
        result["warm up"] = warm_up(worker, guarded)
        compiled = set(launched)
    if noting["launches"]:
        engine["launches"] = launches.of_steps(llm)
    drafter, controller = getattr(guarded.method, "drafter", ()), guarded.method.controller
    trees = runner.speculator.trees
    if trees is None:  # their kernel takes the interpreter most of a step
        PATCH.setattr(copies, "top_tokens", functools.partial(copies.top_tokens, backend="reference"))
    branches = note_branches()
    kv = note_kv(runner) if noting["kv"] else {}
    graphs = record_graphs(runner, noting["graph_sizes"]) if noting["graphs"] else []
    reads, skipped = note_reads(), note_skipped()
    drafts = note_drafts(guarded) if noting["drafts"] else []
    waits, (gone, left) = note_waits(), note_gone(runner)
    said = {} if drafter == () else note_recycled(guarded)
    drafted, accepted = guarded.metrics.drafted._value, guarded.metrics.accepted._value
    counts, by_case = {}, {}
    scored = by_score.begin(runner) if noting["by_score"] else {}
    for name, case in cases.items():
        before, first, off = (drafted.get(), accepted.get()), len(drafts), branches[1]
        result[name] = answers(llm, **case)
        counts[name] = drafted.get() - before[0], accepted.get() - before[1]
        by_case[name] = {"branches": branches[1] - off, "drafts": drafts[first:]}
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(3):  # so that the runner hears of the last requests' ends, as in a process of its own
        core.step()
    config = llm.llm_engine.vllm_config
    engine |= {"waits": waits, "by score": scored, "compiled while serving": sorted(signatures() - at_start)}
    engine |= figures(llm) | {"by case": by_case}
    engine |= {"v2": isinstance(runner, GPUModelRunner), "async": config.scheduler_config.async_scheduling}
    engine["failures"] = guarded.metrics.failures._value.get() - failed
    engine |= {"counts": counts, "branches": branches, "reads": reads, "gone": gone, "left": left[0]}
    engine["skipped"] = skipped
    engine["schedule"] = config.speculative_config.num_speculative_tokens_per_batch_size
    engine["lookup"] = core.scheduler.dynamic_sd_lookup
    engine |= {"trees": trees is not None and trees.buffers.enabled}
    engine["reasons for chains"] = reasons_for_chains(runner) if trees is not None else []
    engine["built otherwise"] = prepared_without("fast_prefill", runner, trees) if trees is not None else []
    engine |= {"tokens on the host": runner.req_states.all_token_ids.on_host, "kv": largest_difference(kv)}
    engine["replays"] = [graph.replays for graph in graphs]
    engine["graph lengths"] = GRAPH_LENGTHS
    priced = getattr(controller, "_prices", {})
    engine["decided"] = [[*batches, controller.best(seconds)] for batches, (seconds, _) in priced.items()]
    engine["verified"] = sorted({length for _, length, _ in getattr(controller, "_errors", {})})
    if noting["warm_up"]:
        engine |= {"compiled": len(compiled), "compiled late": [str(kind) for kind in launched - compiled]}
    engine["said"] = [[*text, *likeliest] for text, likeliest in said.items() if len(likeliest) == 1]
    held = runner.speculator.host.requests
    engine["held"] = [len(drafter), len(guarded.running), len(held.slots) + len(held._preempted) + len(held.ended)]
    return result | {"engine": engine}


def main():
    as_on_devices()
    note_tokens()
    warm_up_as_on_devices()
    profile_graphs_as_on_devices()
    found = [served(**engine) for engine in json.loads(sys.argv[1])]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
