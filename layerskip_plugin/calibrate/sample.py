"""Texts that the whole model has read, and the tokens of them that skip sets are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text that the whole model has read."""

    tokens: Tensor  # int64[T]
    best: Tensor  # int64[T], the whole model's top-1 next token after each
    final: Tensor  # float[T, hidden], the last hidden state, normed
    kept: Tensor  # int64[K], ascending positions whose states are kept
    states: Tensor  # float[2L + 1, K, hidden], before each sublayer and behind the last
    keys: list[Tensor]  # per layer float[kv heads, T, head size], rotated
    values: list[Tensor]
    cos: Tensor  # float[T, head size] of the rotary embedding
    sin: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Sample:
    """Tokens of some texts that skip sets are tried on."""

    texts: Sequence[Text]  # read with the states of these positions kept
    positions: list[Tensor]  # per text, int64[r] ascending positions of the tokens, on the host

    def __len__(self) -> int:
        return sum(len(p) for p in self.positions)

    def gather(self, field: Callable[[Text], Tensor]) -> Tensor:
        """The rows of `field` at the sample's positions, all texts concatenated."""
        return torch.cat([field(text)[p] for text, p in zip(self.texts, self.positions, strict=True)])

    def states(self, index: int) -> Tensor:
        """float[N, hidden]: the whole model's hidden states before sublayer `index`."""
        pairs = [(text, p.to(text.kept.device)) for text, p in zip(self.texts, self.positions, strict=True)]
        return torch.cat([text.states[index, torch.searchsorted(text.kept, p)] for text, p in pairs])
