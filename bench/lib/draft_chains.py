"""Drafts of a skip set from every position of a text, and their cost, without an engine."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerskip_plugin.calibrate.host_model import HEAD_ROWS, HostModel, Text
from layerskip_plugin.skip_set import SkipSet


@torch.inference_mode()
def draft_chains(
    host: HostModel, skip: SkipSet, text: Text, past: Tensor, length: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return greedy drafts of `length` tokens from some positions of a text, as rounds of an engine would draft them.

    A round at position t reads the whole model's KV before t and its own KV from t on.

    Args:
        past: int64[N], the positions.

    Returns:
        int64[N, length] tokens, float32[N, length, 10] largest probabilities, float32[N, length] entropies.
    """
    past = past.to(text.tokens.device)
    token = text.tokens[past]
    near: list[tuple[Tensor, Tensor] | None] = [None] * host.n_layers
    steps = []
    positions = torch.arange(len(text) + length, device=past.device)
    cos, sin = (x[0] for x in host.rotary(text.final[:1], positions[None]))
    for step in range(length):
        h = host.embed(token)
        for index, layer in enumerate(host.layers):
            if index not in skip.attention:
                q, k, v = host.project(layer, h, cos[past + step], sin[past + step])
                k, v = k[:, None], v[:, None]
                cache = near[index]
                if cache is not None:
                    k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
                near[index] = k, v
                h = h + layer.self_attn.o_proj(host.attend(text, index, q, past, k, v).flatten(1))
            if index not in skip.mlp:
                h = h + layer.mlp(layer.post_attention_layernorm(h))
        steps.append(_top(host, host.norm(h)))
        token = steps[-1][0]
    tokens, top, entropy = (torch.stack(parts, 1).numpy(force=True) for parts in zip(*steps, strict=True))
    return tokens, top, entropy


def _top(host: HostModel, final: Tensor) -> list[Tensor]:
    """Return best token, ten largest probabilities and entropy for float32[N, hidden] normed last states."""
    parts = []
    for rows in final.split(HEAD_ROWS):
        log_p = host.head(rows).log_softmax(-1)
        values, indices = log_p.topk(10)
        parts.append((indices[:, 0], values.exp(), -(log_p.exp() * log_p).sum(-1)))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def weight_share(host: HostModel, skip: SkipSet) -> float:
    """Return the weights that a draft pass reads as a share of those of a whole pass, head included."""
    parts = [part for layer in host.layers for part in (layer.self_attn, layer.mlp)]
    sizes = np.array([sum(p.numel() for p in part.parameters()) for part in parts])
    head = host.head.weight.numel()
    return float((sizes[~np.array(skip.bits, bool)].sum() + head) / (sizes.sum() + head))
