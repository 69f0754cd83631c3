"""Where the time of a decoding step goes: stock vLLM on model runner V2, random weights, one engine for each arm.

    python bench/step_times.py --json build/step-times.json                                 # an 8B model's shape
    python bench/step_times.py --arms plain fixed --trees --lengths 7 15 --batches 1 --temperatures 0 1

Microseconds of a step: median, mean, and of the fastest twentieth. Of the host, from the moment when the last step's
tokens are there and it waits for them: wake-up, until it sees them; append, to what it knows of the requests; draft;
write, where the copy is made from; launch, until the model is launched. Together they are the window, in which the
device lacks work. In plain steps launch begins once the inputs are prepared. prepare: vLLM's own work before that;
propose: ours after the launch, hidden under the model.
Of the device: model, until the tokens are there; inputs, until the next step lacks only its drafts; bubble, until its
model begins. Together they are the step. "launches" counts what two requests launch (`bench/lib/launches.py`).

Without a GPU a tiny model runs in Triton's interpreter, and the time in its kernels is left out of the host's.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.forced import GRAPHS, LLAMA, OWN, TINY
from bench.lib.engine import in_process
from bench.lib.machine import gpu, machine, rounded, versions
from bench.lib.results import PACKAGES, ROOT, write_json
from bench.lib.servers import in_process_environment
from bench.lib.tables import markdown

SSSD = {"method": "sssd"}
ARMS: dict[str, dict[str, Any] | None] = {"plain": None, "auto": SSSD}
ARMS |= {"fixed": SSSD | {"policy": "fixed", "num_speculative_tokens": 7}}
ARMS |= {"head": {"method": "eagle"}, "sssd+head": {"method": "sssd+eagle", "policy": "fixed"}}  # a random head of K
K = 3
INTERPRETED = ROOT / "tests" / "vllm" / "v2_interpreted"
WARM, MOST = 10, 32  # steps of a cell before those that are measured; tokens of a step at most
WINDOW = "wake-up", "append", "draft", "write", "launch"
STEP = "model", "inputs", "bubble"
COLUMNS = *WINDOW, "window", "prepare", "propose", *STEP, "step"
ON_DEVICE = {"ready", "model", "tokens"}


class Meter:
    """Stamps of steps, by name: seconds of the host's clock, and an event of the device's stream for some.

    Attributes:
        steps: stamps of each. left_out: seconds that the host's clock leaves out.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.on, self.left_out = cuda, False, 0.0
        self.steps: list[dict[str, Any]] = []

    def now(self) -> float:
        return time.perf_counter() - self.left_out

    def mark(self, name: str) -> None:
        """The first of a name in a step counts, but for the tokens: what comes last is waited for."""
        if self.on and self.steps and (name == "tokens" or name not in self.steps[-1]):
            event = event_now() if self.cuda and name in ON_DEVICE else None
            self.steps[-1][name] = self.now(), event

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Stamp each call of this function, which must exist."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.mark(before)
            result = original(*args, **kwargs)
            if after:
                self.mark(after)
            return result

        setattr(owner, name, called)

    def install(self, runner: Any) -> None:
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        owner: Any = GPUModelRunner
        execute = owner.execute_model

        @functools.wraps(execute)
        def execute_model(this: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = scheduled.num_scheduled_tokens
            if self.on:
                self.steps.append({"requests": len(tokens), "most": max(tokens.values(), default=0)})
            self.mark("entered")
            return execute(this, scheduled, *args, **kwargs)

        def called(*_: Any) -> None:
            self.mark("model")
            self.mark("launched")

        owner.execute_model = execute_model
        self.around(type(runner.model_state), "prepare_inputs", "ready")
        self.around(ModelCudaGraphManager, "run_fullgraph", "model", "launched")
        runner.model.register_forward_pre_hook(called)  # without a graph
        self.around(owner, "postprocess_sampled", after="tokens")
        if runner.speculator is not None:
            self.install_ours()
        if not self.cuda:
            self.leave_kernels_out()

    def install_ours(self) -> None:
        from freedraft.engines.vllm.v2 import drafting
        from freedraft.engines.vllm.v2.requests import GainedTokens, Requests
        from freedraft.engines.vllm.v2.speculator import MethodSpeculator
        from freedraft.guarded_method import GuardedMethod

        self.around(GainedTokens, "copy", after="tokens")
        self.around(GainedTokens, "wait", "asked", "arrived")
        self.around(Requests, "append", after="append")
        self.around(GuardedMethod, "step", after="draft")
        self.around(drafting, "write_drafts", after="write")
        self.around(MethodSpeculator, "propose", "proposing", "proposed")
        if not self.cuda:  # as on a device, where drafts pay
            gained: Any = GainedTokens
            gained.seconds_since = lambda this, other: 0.01 + 1e-5 * this.query_tokens

    def leave_kernels_out(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.left_out += time.perf_counter() - started

        InterpretedFunction.run = timed

    def figures(self, batch: int, anchors: list[tuple[float, Any]]) -> dict[str, Any]:
        """Times of the steps that decode for `batch` requests. Where some have drafts, the others are left out."""
        on_host = host_clock(*anchors) if self.cuda else lambda stamp: stamp[0]
        pairs = [(one, two) for one, two in pairwise(self.steps) if "tokens" in one and "launched" in two]
        pairs = [(one, two) for one, two in pairs if one["requests"] == two["requests"] == batch]
        pairs = [(one, two) for one, two in pairs if max(one["most"], two["most"]) <= MOST][WARM:]
        drafting = [(one, two) for one, two in pairs if "write" in two]
        rows = [times(one, two, on_host) for one, two in drafting or pairs]
        us = {name: summary([row[name] for row in rows]) for name in rows[0]}
        return {"steps": len(pairs), "drafting": len(drafting), "us": us}


def summary(values: list[float]) -> dict[str, float]:
    median, fast = np.percentile(values, [50, 5]).tolist()
    return {"median": median, "fast": fast, "mean": float(np.mean(values))}


def times(step: dict[str, Any], following: dict[str, Any], on_host: Callable[[Any], float]) -> dict[str, float]:
    """Microseconds of a step: of the device's, and of the host's after its tokens."""
    seconds = {}
    if "write" in following:
        at = {name: following[name][0] for name in ("append", "draft", "write")} | {"wake-up": following["arrived"][0]}
        at["launch"] = following["launched"][0]
        began = max(following["asked"][0], on_host(step["tokens"]))
        ends = [began, *(at[name] for name in WINDOW)]
        seconds = {name: end - start for name, (start, end) in zip(WINDOW, pairwise(ends), strict=True)}
        seconds["window"] = at["launch"] - began
    else:
        seconds["launch"] = following["launched"][0] - following["ready"][0]
    seconds["prepare"] = following["ready"][0] - following["entered"][0]
    if "proposed" in step:
        seconds["propose"] = step["proposed"][0] - step["proposing"][0]
    stamps = step["model"], step["tokens"], following["ready"], following["model"]
    seconds |= {name: between(*pair) for name, pair in zip(STEP, pairwise(stamps), strict=True)}
    seconds["step"] = between(step["model"], following["model"])
    return {name: 1e6 * value for name, value in seconds.items()}


def between(one: Any, two: Any) -> float:
    """Seconds on the device, or on the host where the device's work is done when it is called."""
    return float(two[0] - one[0] if one[1] is None else 1e-3 * one[1].elapsed_time(two[1]))


def event_now() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def anchor() -> tuple[float, Any]:
    """One moment on the host's clock and on the device's: the middle of the fastest of 20 round trips."""
    found = []
    for _ in range(20):
        started = time.perf_counter()
        event = event_now()
        event.synchronize()
        found.append((time.perf_counter() - started, started, event))
    took, started, event = min(found, key=lambda trip: trip[0])
    return started + took / 2, event


def host_clock(first: tuple[float, Any], last: tuple[float, Any]) -> Callable[[Any], float]:
    """From a stamp on the device to the host's clock, between two anchors; the clocks drift."""
    rate = (last[0] - first[0]) / first[1].elapsed_time(last[1])
    return lambda stamp: first[0] + rate * float(first[1].elapsed_time(stamp[1]))


def measure(llm: Any, meter: Meter, batch: int, temperature: float, steps: int, prompt: int) -> dict[str, Any]:
    """Figures of one cell."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine, names = llm.llm_engine, [f"{batch}-{temperature}-{i}" for i in range(batch)]
    parameters = SamplingParams(temperature=temperature, max_tokens=10**6, ignore_eos=True, detokenize=False)
    meter.steps, meter.on = [], True
    if meter.cuda:
        import torch

        torch.cuda.synchronize()
    anchors = [anchor()] if meter.cuda else []
    for i, name in enumerate(names):
        tokens = [(7 * i + j * (j % 13)) % 200 + 5 for j in range(prompt)]
        engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), parameters)
    decoding = 0
    while decoding < WARM + steps + 3 and engine.has_unfinished_requests():
        engine.step()
        last = meter.steps[-1] if meter.steps else {"requests": 0, "most": 0}
        decoding += last["requests"] == batch and last["most"] <= MOST
    meter.on = False
    engine.abort_request(names)
    if meter.cuda:
        torch.cuda.synchronize()
        anchors.append(anchor())
    return {"batch": batch, "temperature": temperature} | meter.figures(batch, anchors)


def run(given: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Start the engines of some arms in this process, one after the other, and measure them."""
    import torch

    cuda, prompt = torch.cuda.is_available(), given["prompt"]
    options = {"max_num_seqs": max(given["batches"]), "max_model_len": prompt + MOST * (given["steps"] + WARM + 8)}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False, "seed": 0}
    if cuda:
        options |= {"gpu_memory_utilization": 0.85} | GRAPHS
    else:
        from tests.vllm.v2_interpreted import serve

        serve.take_any_mask()
        serve.filter_as_on_cpus()
        serve.schedule_asynchronously()
        options |= {"gpu_memory_utilization": 0.2, "enforce_eager": True}
    return [of_engine(given, own, str(folder), options, cuda) for own in given["arms"]]


def of_engine(given: dict[str, Any], own: Any, folder: str, options: dict[str, Any], cuda: bool) -> dict[str, Any]:
    from vllm import LLM

    from bench.lib import launches

    started = time.perf_counter()
    own = own and own | ({"model": f"{folder}/head"} if "model" in own else {})
    llm = LLM(folder, speculative_config=own, **options)
    result: dict[str, Any] = {"speculative": own, "start_s": time.perf_counter() - started}
    meter = Meter(cuda)
    meter.install(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    cells = [(batch, temperature) for batch in given["batches"] for temperature in given["temperatures"]]
    result["cells"] = [measure(llm, meter, *one, given["steps"], given["prompt"]) for one in cells]
    try:
        result["launches"] = launches.of_driver(llm) if cuda else launches.of_steps(llm)
    except RuntimeError as error:  # of the profiler
        result["launches"] = {"error": str(error)}
    llm.llm_engine.engine_core.shutdown()
    return result


def of_arms(given: dict[str, Any], folder: Path, cuda: bool) -> list[dict[str, Any]]:
    """Measure arms in a process of their own. Raises SystemExit: one failed."""
    env = {**os.environ, **OWN} if cuda else in_process_environment()
    paths = os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "kernels")
    env |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if not cuda:
        env["PYTHONPATH"] = os.pathsep.join([str(INTERPRETED), env["PYTHONPATH"]])
        env["OMP_NUM_THREADS"], env["INTERPRETED_ATTENTION"] = "1", "flash" if given["trees"] else ""
    found: list[dict[str, Any]] = in_process(__file__, "--one", json.dumps(given, default=str), folder, env=env)
    return found


def shown(arms: dict[str, Any]) -> str:
    """The table of medians."""
    rows = []
    for name, found in arms.items():
        for one in found["cells"]:
            medians = {name: f"{values['median']:,.0f}" for name, values in one["us"].items()}
            us = [medians.get(column, "") for column in COLUMNS]
            rows.append([name, one["batch"], one["temperature"], one["steps"], one["drafting"], *us])
    return markdown(["arm", "requests", "temperature", "steps", "drafted for", *COLUMNS], rows)


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        print("\n" + json.dumps(run(json.loads(sys.argv[2]), Path(sys.argv[3]))), flush=True)
        os._exit(0)  # engines' threads may not end
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--trees", action="store_true", help="drafts are trees, not chains")
    parser.add_argument("--lengths", type=int, nargs="+", help="most draft tokens; default: auto's own, 7 for fixed")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--steps", type=int, default=100, help="of each cell")
    parser.add_argument("--shape", type=Path, help="a model's config.json; default: an 8B Llama's, tiny without a GPU")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt; default: 512, 24 without a GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = gpu().get("gpu", "")
    shape = json.loads(args.shape.read_text()) if args.shape else LLAMA if device else TINY | {"vocab_size": 512}
    args.prompt = args.prompt or (512 if device else 24)
    figures: dict[str, Any] = {"device": device or machine()["cpu"], "versions": versions(*PACKAGES), "shape": shape}
    figures |= {"arms": {}, "errors": {}}
    drafts, arms = "tree" if args.trees else "chain", dict[str, Any]()
    for name in args.arms:
        own = ARMS[name]
        if own and "head" in name:
            arms[name] = own | {"model": "head", "num_speculative_tokens": K}
            continue
        for length in args.lengths if own and args.lengths else [None]:
            more = {} if length is None else {"num_speculative_tokens": length}
            arms[name if length is None else f"{name} {length}"] = own and own | {"shape": drafts} | more
    with tempfile.TemporaryDirectory() as temporary:
        for folder, layers in ((Path(temporary), {}), (Path(temporary) / "head", {"num_hidden_layers": 1})):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(shape | layers))
        for names in [[name] for name in arms] if device else [[*arms]]:  # an engine takes all of a device's memory
            try:
                given = vars(args) | {"arms": [arms[name] for name in names]}
                figures["arms"] |= zip(names, of_arms(given, Path(temporary), bool(device)), strict=True)
            except SystemExit as error:
                figures["errors"][", ".join(names)] = str(error).splitlines()[-1]
                print(error, file=sys.stderr)
            write_json(args.json, rounded(figures, 1))  # so far
    print("microseconds of a step, medians\n" + shown(figures["arms"]))
    return int(bool(figures["errors"]))


if __name__ == "__main__":
    sys.exit(main())
