"""Engines in this process, one at a time, so that a test can look at the drafter.

This folder must not be a package: as one it would be called `vllm`, like the engine.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def engine(model: Path, **arguments: Any) -> Iterator[Any]:
    """An `LLM` in fp32, eager unless told otherwise; gone when the block ends."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    arguments = {"enforce_eager": True} | arguments
    llm = LLM(str(model), dtype="float32", seed=0, disable_log_stats=False, **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def settle(llm: Any) -> None:
    """Let the engine tell its runner which requests have ended, as the engine's own process does when it is idle."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        core.step()


@contextmanager
def spied(proposer: Any, record: Callable[[Any, list[list[int]]], None]) -> Iterator[None]:
    """Call `record(step, drafts)` at each step of the proposer; what it raises is raised here, at the end."""
    original = proposer.draft
    errors: list[Exception] = []

    def draft(step: Any) -> list[list[int]]:
        drafts = original(step)
        try:
            record(step, drafts)
        except Exception as error:  # the engine would take it for a mistake of the drafter
            errors.append(error)
        return drafts

    proposer.draft = draft
    try:
        yield
    finally:
        del proposer.draft
    if errors:
        raise errors[0]
