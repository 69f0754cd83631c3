"""`Step`: what a drafter is given for one decoding step; `EngineContext`: the engine it is built for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch

TOP_TOKENS = 8  # likeliest next tokens that are kept of a node


class NodeLogits(NamedTuple):
    """The likeliest next tokens at the nodes that a step has verified, for B requests of at most N nodes."""

    request_ids: Sequence[str]  # B ids, of which some may have finished
    draft: DraftBatch  # [B, N], the trees that were verified, without depths and scores
    # [B, N, TOP_TOKENS], likeliest first, -1 for none; what stands at padding is undefined.
    top_tokens: NDArray[np.int32]
    # [B, N, TOP_TOKENS], natural logarithms, before temperature and filters; -inf for none.
    top_log_probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Step:
    """One decoding step of B requests, before its draft.

    Attributes:
        request_ids: B ids, in the order of the engine's batch.
        tokens: int32 [T], any array in which the tokens stand that requests gained.
        starts, ends: int64 [B]; request b gained `tokens[starts[b]:ends[b]]` by the step that has just ended, at least
            one token.
        contexts: int32 [B], tokens of each request, those included.
        capacities: int32 [B], how many draft tokens each request may have, the root not counted.
        drafted: int32 [B], draft tokens of each request that the step that has just ended verified.
        widths: ascending numbers of nodes per request, root included, that the engine is prepared to verify, if all
            requests of a step must have the same; None where every request may have its own.
        previous: number of requests and of query tokens of the step that has just ended; None if it did more than
            decode, or if nothing is known of it.
        history: gives all tokens of request b, int32 [contexts[b]], for drafters that missed some.
        trees: whether drafts may be trees also without widths.
        engine: what the engine's `DraftModel` needs to know of the step; None where that is over.
    """

    request_ids: Sequence[str]
    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    contexts: NDArray[np.int32]
    capacities: NDArray[np.int32]
    drafted: NDArray[np.int32]
    widths: NDArray[np.int32] | None
    previous: tuple[int, int] | None
    history: Callable[[int], NDArray[np.int32]]
    trees: bool = False
    engine: Any = None

    @property
    def batch_size(self) -> int:
        return len(self.request_ids)

    @property
    def roots(self) -> NDArray[np.int32]:
        """int32 [B]: the newest token of each request."""
        return self.tokens[self.ends - 1]

    @property
    def gained(self) -> NDArray[np.int64]:
        """int64 [B]: tokens that each request gained."""
        return self.ends - self.starts

    @property
    def accepted(self) -> NDArray[np.int32]:
        """int32 [B]: draft tokens that the step accepted; the token after them is the model's own."""
        return np.minimum(self.gained - 1, self.drafted).astype(np.int32)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What a method is built for. In the front-end process, where only options are checked, the defaults stand for what
    is not known yet.

    Attributes:
        hf_config: the model's Hugging Face configuration, as it was published.
        vocab_size: of the target model.
        max_draft_tokens: most draft tokens per request, roots not counted.
        widths: see `Step`.
        chains: whether drafts must be chains also with widths, because of how this engine's attention verifies them.
        dtype: what the engine computes in, as "bfloat16".
        kv_dtype: what keys and values are kept in, as "fp8_e4m3"; "auto" for what the model says.
        page_size: tokens of a page of the KV cache; None where it is not known.
        tensor_parallel: number of tensor-parallel ranks.
        rank: of this process among those that draft: one for each data-parallel replica, or each rank where all draft;
            each serves metrics at a port of its own.
        device: the name of the GPU, or "cpu"; None to ask torch, where a method wants to know.
        hardware: the device in words, as `freedraft calibrate` writes it; None where it is not known.
        lengths: numbers of draft tokens that a step may verify for each of its requests, where all of them have the
            same, decided before anything is drafted (`freedraft.cost.schedule`), so that shorter drafts save nothing;
            None where every request may have its own.
        gives_logits: whether the engine calls `Method.recycle`.
        tokenizer_fingerprint: gives the fingerprint of the target's tokenizer; None where there is none.
    """

    hf_config: Any = None
    vocab_size: int | None = None
    max_draft_tokens: int = 1
    widths: tuple[int, ...] | None = None
    chains: bool = False
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    page_size: int | None = None
    tensor_parallel: int = 1
    rank: int = 0
    device: str | None = None
    hardware: str | None = None
    lengths: tuple[int, ...] | None = None
    gives_logits: bool = False
    tokenizer_fingerprint: Callable[[], str | None] = lambda: None
