"""Corpora as SGLang's HTTP calls hand them over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def documents_of(token_chunks: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """SGLang's corpus chunks as documents: it cuts documents anywhere, and marks their starts with a negative token."""
    flat = np.fromiter((token for chunk in token_chunks for token in chunk), np.int64)
    pieces = np.split(flat, np.flatnonzero(flat < 0))
    return [tokens.astype(np.int32) for piece in pieces if len(tokens := piece[piece >= 0])]
