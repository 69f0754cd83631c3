"""`DraftSource`: where draft trees come from, as the verify worker sees it. The worker knows no drafter beyond this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source is built for.

    Attributes:
        vocab_size: of the target model.
        max_nodes: most nodes per request, root included (`--speculative-num-draft-tokens`).
        max_batch: most requests in a batch.
        widths: the numbers of nodes per request, root included, that the engine is prepared to verify; ascending.
        tokenizer: the target's, or None where SGLang skips it.
        target_worker: SGLang's worker of the target model, for sources that run the model.
    """

    vocab_size: int
    max_nodes: int
    max_batch: int
    widths: tuple[int, ...]
    tokenizer: Any
    target_worker: Any


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One decoding step of a batch of B requests, before its draft.

    Attributes:
        request_ids: B ids, in the batch's order.
        tokens: int32 [T], the tokens that each request gained since the source last saw it, request after request.
        offsets: int64 [B + 1], where each request's tokens start in `tokens`.
        batch: SGLang's ScheduleBatch, for sources that run the model.
        undisturbed: nothing but the last step's decoding has run since the source was last asked.
    """

    request_ids: Sequence[str]
    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    batch: Any
    undisturbed: bool = False


class DraftSource(Protocol):
    """Drafts for the requests of one scheduler. Called from its forward thread only, corpora from another one.

    State is kept by request id. A request that was `begin`-ed gains tokens through `draft`, and ends with `finish`,
    which may come at any time, or never for one that was aborted before it ran: the worker then begins it anew or not
    at all.

    Some are optional. `belongs(request_id, tenant)` follows each `begin`: whose it is, a string or None.
    `ended(request_id, tokens)` comes before the `finish` of a request that ran to its end, with its whole text.
    Where `needs_states` is true, `take_state(request_id, state)` follows every prefill, a part of a prompt's included:
    float [H], the normed last hidden state behind it.
    """

    def width(self, batch_size: int) -> int:
        """Nodes per request, root included, that this step may carry: one of the context's widths, or 1 for no draft.

        Every tensor-parallel rank asks its own source, and all must answer the same.
        """

    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        """Take `tokens` (prompt, and output so far if the request was retracted) as all that is known of a request.

        Called while its prefill runs: must return at once and index in the background. Replaces what was known.
        """

    def draft(self, step: DraftStep, width: int) -> DraftBatch:
        """Trees of at most `width` nodes per request, rows in the step's order; valid until the next call."""

    def observe(self, accepted: Sequence[int]) -> None:
        """Number of draft tokens accepted, by request of a step that was verified; comes one step late under
        overlap."""

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget these requests. Unknown ids are ignored."""

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        """Build an index of tokenised documents, in a thread of SGLang's; `commit_corpus` makes it used.

        Returns:
            the number of tokens.

        Raises:
            ValueError: this source takes no corpora, or not this one; the message goes to the HTTP client.
        """

    def commit_corpus(self, corpus_id: str) -> None:
        """Start using a corpus that `add_corpus` built. Called between steps."""

    def remove_corpus(self, corpus_id: str) -> None:
        """Stop using a corpus.

        Raises:
            ValueError: there is none of that id.
        """

    def corpora(self) -> dict[str, int]:
        """Number of tokens of each corpus in use, by id."""

    def close(self) -> None:
        """Release threads and memory maps."""
