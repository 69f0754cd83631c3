"""What a decoding step of model runner V2 launches: by phase in Triton's interpreter, by driver calls on a GPU."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from freedraft.engines.vllm.v2.drafting import HostDrafting
from freedraft.engines.vllm.v2.speculator import MethodSpeculator
from freedraft.engines.vllm.v2.trees import Trees

PHASES = {
    (RejectionSampler, "_verify"): "match",
    (Sampler, "sample"): "sample",  # the engine's own
    (MethodSpeculator, "keep_logits"): "take logits",
    (HostDrafting, "recycle"): "take logits",
    (HostDrafting, "copy_gained"): "copy gained",
    (MethodSpeculator, "propose"): "propose",
    (MethodSpeculator, "reach"): "reach",
    (Trees, "begin_step"): "prepare trees",
    (Trees, "write_queries"): "reach",
}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty"}
WARM, STEPS = 4, 4  # steps before those that are counted, and these


class Counter(TorchDispatchMode):
    """Counts from the first of `steps` on. Of each one, by phase: operations of PyTorch, and kernels of Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.phases, self.steps = ["other"], list[dict[str, tuple[list[str], list[str]]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").split(".")[0]
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        result = func(*args, **(kwargs or {}))
        if aliases and isinstance(result, torch.Tensor):  # not if a copy was made after all
            aliases = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        if not aliases and name not in ALLOCATIONS and self.steps:
            self.steps[-1][self.phases[-1]][0].append(name)
        return result

    def within(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.phases.append(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self.phases.pop()

        return called

    def patches(self) -> ExitStack:
        """Count kernels, and what our phases launch, until it is closed."""
        launch, stack = interpreter.GridExecutor.__call__, ExitStack()

        def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.steps:
                for phase in (self.phases[-1], "order"):
                    self.steps[-1][phase][1].append(executor.fn.__name__)
            with _disable_current_modes():
                return launch(executor, *args, **kwargs)

        stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", launched))
        for (owner, name), phase in PHASES.items():
            stack.enter_context(patch.object(owner, name, self.within(phase, getattr(owner, name))))
        return stack


def add_requests(engine: Any) -> None:
    parameters = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    for i in range(2):
        tokens = [(7 * i + j % 9) % 20 + 2 for j in range(20)]
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=tokens), parameters)


def of_steps(llm: Any) -> dict[str, Any]:
    """What decoding steps of two requests launch, by phase of our own: "eager", PyTorch's operations that would launch
    something on a device, without views and allocations, and "kernels", the names of Triton's; the most of any step
    counted. A phase inside another counts there only. "order": all kernels of the last step, in order; "kept": steps
    after which logits are still referred to."""
    engine, counter, kept = llm.llm_engine, Counter(), 0
    speculator = engine.model_executor.driver_worker.worker.model_runner.speculator
    add_requests(engine)
    with counter.patches(), counter:
        for step in range(WARM + STEPS):
            if step >= WARM:
                counter.steps.append(defaultdict(lambda: ([], [])))
            engine.step()
            kept += getattr(speculator, "next", None) is not None and speculator.next.logits is not None
    engine.abort_request(["0", "1"])
    found: dict[str, Any] = {"order": counter.steps[-1]["order"][1], "kept": kept}
    for phase in dict.fromkeys(PHASES.values()):
        eager, kernels = ([step[phase][kind] for step in counter.steps] for kind in (0, 1))
        found[phase] = {"eager": max(map(sorted, eager), key=len), "kernels": max(map(sorted, kernels), key=len)}
    return found


def of_driver(llm: Any) -> dict[str, float]:
    """How often such a step calls each function of CUDA's runtime and driver: kernels, graphs, copies, events."""
    engine, kinds = llm.llm_engine, torch.profiler.ProfilerActivity
    add_requests(engine)
    for _ in range(WARM):
        engine.step()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as found:
        for _ in range(STEPS):
            engine.step()
    engine.abort_request(["0", "1"])
    return {one.key: one.count / STEPS for one in found.key_averages() if re.match("cu(da)?[A-Z]", one.key)}
