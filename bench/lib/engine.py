"""Engines under a benchmark: their drafting is recorded, and switched on and off between requests or steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.results import ROOT
from bench.lib.servers import in_process_environment
from freedraft.draft import DraftBatch
from freedraft.step import Step

Drafting = bool | Callable[[Step], bool]
"""Whether the drafter is asked, or in which steps."""
SKIP_SET_OF_DEMO = ROOT / "configs" / "skip_sets" / "smollm2-135m-instruct-12.json"


@dataclass(frozen=True)
class Call:
    """One call of `Method.draft`, which comes between two steps of the engine.

    Attributes:
        began, ended: seconds on the clock of `time.perf_counter`.
        on: whether the method was asked.
        ids: the requests of the step. contexts: their tokens, in all.
        gained: tokens that each of them gained by the step that has just ended.
        drafted: depth of each request's draft. nodes: of all drafts, roots included.
        kinds: of each draft's first token (`DraftBatch.kinds`); 0 where there is none.
    """

    began: float
    ended: float
    on: bool
    ids: list[str]
    contexts: int
    gained: list[int]
    drafted: list[int]
    nodes: int
    kinds: list[int]

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def pass_seconds(self) -> float | None:
        """The time of one draft pass, its share of the decisions included; None where nothing was drafted."""
        depth = max(self.drafted, default=0)
        return (self.ended - self.began) / depth if depth else None


class Turns:
    """For `Switch`: off and on in turns of `length` steps within the same requests, so that both meet the same machine
    and contexts."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._step = -1

    def __call__(self, step: Step) -> bool:
        self._step += 1
        return self._step // self.length % 4 in (1, 2)  # off, on, on, off, ...: neither is always the first


class Switch:
    """Stands in for `method.draft` from now on.

    Where `wants(step)` is false the method is not asked, and the drafts are nothing but roots; it only hears what
    became of the drafts that it made the step before. The file `log` gets every call as a line of JSON.

    Attributes:
        calls: all calls so far; the caller may clear them.
        error: the last exception of the method, which is also passed on to the engine.
    """

    def __init__(self, method: Any, wants: Callable[[Step], bool] = lambda step: True, log: Path | None = None) -> None:
        self.wants, self.log = wants, log
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self._draft: Callable[[Step], DraftBatch] = method.draft
        self._method = method
        self._drafted: list[str] = []  # for which requests it has just made drafts
        method.draft = self._watched

    def _watched(self, step: Step) -> DraftBatch:
        began, on = time.perf_counter(), self.wants(step)
        try:
            if on:
                draft, self._drafted = self._draft(step), list(step.request_ids)
            else:
                if self._drafted == step.request_ids:
                    self._method.controller.update(step)
                    self._method.update(step)
                self._method.controller.interrupt()
                draft, self._drafted = DraftBatch.roots(step.roots), []
        except Exception as error:
            self.error = error
            raise
        ended = time.perf_counter()
        nodes = np.arange(draft.max_nodes) < draft.counts[:, None]
        ids, gained, depths = list(step.request_ids), step.gained.tolist(), np.where(nodes, draft.depths, 0)
        drafted, total = depths.max(1, initial=0).tolist(), int(nodes.sum())
        kinds = np.where(nodes, draft.kinds, 0)[:, 1:2].max(1, initial=0).tolist()
        self.calls.append(Call(began, ended, on, ids, int(step.contexts.sum()), gained, drafted, total, kinds))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(asdict(self.calls[-1])) + "\n")
        return draft


def calls_in(log: Path) -> list[Call]:
    """None as long as there is no such file."""
    return [Call(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def baseline_seconds(calls: Sequence[Call], batch: int) -> list[float]:
    """Seconds of each step of `batch` requests that verified no drafts, from one call's end to the next one's begin."""
    pairs = [(a, b) for a, b in pairwise(calls) if a.batch == batch and a.ids == b.ids]
    return [after.began - call.ended for call, after in pairs if not any(call.drafted)]


def verdicts(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """(drafted, accepted) tokens of each request in each step, if the request took part in the next one."""
    return [
        (drafted, after.gained[after.ids.index(name)] - 1)
        for call, after in pairwise(calls)
        for name, drafted in zip(call.ids, call.drafted, strict=True)
        if name in after.ids
    ]


@dataclass(frozen=True)
class Run:
    """The answers to some prompts, all in one batch.

    Attributes:
        tokens: of each answer.
        calls: of `Method.draft`, from the first one after all prompts were read.
        seconds: from then to the last token. decoded: tokens since then.
    """

    tokens: list[list[int]]
    calls: list[Call]
    seconds: float
    decoded: int

    @property
    def speed(self) -> float:
        return self.decoded / self.seconds


class Engine:
    """vLLM in this process: compiled in bf16, or eager in fp32 where token identity is at stake."""

    def __init__(
        self, model: Path, speculative: dict[str, Any], *, requests: int = 1, length: int = 1024, exact: bool = False,
        prefixes: bool = False,
    ) -> None:  # fmt: skip
        from vllm import LLM

        options: dict[str, Any] = {"dtype": "float32" if exact else "bfloat16", "enforce_eager": exact, "seed": 0}
        options |= {"max_num_seqs": requests, "max_model_len": length, "enable_prefix_caching": prefixes}
        self.llm = LLM(str(model), speculative_config=speculative, gpu_memory_utilization=0.5, **options)
        self.method = method_of(self.llm.llm_engine)
        self.switch = Switch(self.method)

    def generate(self, prompts: Sequence[list[int]], tokens: int, *, drafting: Drafting) -> Run:
        """Greedy answers of exactly `tokens` tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        switch = self.switch
        switch.wants = drafting if callable(drafting) else lambda step: drafting
        switch.calls.clear()
        how: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(requests, SamplingParams(**how), use_tqdm=False)
        ended = time.perf_counter()
        if switch.error is not None:
            raise RuntimeError("drafting failed") from switch.error
        first = next(i for i, call in enumerate(switch.calls) if call.batch == len(prompts))
        calls, answers = switch.calls[first:], [list(output.outputs[0].token_ids) for output in outputs]
        before = calls[0].contexts - sum(map(len, prompts))
        return Run(answers, calls, ended - calls[0].began, sum(map(len, answers)) - before)


def method_of(llm_engine: Any) -> Any:
    """The `Method` of an engine in this process; None without one of ours."""
    drafter: Any = getattr(llm_engine.model_executor.driver_worker.worker.model_runner, "drafter", None)
    return drafter.guarded.method if hasattr(drafter, "guarded") else None


def in_process(script: str, *options: object) -> Any:
    """The JSON on the last line that a script prints in a process of its own, set up as a CPU engine needs it."""
    command = [sys.executable, script, *map(str, options)]
    done = subprocess.run(command, env=in_process_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def engine_of(
    name: str, model: Path, speculative: dict[str, Any], *, requests: int, length: int = 1024, **options: Any
) -> Iterator[Any]:
    """An `Engine` in this process or an `SglangEngine`, which have one interface.

    Args:
        requests: at a time at most, of `length` tokens at most.
        options: `exact`, and `prefixes`: prompts stay in a cache, so that only the first of each is read.
    """
    if name == "vllm":
        yield Engine(model, speculative, requests=requests, length=length, **options)
    else:
        from bench.lib.sglang_engine import sglang_engine

        with sglang_engine(model, speculative, requests=requests, length=length, **options) as engine:
            yield engine
