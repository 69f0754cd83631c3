"""Texts that the whole model has read, and the tokens of them that skip sets are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """A text that the whole model has read.

    Attributes:
        tokens: int64[T].
        best: int64[T], the whole model's top-1 next token after each.
        final: float[T, hidden], the last hidden state, normed.
        kept: int64[K], ascending positions whose states are kept.
        states: float[2L + 1, K, hidden], before each sublayer and behind the last.
        keys, values: per layer float[kv heads, T, head size]; keys are rotated.
        cos, sin: float[T, head size] of the rotary embedding.
    """

    tokens: Tensor
    best: Tensor
    final: Tensor
    kept: Tensor
    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    cos: Tensor
    sin: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Sample:
    """Tokens of some texts that skip sets are tried on.

    Attributes:
        texts: read with the states of these positions kept.
        positions: per text, int64[r] ascending positions of the tokens, on the host.
    """

    texts: Sequence[Text]
    positions: list[Tensor]

    def __len__(self) -> int:
        return sum(len(p) for p in self.positions)

    def gather(self, field: Callable[[Text], Tensor]) -> Tensor:
        """The rows of `field` at the sample's positions, all texts concatenated."""
        return torch.cat([field(text)[p] for text, p in zip(self.texts, self.positions, strict=True)])

    def states(self, index: int) -> Tensor:
        """float[N, hidden]: the whole model's hidden states before sublayer `index`."""
        pairs = [(text, p.to(text.kept.device)) for text, p in zip(self.texts, self.positions, strict=True)]
        return torch.cat([text.states[index, torch.searchsorted(text.kept, p)] for text, p in pairs])
