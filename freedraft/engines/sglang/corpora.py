"""External corpora through SGLang's HTTP endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from freedraft.engines.sglang.drafting import Drafting


def documents_of(token_chunks: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """Return the documents in SGLang's corpus chunks, which split them anywhere; a negative token starts a document."""
    flat = np.fromiter((token for chunk in token_chunks for token in chunk), np.int64)
    pieces = np.split(flat, np.flatnonzero(flat < 0))
    return [tokens.astype(np.int32) for piece in pieces if len(tokens := piece[piece >= 0])]


class CorpusCalls:
    """Methods that SGLang's `ExternalCorpusManager` calls on a speculative worker, on every tensor-parallel rank; rank
    0 holds the corpora. Corpora are added from a separate thread. Errors are returned to the client."""

    _drafting: Drafting | None

    def add_external_corpus(self, corpus_id: str, token_chunks: list[list[int]]) -> int:
        documents = documents_of(token_chunks)
        if self._drafting is None:
            return sum(len(document) for document in documents)
        return self._drafting.guarded.method.add_corpus(corpus_id, documents)

    def commit_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Called by SGLang after `add_external_corpus`, when drafts come from the corpus already."""

    def remove_external_corpus(self, corpus_id: str) -> None:
        if self._drafting is not None:
            self._drafting.guarded.method.remove_corpus(corpus_id)

    def list_external_corpora(self) -> dict[str, int]:
        return self._drafting.guarded.method.corpora() if self._drafting is not None else {}
