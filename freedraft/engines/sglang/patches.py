"""The places where SGLang 0.5.23 offers no extension point. Each: one small function, why it is there, what it
replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

ASSIGN_SLOTS = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
ROW_ROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """`req_to_token[row, start:end] = slots` for each of B requests; SGLang has it in Triton and for AMX only.
    out_cache_loc: [sum of (end - start)], the slots, request after request."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def room_for_drafts(original: Callable[[], int], names: Callable[[], set[str]]) -> int:
    """Columns of `req_to_token` behind the longest context. With pages of one token SGLang adds room for one tree, and
    reserves slots for two at each step, which a request near that context has written over the next one's row."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    columns = original()
    if (get_spec().speculative_algorithm or "").upper() in names():
        columns = max(columns, get_alloc_reserve_per_decode() + 4)
    return columns


class _AsNgram:
    """The speculation settings under the one algorithm name that SGLang's corpus endpoints accept."""

    speculative_algorithm = "NGRAM"

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


def let_corpora_through(names: Callable[[], set[str]]) -> None:
    """The corpus endpoints compare the algorithm with "NGRAM" by name, in the front-end process, and refuse ours
    although the scheduler's corpus manager serves it. This gives that one module a `get_spec` of its own.

    Not by SGLang's hook registry: it would replace the function in every module."""
    from sglang.srt.managers import tokenizer_control_mixin as module

    original = module.get_spec

    @functools.wraps(original)
    def get_spec() -> Any:
        spec = original()
        return _AsNgram(spec) if spec.speculative_algorithm in names() else spec

    module.get_spec = get_spec
