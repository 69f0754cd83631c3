"""vLLM inside the process of a benchmark, whose drafting is switched on and off between requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.results import ROOT
from bench.lib.servers import in_process_environment
from bench.lib.switch import Call, Switch
from freedraft.step import Step

Drafting = bool | Callable[[Step], bool]
"""Whether the drafter is asked, or in which steps."""
SKIP_SET_OF_DEMO = ROOT / "configs" / "skip_sets" / "smollm2-135m-instruct-12.json"


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
    """A compiled bf16 engine, or an eager fp32 one where token identity is at stake."""

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

    def generate(
        self, prompts: Sequence[list[int]], tokens: int, *, drafting: Drafting, extras: Sequence[dict[str, Any]] = ()
    ) -> Run:
        """Greedy answers of exactly `tokens` tokens; `extras` are what each request sends for the drafter."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        switch = self.switch
        switch.wants = drafting if callable(drafting) else lambda step: drafting
        switch.calls.clear()
        how: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        parameters = [SamplingParams(**how, extra_args=extra or None) for extra in extras or [{}] * len(prompts)]
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
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


def in_process(script: str, *options: object, env: dict[str, str] | None = None, python: str = sys.executable) -> Any:
    """The JSON on the last line that a script prints in a process of its own, set up as a CPU engine needs it."""
    command = [python, script, *map(str, options)]
    done = subprocess.run(command, env=env or in_process_environment(), capture_output=True, text=True)
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
