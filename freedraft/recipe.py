"""`Recipe`: the layers that a draft pass of the target model skips, and the `Window` of the KV cache that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """The part of a request's KV cache that a draft pass reads: its first tokens (attention sinks) and its newest, in
    whole pages, so that kernels read a shorter block table and nothing else changes (StreamingLLM, Xiao et al., 2024).
    """

    sinks: int
    newest: int

    @property
    def tokens(self) -> int:
        return self.sinks + self.newest

    def whole_up_to(self, page_size: int) -> int:
        """Longest request, in tokens with its root, of which the window leaves out no page."""
        return self.newest + (-(-self.sinks // page_size) + 1) * page_size - 1

    def pages(
        self, roots: NDArray[np.int64], page_size: int, *, attended: int | None = None, max_draft_len: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """s and d, int64 [B], which say what a round of draft passes leaves out: page i of its table is page i of the
        request for i < s, and page i + d from there on.

        Args:
            roots: int64 [B], position of each request's root. The newest tokens are counted from here.
            attended: the model's own sliding window, tokens; a request that may draft beyond it has no sinks: the
                engine may have reused their pages.
        """
        sinks = np.full(len(roots), -(-self.sinks // page_size))
        if attended is not None:
            sinks[roots + max_draft_len > attended] = 0
        return sinks, np.maximum((roots + 1 - self.newest) // page_size - sinks, 0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sublayers of a model that a draft pass skips, and the part of the KV cache that it reads."""

    n_layers: int  # L
    attention: frozenset[int]  # layers whose attention is skipped
    mlp: frozenset[int]  # layers whose MLP is skipped
    model: str = ""  # fingerprint of the set's model; "" if unknown
    window: Window | None = None  # the part of the KV cache that draft passes read, not saved; None for all of it

    @property
    def bits(self) -> tuple[bool, ...]:
        """2L flags, True where skipped, in the order attention 0, MLP 0, attention 1, ..."""
        return tuple(i in kind for i in range(self.n_layers) for kind in (self.attention, self.mlp))
