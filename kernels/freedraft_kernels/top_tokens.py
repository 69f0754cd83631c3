"""`top_tokens`: the likeliest next tokens at each node, and their log-probabilities."""

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton

_LAST = (1 << 32) - 1
_BLOCK = 64  # tokens per maximum


def top_tokens(logits: Tensor, count: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row, likeliest first; of equals, the lower id. Does not synchronise.

    Args:
        logits: float [R, V]; -inf is never among the likeliest, and a row with NaN or +inf has no likeliest tokens.
        count: at most V.

    Returns:
        int32 [R, count], tokens, -1 where there are fewer; float32 [R, count], their natural logarithms of
        probabilities, -inf there.
    """
    assert logits.dim() == 2 and 1 <= count <= logits.shape[1]
    if use_triton(logits.device, backend):
        from freedraft_kernels.device.top_tokens import launch_top_tokens

        return launch_top_tokens(logits, count, _BLOCK)
    keys = _top_keys(logits, count).topk(count, -1).values
    values, tokens = _ordered(keys >> 32).to(torch.int32).view(torch.float32), _LAST - (keys & _LAST)
    log_probs = values - torch.logsumexp(logits.float(), -1, keepdim=True)
    finite = log_probs.isfinite()
    return torch.where(finite, tokens, -1).to(torch.int32), torch.where(finite, log_probs, -torch.inf)


def _ordered(bits: Tensor) -> Tensor:
    """int64: maps a float32's bits (int64, signed) to an integer of the same order, and back."""
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64, in the order of the values; ties in descending order of ids. NaN counts as -inf."""
    values = torch.where(values.isnan(), -torch.inf, values.float()) + 0.0  # -0.0 equals 0.0
    return (_ordered(values.view(torch.int32).to(torch.int64)) << 32) | (_LAST - ids)


def _top_keys(logits: Tensor, count: int) -> Tensor:
    """int64 [R, K], keys that include the largest `count` of each row. These lie in the `count` blocks with the largest
    maxima, so one pass over the logits is enough."""
    vocab = logits.shape[1]
    whole = vocab // _BLOCK
    tokens = torch.arange(whole * _BLOCK, vocab, device=logits.device)
    keys = _keys(logits[:, whole * _BLOCK :], tokens)
    if whole:
        blocks = logits[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK))
        number = torch.arange(whole, device=logits.device)
        best = _LAST - (_keys(blocks.amax(-1), number).topk(min(count, whole), -1).values & _LAST)
        inside = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK))
        tokens = best[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
        keys = torch.cat((_keys(inside, tokens).flatten(1), keys), 1)
    return torch.nn.functional.pad(keys, (0, max(0, count - keys.shape[1])), value=torch.iinfo(torch.int64).min)
