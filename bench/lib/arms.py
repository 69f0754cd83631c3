"""vLLM engines as arms of a benchmark: each in a process of its own, driven step by step at a constant concurrency.

Several engines can be loaded at once; one works while the others wait, so arms can take turns within one run.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.lib.engine import method_of


@dataclass(frozen=True)
class Run:
    """The answers to some prompts.

    Attributes:
        seconds: wall time of all of them. tokens: how many were generated. answers: token ids by prompt.
        steps: how many the engine took. trace: figures of each step, if they were asked for.
    """

    seconds: float
    tokens: int
    answers: list[list[int]]
    steps: int
    trace: list[dict[str, float]]


class Arms:
    """An engine in a child process; with a method of ours, its policy can be changed between runs."""

    def __init__(self, model: Path, speculative: dict[str, Any] | None, **engine: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, str(model), speculative, engine), daemon=True)
        self._process.start()

    def wait(self) -> None:
        """Return when the engine is up."""
        self._receive()

    def policy(self, name: str, max_draft_tokens: int | None = None) -> None:
        """Decide from now on by this policy, with at most so many draft tokens per request."""
        self._call("policy", name, max_draft_tokens)

    def generate(self, prompts: Sequence[list[int]], concurrency: int, max_tokens: int, *, trace: bool = False) -> Run:
        """Greedy answers of exactly `max_tokens` tokens to prompts of token ids, so many at a time."""
        return self._call("generate", [list(p) for p in prompts], concurrency, max_tokens, trace)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()

    def _call(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._receive()

    def _receive(self) -> Any:
        ok, result = self._pipe.recv()
        if not ok:
            raise RuntimeError(result)
        return result


def _serve(pipe: Connection, model: str, speculative: dict[str, Any] | None, engine: dict[str, Any]) -> None:
    try:
        from vllm import LLM

        llm = LLM(model, seed=0, speculative_config=speculative, disable_log_stats=True, **engine)
        worker = _Worker(llm)
        pipe.send((True, None))
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        raise
    while (request := pipe.recv()) is not None:
        try:
            pipe.send((True, getattr(worker, request[0])(*request[1:])))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class _Worker:
    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.method = method_of(self.engine)
        self.controller = getattr(self.method, "controller", None)
        self.count = 0

    def policy(self, name: str, max_draft_tokens: int | None) -> None:
        from freedraft.cost.policies import Fixed, Knee

        assert self.controller is not None, "this arm has no drafter of ours"
        method, profile = self.method, self.controller.profile
        limit = self.controller.max_draft_tokens if max_draft_tokens is None else max_draft_tokens
        policies = {"fixed": Fixed, "knee": Knee}
        method.controller = policies[name](profile, limit) if name in policies else self.controller
        method.min_score = profile.token_cost if name == "knee" else 0.0

    def generate(self, prompts: list[list[int]], concurrency: int, max_tokens: int, trace: bool) -> Run:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        waiting = list(enumerate(prompts))[::-1]
        answers: list[list[int]] = [[] for _ in prompts]
        names: dict[str, int] = {}
        records: list[dict[str, float]] = []
        steps, started = 0, time.perf_counter()
        while waiting or names:
            while waiting and len(names) < concurrency:
                i, prompt = waiting.pop()
                self.count += 1
                name = f"{self.count}"
                names[name] = i
                self.engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), params)
            began = time.perf_counter()
            outputs = self.engine.step()
            steps += 1
            if trace:
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                records.append({"seconds": time.perf_counter() - began, "tokens": tokens} | self._decided())
            for output in outputs:
                if output.finished:
                    answers[names.pop(output.request_id)] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - started
        return Run(seconds, sum(map(len, answers)), answers, steps, records)

    def _decided(self) -> dict[str, float]:
        if self.controller is None:
            return {}
        return {"draft_tokens": float(self.controller.budget), "gain": float(self.controller.gain)}
