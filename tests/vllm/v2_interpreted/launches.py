"""What a decoding step of model runner V2 launches, in Triton's interpreter."""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest
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
    (MethodSpeculator, "join"): "join",
    (Trees, "prepare_step"): "prepare trees",
    (Trees, "write_queries"): "join",
}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty"}
WARM, STEPS = 4, 4  # steps before those that are counted, and these


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.phases, self.steps = ["other"], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").split(".")[0]
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        result = func(*args, **(kwargs or {}))
        if aliases and isinstance(result, torch.Tensor):  # not if a copy was made after all
            aliases = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        if not aliases and name not in ALLOCATIONS and self.steps:
            self.steps[-1][self.phases[-1]][0].append(name)
        return result


def count(counter, patch):
    """Count what our phases launch from now on."""
    launch = interpreter.GridExecutor.__call__

    def launched(self, *args, **kwargs):
        if counter.steps:
            for phase in (counter.phases[-1], "order"):
                counter.steps[-1][phase][1].append(self.fn.__name__)
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    patch.setattr(interpreter.GridExecutor, "__call__", launched)
    for (owner, name), phase in PHASES.items():
        patch.setattr(owner, name, within(counter, phase, getattr(owner, name)))


def within(counter, phase, original):
    @functools.wraps(original)
    def called(*args, **kwargs):
        counter.phases.append(phase)
        try:
            return original(*args, **kwargs)
        finally:
            counter.phases.pop()

    return called


def of_steps(llm):
    """What decoding steps of two requests launch, by phase of our own: "eager", PyTorch's operations that would launch
    something on a device, without views and allocations, and "kernels", the names of Triton's; the most of any step
    counted. A phase inside another counts there only. "order": all kernels of the last step, in order; "kept": steps
    after which logits are still referred to."""
    engine, counter, kept = llm.llm_engine, Counter(), 0
    speculator = engine.model_executor.driver_worker.worker.model_runner.speculator
    parameters = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    for i in range(2):
        tokens = [(7 * i + j % 9) % 20 + 2 for j in range(20)]
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=tokens), parameters)
    with pytest.MonkeyPatch.context() as patch, counter:
        count(counter, patch)
        for step in range(WARM + STEPS):
            if step >= WARM:
                counter.steps.append(defaultdict(lambda: ([], [])))
            engine.step()
            kept += speculator._verified is not None
    engine.abort_request(["0", "1"])
    found = {"order": counter.steps[-1]["order"][1], "kept": kept}
    for phase in dict.fromkeys(PHASES.values()):
        eager, kernels = ([step[phase][kind] for step in counter.steps] for kind in (0, 1))
        found[phase] = {"eager": max(map(sorted, eager), key=len), "kernels": max(map(sorted, kernels), key=len)}
    return found
