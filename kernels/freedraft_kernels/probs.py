"""`target_probs`: logits to the distribution that sampling verification must reproduce."""

from __future__ import annotations

import torch


def target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [B, N, V]: the distribution each node's next token is sampled from. Torch only; does not synchronise.

    Filters are skipped where they are None: pass only those that some request uses, the sort they need is the cost.

    Args:
        logits: float [B, N, V], penalties and grammar mask already applied.
        temperatures: float [B]; 0 or less is greedy: one-hot at the argmax.
        top_ks: int [B]; at most this many tokens are kept, ties going to the lower id; below 1 is no limit.
        top_ps: float [B]; the smallest set of likeliest tokens whose mass reaches p. The mass is that before top-k, as
            in SGLang's samplers.
        min_ps: float [B]; tokens of at least this share of the likeliest one's probability.

    Raises:
        ValueError: a wrong shape.
    """
    if logits.dim() != 3:
        raise ValueError(f"logits has shape {list(logits.shape)}, expected [batch, nodes, vocabulary]")
    options = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps}
    for name, option in options.items():
        if option is not None and tuple(option.shape) != (logits.shape[0],):
            raise ValueError(f"{name} has shape {list(option.shape)}, expected [{logits.shape[0]}]")
    logits = logits.float()
    greedy = (temperatures <= 0)[:, None, None]
    probs = torch.softmax(logits / torch.where(greedy, 1.0, temperatures[:, None, None]), -1)
    if top_ks is not None or top_ps is not None or min_ps is not None:
        ranked, token = probs.sort(dim=-1, descending=True, stable=True)
        keep = torch.ones_like(ranked, dtype=torch.bool)
        if top_ks is not None:
            limit = torch.where(top_ks < 1, ranked.shape[-1], top_ks)[:, None, None]
            keep &= torch.arange(ranked.shape[-1], device=ranked.device) < limit
        if top_ps is not None:
            keep &= ranked.cumsum(-1) - ranked < top_ps[:, None, None]
            keep[..., 0] = True
        if min_ps is not None:
            keep &= ranked >= ranked[..., :1] * min_ps[:, None, None]
        ranked = ranked * keep
        probs = torch.zeros_like(probs).scatter_(-1, token, ranked / ranked.sum(-1, keepdim=True))
    first = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, first, probs)
