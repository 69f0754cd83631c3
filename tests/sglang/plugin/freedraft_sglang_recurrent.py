"""SGLang's kernels of recurrent layers on a CPU: its Triton ones, by Triton's interpreter; in place of those of prompts
that take no float32, the recurrence in torch."""

import contextlib

CHUNK = 64  # of SGLang's kernels: a state is kept before each chunk of a prompt


def take_kernels():
    import torch
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.mamba import causal_conv1d_triton as convolution
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton, kda_triton
    from sglang.srt.layers.attention.mamba import mamba
    from triton.runtime.autotuner import Autotuner

    from tests.support.interpreter import take_any_mask

    take_any_mask()
    torch.cpu.device = lambda index: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *_: None  # an MTP layer, after it has taken the embedding
    Autotuner._bench = lambda self, *given, config, **named: [0.0]  # there is nothing to time
    for suffix in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{suffix}", convolution.causal_conv1d_fn)
        setattr(mamba, f"causal_conv1d_update{suffix}", convolution.causal_conv1d_update)
    for states in ("mamba_state", "conv_window"):
        scattered = HybridLinearAttnBackend._scatter_speculative_state_with_mask
        setattr(scatter, f"fused_{states}_scatter_with_mask", scattered)
    fused_norm_gate.rms_norm_gated = rms_norm_gated
    gdn_triton.chunk_gated_delta_rule = gated_delta_rule
    kda_triton.chunk_kda = kimi_delta_attention


def gated_delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
    """q, k: [1, T, H, K]; v: [1, T, HV, V]; g: log of the decay, [1, T, HV] or [1, T, HV, K]; beta: [1, T, HV];
    initial_state: [slots, HV, V, K], updated. Returns the output, none, and the states before each chunk."""
    import torch
    import torch.nn.functional as F

    out, kept, repeats = torch.empty_like(v), [], v.shape[2] // k.shape[2]
    q, k = (F.normalize(each[0], dim=-1, eps=1e-6).repeat_interleave(repeats, 1) for each in (q, k))
    decay = (g if g.dim() == 4 else g.unsqueeze(-1))[0].exp().unsqueeze(2)
    ends = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), ends[:-1], ends[1:], strict=True):
        state = initial_state[slot].clone()
        for t in range(start, end):
            if (t - start) % CHUNK == 0:
                kept.append(state.clone())
            state *= decay[t]
            change = (v[0, t] - (state @ k[t].unsqueeze(-1)).squeeze(-1)) * beta[0, t].unsqueeze(-1)
            state += change.unsqueeze(-1) * k[t].unsqueeze(1)
            out[0, t] = (state @ q[t].unsqueeze(-1)).squeeze(-1) * k.shape[-1] ** -0.5
        initial_state[slot] = state
    return out, None, torch.stack(kept).unsqueeze(0)


def kimi_delta_attention(
    *, g, beta, A_log, dt_bias, beta_is_raw, lower_bound, output_intermediate_states, cu_seqlens, track_state,
    track_chunk_idx, **given,
):  # fmt: skip
    """As `gated_delta_rule`. track_state: [B, HV, V, K], gets the state before chunk `track_chunk_idx` of each request;
    -1 for none."""
    import torch.nn.functional as F

    raw = g.float() + (0 if dt_bias is None else dt_bias.view(g.shape[-2:]))
    rate = A_log.float().view(-1, 1).exp()
    g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * (rate * raw).sigmoid()
    beta = beta.sigmoid() if beta_is_raw else beta
    out, _, states = gated_delta_rule(g=g, beta=beta, cu_seqlens=cu_seqlens, **given)
    if track_state is not None:
        first = (-(-cu_seqlens.diff() // CHUNK)).cumsum(0).roll(1)
        first[0] = 0
        for row, index in enumerate(track_chunk_idx.tolist()):
            if index >= 0:
                track_state[row] = states[0, int(first[row]) + index]
    return (out, states) if output_intermediate_states else out


def rms_norm_gated(x, gate, weight, bias, activation, *, eps, **_):
    import torch.nn.functional as F

    normed = F.rms_norm(x, x.shape[-1:], weight, eps)
    return normed * (gate.sigmoid() if activation == "sigmoid" else F.silu(gate))
