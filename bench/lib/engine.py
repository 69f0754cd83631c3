"""Engines in a benchmark, with one interface; drafting is recorded and switched on and off by request."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.results import ROOT
from bench.lib.servers import in_process_environment, programs_first
from freedraft.draft import DraftBatch
from freedraft.step import Step

SKIP_SET_OF_DEMO = ROOT / "configs" / "skip_sets" / "smollm2-135m-instruct-12.json"
LOG, ALGORITHM = "LAYER_SKIP_BENCH_LOG", "layerskip_in_turns"  # for SGLang: variable with the log's path, algorithm


@dataclass(frozen=True)
class Call:
    """One call of `Method.draft`, between two steps of the engine."""

    began: float  # on the clock of `time.perf_counter`
    ended: float
    ids: list[str]  # requests of the step
    contexts: int  # total number of their tokens
    gained: list[int]  # tokens of each from the step that has just ended
    drafted: list[int]  # depth of each draft

    @property
    def batch(self) -> int:
        return len(self.ids)


class Switch:
    """Replaces `method.draft`: if `wants(step)` is false, the method is not called and drafts are roots only. Calls are
    appended to `calls` and to the file `log`, one JSON object per line."""

    def __init__(self, method: Any, wants: Callable[[Step], bool], log: Path | None = None) -> None:
        self.wants, self.log = wants, log
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self._method, self._draft = method, method.draft
        self._drafted: list[str] = []  # requests of the previous call, if it drafted
        method.draft = self._watched

    def _watched(self, step: Step, **how: Any) -> DraftBatch:
        began, ids = time.perf_counter(), list(step.request_ids)
        try:
            if self.wants(step):
                draft, self._drafted = self._draft(step, **how), ids
            else:
                if self._drafted == ids:  # report the result of its last drafts
                    self._method.controller.learn(step)
                    self._method.controller.settle()
                    self._method.update(step)
                self._method.controller.interrupt()
                self._method.unmatched = np.zeros(step.batch_size, np.bool_)
                draft, self._drafted = DraftBatch.roots(step.roots), []
        except Exception as error:
            self.error = error
            raise
        ended, contexts = time.perf_counter(), int(step.contexts.sum())
        nodes = np.arange(draft.max_nodes) < draft.counts[:, None]
        drafted = np.where(nodes, draft.depths, 0).max(1, initial=0).tolist()
        self.calls.append(Call(began, ended, ids, contexts, step.gained.tolist(), drafted))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(asdict(self.calls[-1])) + "\n")
        return draft


@dataclass(frozen=True)
class Run:
    """Answers to prompts that ran in one batch."""

    tokens: list[list[int]]  # of each answer
    calls: list[Call]  # of `Method.draft`, from the first one after prefill
    seconds: float  # from the first call to the last token
    decoded: int  # tokens generated in these seconds

    @property
    def speed(self) -> float:
        return self.decoded / self.seconds


class VllmEngine:
    """vLLM in this process, compiled."""

    def __init__(self, model: Path, speculative: dict[str, Any], *, requests: int = 1, length: int = 1024) -> None:
        from vllm import LLM

        options: dict[str, Any] = {"dtype": "bfloat16", "seed": 0, "gpu_memory_utilization": 0.5}
        options |= {"max_num_seqs": requests, "max_model_len": length}
        self.llm = LLM(str(model), speculative_config=speculative, **options)
        runner: Any = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.method = runner.drafter.guarded.method
        self.drafting = True
        self.switch = Switch(self.method, lambda step: self.drafting)

    def generate(self, prompts: Sequence[list[int]], tokens: int, *, drafting: bool) -> Run:
        """Greedy answers of exactly `tokens` tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self.drafting = drafting
        self.switch.calls.clear()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        ended = time.perf_counter()
        if self.switch.error is not None:
            raise RuntimeError("drafting failed") from self.switch.error
        first = next(i for i, call in enumerate(self.switch.calls) if call.batch == len(prompts))
        calls, answers = self.switch.calls[first:], [list(output.outputs[0].token_ids) for output in outputs]
        before = calls[0].contexts - sum(map(len, prompts))
        return Run(answers, calls, ended - calls[0].began, sum(map(len, answers)) - before)


