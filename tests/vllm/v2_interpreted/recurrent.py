"""As `serve.py`, for models with recurrent layers: Mamba's kernels, which vLLM's CPU platform has replacements of.

In place of those that the interpreter does not run, of prompts, are the replacements.
"""

from __future__ import annotations

import importlib

from triton.runtime.interpreter import InterpreterBuilder
from vllm.platforms import current_platform

OPS = "vllm.model_executor.layers.mamba.ops"
PLATFORM = type(current_platform)


def as_on_a_device(work):
    """Call `work` where the platform is none of CPUs."""

    def called(*args, **kwargs):
        is_cpu, PLATFORM.is_cpu = PLATFORM.is_cpu, lambda self: False
        try:
            return work(*args, **kwargs)
        finally:
            PLATFORM.is_cpu = is_cpu

    return called


def take_any_mask_of_loads():
    """As `serve.take_any_mask` of stores."""
    original = InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, *args):
        mask.data = mask.data.astype(bool)
        return original(self, ptrs, mask, *args)

    InterpreterBuilder.create_masked_load = create_masked_load


def main():
    take_any_mask_of_loads()
    convolution = as_on_a_device(importlib.import_module)(f"{OPS}.causal_conv1d")
    as_on_a_device(importlib.import_module)(f"{OPS}.mamba_ssm")
    convolution.causal_conv1d_fn = importlib.import_module(f"{OPS}.cpu.causal_conv1d").causal_conv1d_fn_cpu
    from vllm.v1.worker.gpu import model_runner

    from tests.vllm.v2_interpreted import serve

    model_runner.initialize_mamba_ssu_backend = as_on_a_device(model_runner.initialize_mamba_ssu_backend)
    serve.main()


if __name__ == "__main__":
    main()
