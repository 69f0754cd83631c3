"""Engines in this process, one at a time, so that a test can look at the drafter.

This folder must not be a package: as one it would be called `vllm`, like the engine.
"""

import copy
import gc
import os
from contextlib import contextmanager

from layerskip_plugin.method import LayerSkipMethod
from sssd_plugin.method import SssdMethod

# Read by vLLM when it is imported.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)


running = []


@contextmanager
def engine(model, **arguments):
    """An `LLM` in fp32, eager unless told otherwise; gone when the block ends."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    arguments = {"enforce_eager": True, "dtype": "float32"} | arguments
    llm = LLM(str(model), seed=0, disable_log_stats=False, **arguments)
    running.append(llm)
    try:
        yield llm
    finally:
        running.remove(llm)
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def runner_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def settle(llm):
    """Let the engine tell its runner which requests have ended, as the engine's own process does when it is idle."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(1000):
        if not core.scheduler.has_requests():
            return
        core.step()
    raise AssertionError("requests do not end")


def answer_turns(llm, turns, asked):
    """What one request answers whose prompt comes in turns, as streamed input does: token ids of each. turns: token
    ids; asked: SamplingParams, of output kind DELTA."""
    engine, said = llm.llm_engine, []
    for number, turn in enumerate([*turns, [0]], 1):
        request = engine.input_processor.process_inputs(
            "turns", {"prompt_token_ids": [*turn]}, asked, ("generate",), resumable=number <= len(turns)
        )
        request.external_req_id = "turns"
        engine.output_processor.add_request(request, None)
        engine.engine_core.add_request(copy.deepcopy(request))  # as to another process
        outputs = []
        while request.resumable and not (outputs and outputs[-1].finish_reason):
            outputs += [output.outputs[0] for output in engine.step()]
        said.append([token for output in outputs for token in output.token_ids])
    settle(llm)
    return said[:-1]


def check_nothing_is_left(llm):
    """Of requests, which have all ended, in the drafter; and that it has not raised."""
    settle(llm)
    if (proposer := getattr(runner_of(llm), "drafter", None)) is None:
        return
    method = proposer.guarded.method
    assert not failures(proposer) and not proposer.guarded.running and not proposer.limits
    assert not isinstance(method, SssdMethod) or len(method.drafter) == 0
    assert not isinstance(method, LayerSkipMethod) or not method.selection.requests


def failures(proposer):
    """How often drafters of this name have raised in this process, since the metric was last reset."""
    return float(proposer.guarded.metrics.failures._value.get())


@contextmanager
def spied(proposer, record):
    """Call `record(step, drafts)` at each step, drafts by request of the step; what it raises is raised at the end."""
    from freedraft.engines.vllm.v1.runner import draft_lists

    guarded = proposer.guarded
    original = guarded.step
    errors: list[Exception] = []

    def draft(step):
        drafts = original(step)
        # Of vLLM's batch, those in the midst of their prompt included.
        rows = draft_lists(drafts, step, len(step.engine.arguments["sampled_token_ids"]))
        try:
            record(step, [rows[row] for row in step.engine.rows.tolist()])
        except Exception as error:  # the engine would take it for a mistake of the drafter
            errors.append(error)
        return drafts

    guarded.step = draft
    try:
        yield
    finally:
        del guarded.step
    if errors:
        raise errors[0]
