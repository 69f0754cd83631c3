"""`Step`: a drafter's input for one decoding step; `room`: its capacities; `EngineContext`: the engine drafted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch

TOP_TOKENS = 8  # likeliest next tokens kept per node


class NodeLogits(NamedTuple):
    """The likeliest next tokens at the nodes that a step has verified, for B requests of at most N nodes."""

    request_ids: Sequence[str]  # B ids, of which some may have finished
    draft: DraftBatch  # [B, N], the trees that were verified, without depths and scores
    # [B, N, TOP_TOKENS], likeliest first, -1 for none; undefined at padding.
    top_tokens: NDArray[np.int32]
    # [B, N, TOP_TOKENS], natural logarithms, before temperature and filters; -inf for none.
    top_log_probs: NDArray[np.float32]
    contexts: NDArray[Any] | None = None  # int [B], tokens of each request up to its root; None: all that it has


@dataclass(frozen=True)
class Step:
    """One decoding step of B requests, before its draft. The last step gave request b the tokens
    `tokens[starts[b]:ends[b]]`, at least one."""

    request_ids: Sequence[str]  # B ids, in the order of the engine's batch
    tokens: NDArray[np.int32]  # [T], an array that contains the newly accepted tokens
    starts: NDArray[np.int64]  # [B]
    ends: NDArray[np.int64]  # [B]
    contexts: NDArray[np.int32]  # [B], tokens of each request, the new ones included
    capacities: NDArray[np.int32]  # [B], maximum of draft tokens per request, without the root
    drafted: NDArray[np.int32]  # [B], draft tokens of each request that the last step verified
    previous: tuple[int, int] | None  # requests and query tokens of the last step; None if it did more than decode
    history: Callable[[int], NDArray[np.int32]]  # all tokens of request b, [contexts[b]], for drafters that missed some
    trees: NDArray[np.bool_]  # [B], requests whose drafts may be trees; those of others are verified as chains
    engine: Any = None  # the engine's state for draft passes of its `DraftModel`; None once the step has finished

    @property
    def batch_size(self) -> int:
        return len(self.request_ids)

    @property
    def roots(self) -> NDArray[np.int32]:
        """int32 [B]: the newest token of each request."""
        return self.tokens[self.ends - 1]

    @cached_property
    def most(self) -> int:
        """Draft tokens that a request may verify at most."""
        return int(self.capacities.max(initial=0))

    @cached_property
    def gained(self) -> NDArray[np.int64]:
        """int64 [B]: newly accepted tokens of each request."""
        return self.ends - self.starts

    @cached_property
    def accepted(self) -> NDArray[np.int32]:
        """int32 [B]: draft tokens that the step accepted; the token after them is the model's own."""
        return np.minimum(self.gained - 1, self.drafted).astype(np.int32)


def rows_in(names: Sequence[str], request_ids: Sequence[str]) -> NDArray[np.int32]:
    """int32 [B]: the position in `names` of each request; -1 for none."""
    if names == request_ids:
        return np.arange(len(request_ids), dtype=np.int32)
    row_of = {name: row for row, name in enumerate(names)}
    return np.array([row_of.get(request_id, -1) for request_id in request_ids], np.int32)


def room(limits: NDArray[np.int64], contexts: NDArray[Any], most: int, *, trees: bool = False) -> NDArray[np.int32]:
    """int32 [B], maximum of draft tokens per request. A chain leaves room for the target's own token after it. A tree,
    of which one path is accepted, may have its full size wherever a chain of one token may be drafted.

    Args:
        limits: int [B], maximum total tokens of each request; contexts: int [B], its present tokens.
        most: maximum of draft tokens per request.
    """
    tokens: NDArray[np.int64] = np.maximum(np.minimum(most, limits - 1 - contexts), 0)
    return (np.where(tokens > 0, most, 0) if trees else tokens).astype(np.int32)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The engine that a method is built for. The front-end process only checks options; unknown fields have their
    defaults there."""

    hf_config: Any = None  # the model's Hugging Face configuration, as it was published
    vocab_size: int | None = None  # of the target model
    max_draft_tokens: int = 1  # maximum per request, roots not counted
    # Sizes that the engine can verify, ascending, if all requests of a step must have the same one; else None. SGLang
    # chooses after drafting: `widths`, nodes with the root. V2 chooses before: `lengths`, draft tokens
    # (`freedraft.cost.policies`), so that shorter drafts save nothing.
    widths: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    head: int = 0  # draft tokens of another drafter that each step verifies first; 0 for none
    below: str = ""  # its name
    dtype: str = "bfloat16"  # the engine's
    kv_dtype: str = "auto"  # of the KV cache, e.g. "fp8_e4m3"; "auto" for the model's
    page_size: int | None = None  # tokens per page of the KV cache; None if unknown
    tensor_parallel: int = 1  # number of ranks
    # Of this process among the drafting ones: one per data-parallel replica, or each rank where all draft. Each serves
    # metrics at its own port.
    rank: int = 0
    device: str | None = None  # name of the GPU, or "cpu"; None: ask torch
    hardware: str | None = None  # the device's name as in files of `freedraft calibrate`; None if unknown
    gives_logits: bool = False  # whether the engine calls `Method.recycle`
    tokenizer_fingerprint: Callable[[], str | None] = lambda: None  # of the target's tokenizer; None without one

    @property
    def marks(self) -> list[int]:
        """Ids that stand in prompts for images, video and audio."""
        named = re.compile(r"(image|video|audio|media_placeholder)_token_(id|index)").fullmatch
        fields = getattr(self.hf_config, "__dict__", {})
        return [mark for name, mark in fields.items() if named(name) and isinstance(mark, int)]