def register() -> None:
    """Entry point of `sglang.srt.plugins`: layer skipping only for requests that `SglangEngine` names "draft-..."."""
    from freedraft.engines.sglang import registration
    from layerskip_plugin.method import SPEC

    registration.register(replace(SPEC, name=ALGORITHM, factory=f"{__name__}:make_method"))


def make_method(options: Any, context: Any) -> Any:
    from layerskip_plugin.method import SPEC

    method = SPEC.make(options, context)
    Switch(method, lambda step: step.request_ids[0].startswith("draft"), Path(os.environ[LOG]))
    return method


class SglangEngine:
    """SGLang's CPU platform, with the method in a separate process."""

    def __init__(self, engine: Any, log: Path) -> None:
        self._engine, self._log, self._numbers = engine, log, itertools.count()

    def generate(self, prompts: Sequence[list[int]], tokens: int, *, drafting: bool) -> Run:
        """See `VllmEngine.generate`."""
        number = next(self._numbers)
        ids = [f"{'draft' if drafting else 'plain'}-{number}-{i}" for i in range(len(prompts))]
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=list(prompts), sampling_params=sampling, rid=ids)
        logged = [Call(**json.loads(line)) for line in self._log.read_text().splitlines()]
        calls = [call for call in logged if sorted(call.ids) == sorted(ids)]
        decoded = sum(sum(call.gained) for call in calls[1:])
        return Run([o["output_ids"] for o in outputs], calls, calls[-1].began - calls[0].began, decoded)


def plugin(folder: Path, entry_point: str) -> Path:
    """Write to a folder, which is then to be on PYTHONPATH, what makes SGLang's processes call this function."""
    info = folder / "freedraft_bench-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: freedraft-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nbench = {entry_point}\n")
    return folder


@contextmanager
def engine_of(
    name: str, model: Path, speculative: dict[str, Any], *, requests: int, length: int = 1024
) -> Iterator[VllmEngine | SglangEngine]:
    """Start an engine in bf16 for `requests` concurrent requests of at most `length` tokens. SGLang drafts chains of at
    most `num_speculative_tokens`; the other keys of `speculative` are freedraft's options."""
    if name == "vllm":
        yield VllmEngine(model, speculative, requests=requests, length=length)
        return
    from tests.sglang.conftest import sglang_engine

    own = {key: value for key, value in speculative.items() if key not in ("method", "num_speculative_tokens")}
    env = {f"FREEDRAFT_{key.upper()}": str(value) for key, value in own.items()} | {"FREEDRAFT_SHAPE": "chain"}
    nodes = speculative["num_speculative_tokens"] + 1
    options = {"speculative_algorithm": ALGORITHM, "speculative_num_draft_tokens": nodes, "skip_tokenizer_init": True}
    options |= {"dtype": "bfloat16", "max_running_requests": requests}
    options |= {"max_total_tokens": max(8192, 2 * requests * length)}
    with tempfile.TemporaryDirectory() as folder:
        log, installed = Path(folder) / "calls.jsonl", plugin(Path(folder) / "plugin", f"{__name__}:register")
        paths = [str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env |= {LOG: str(log), "PYTHONPATH": os.pathsep.join(paths)}
        sys.path.insert(0, str(installed))
        try:
            with sglang_engine(model, env=env, **options) as engine:
                yield SglangEngine(engine, log)
        finally:
            sys.path.remove(str(installed))


def in_process(script: str, *options: object, env: dict[str, str] | None = None) -> Any:
    """Run a script in a process set up for a vLLM CPU engine, or with `env`; return the JSON on the last line of its
    output. Raises SystemExit: it failed; its last line is the error."""
    command = [sys.executable, script, *map(str, options)]
    env = programs_first(in_process_environment() if env is None else env)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error: " in line]
        raise SystemExit("\n".join([f"{' '.join(command)} failed:", done.stderr[-3000:], *errors[-1:]]))
    return json.loads(done.stdout.splitlines()[-1])
