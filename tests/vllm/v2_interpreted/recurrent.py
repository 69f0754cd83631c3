"""As `serve.py`, for models with recurrent layers: kernels of devices, which vLLM's CPU platform has replacements of.

In place of those that the interpreter does not run, of prompts, are the replacements. WRONG_STATES=1: where drafts were
accepted, the next step begins with the state of one token before. ON_TOP=1: as `on_top.py`.
"""

import functools
import importlib
import itertools
import os
import sys

import torch
import triton.language as tl
from torch.nn.functional import normalize, softplus
from vllm.platforms import current_platform

from tests.support.interpreter import take_any_mask

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


def call_by_name():
    """Operations of Triton that other modules have imported: the interpreter puts its own into Triton's alone."""

    def called(name):
        return lambda x: getattr(tl, name)(x)

    names = [name for name in sys.modules if ".flash_linear_attention.ops" in name or ".third_party.kda" in name]
    for module in map(sys.modules.get, names):
        for name in ("exp", "exp2", "log", "log2"):
            if getattr(module, name, None) is getattr(tl, name):
                setattr(module, name, called(name))


def delta_rule(_, q, k, v, g, beta, initial_state, cu_seqlens, use_qk_l2norm_in_kernel=True, **more):
    """The gated delta rule of prompts, token by token; the kernel takes no float32. Tokens are [1, tokens, heads, ...],
    states [prompts, heads, values, keys]."""
    assert not use_qk_l2norm_in_kernel
    q, k = (x[0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    states, out = initial_state.clone(), torch.empty_like(v)
    for state, (start, end) in zip(states, itertools.pairwise(cu_seqlens.tolist()), strict=True):
        for t in range(start, end):
            state *= g[0, t].exp().view(len(state), 1, -1)
            known = torch.einsum("hvk,hk->hv", state, k[t])
            state += torch.einsum("hv,hk->hvk", (v[0, t] - known) * beta[0, t][:, None], k[t])
            out[0, t] = torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
    return out, states


def kimi_delta_attention(_, q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound, initial_state, cu_seqlens, **more):
    """As `delta_rule`, where each key's channel has a decay of its own."""
    assert lower_bound is None
    g = -A_log.exp()[:, None] * softplus(raw_g + g_bias.view(raw_g.shape[-2:]))
    q, k = (normalize(x, dim=-1) for x in (q, k))
    return delta_rule(None, q, k, v, g, raw_beta.sigmoid(), initial_state, cu_seqlens, False)


def take_kimi_linear():
    """That of ROCm, since the one of CUDA needs CUTLASS; its latent attention in pages of any size."""
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layer
    from vllm.models import kimi_k3
    from vllm.models.kimi_k3.amd import linear
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    from tests.vllm.v2_interpreted import latent

    kimi_k3.KimiLinearForCausalLM = linear.KimiLinearForCausalLM
    kda.chunk_kda_with_fused_gate = functools.partial(kimi_delta_attention, None)
    CPUMLABackend.supports_block_size = classmethod(lambda cls, size: size is None or size % 16 == 0)
    latent.decode_drafts()

    def initial_states(states, slots, known):
        return states[slots.long()] * known.view(-1, *[1] * (states.dim() - 1))

    layer.gather_initial_states = initial_states


def begin_with_older_states():
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    original = MambaHybridModelState.postprocess_state

    def postprocess_state(self, *args, **more):
        original(self, *args, **more)
        self.num_accepted_tokens_gpu.sub_(1).clamp_(min=1)

    MambaHybridModelState.postprocess_state = postprocess_state


def main():
    take_any_mask()
    convolution = as_on_a_device(importlib.import_module)(f"{OPS}.causal_conv1d")
    as_on_a_device(importlib.import_module)(f"{OPS}.mamba_ssm")
    convolution.causal_conv1d_fn = importlib.import_module(f"{OPS}.cpu.causal_conv1d").causal_conv1d_fn_cpu
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.short_conv import ShortConv
    from vllm.v1.worker.gpu import model_runner

    # Those of CPUs know nothing of drafts.
    ShortConv.forward_native = ShortConv.forward_cuda
    gdn.QwenGatedDeltaNetAttention.forward_cpu = gdn.QwenGatedDeltaNetAttention.forward_cuda
    gdn.ChunkGatedDeltaRule.forward_native = delta_rule
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec  # the replacement has states of ends of steps alone
    take_kimi_linear()
    call_by_name()
    if os.environ.get("WRONG_STATES"):
        begin_with_older_states()
    from tests.vllm.v2_interpreted import on_top, serve

    model_runner.initialize_mamba_ssu_backend = as_on_a_device(model_runner.initialize_mamba_ssu_backend)
    (on_top if os.environ.get("ON_TOP") else serve).main()


if __name__ == "__main__":
    main()
