"""Texts that the whole model has read, and the tokens of them that skip sets are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from layerskip_plugin.calibrate.model import CalibrationModel


@dataclass(frozen=True)
class Text:
    """A text that the whole model has read.

    Attributes:
        tokens: int64[T].
        best: int64[T], the whole model's top-1 next token after each.
        final: float[T, hidden], the last hidden state, normed.
        kept: int64[K], ascending positions whose states are kept.
        states: float[2L + 1, K, hidden], before each sublayer and behind the last.
    """

    tokens: Tensor
    best: Tensor
    final: Tensor
    kept: Tensor
    states: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class HostText(Text):
    """A text that `HostModel` has read.

    Attributes:
        keys, values: per layer float32[kv heads, T, head size]; keys are rotated.
        cos, sin: float32[T, head size] of the rotary embedding.
    """

    keys: list[Tensor]
    values: list[Tensor]
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Sample:
    """Tokens of some texts that skip sets are tried on.

    Attributes:
        texts: `Text`s of one model, read with the states of these positions kept.
        positions: per text, int64[r] ascending positions of the tokens.
    """

    texts: Sequence[Any]
    positions: list[Tensor]

    @classmethod
    def spread(
        cls,
        model: CalibrationModel,
        texts: Sequence[Sequence[int]],
        tokens: int,
        first: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Sample:
        """Draw `tokens` positions from all texts, from `first` of each on (0 by default), and read their texts.

        Raises:
            ValueError: the texts are shorter than that.
        """
        starts = list(first) if first is not None else [0] * len(texts)
        places = [(i, p) for i, text in enumerate(texts) for p in range(min(starts[i], len(text) - 1), len(text))]
        if len(places) < tokens:
            raise ValueError(f"{tokens} tokens are wanted, but the texts hold {len(places)}: give more text")
        drawn = np.random.default_rng(seed).choice(len(places), tokens, replace=False)
        by_text: dict[int, list[int]] = {}
        for index in sorted(drawn.tolist()):
            by_text.setdefault(places[index][0], []).append(places[index][1])
        positions = [torch.tensor(p) for p in by_text.values()]
        return cls([model.read(texts[i], p) for i, p in zip(by_text, positions, strict=True)], positions)

    @classmethod
    def newest(cls, model: CalibrationModel, text: Sequence[int], tokens: int) -> Sample:
        """The last tokens of one text."""
        positions = torch.arange(max(0, len(text) - tokens), len(text))
        return cls([model.read(text, positions)], [positions])

    def __len__(self) -> int:
        return sum(len(p) for p in self.positions)

    def gather(self, field: Callable[[Any], Tensor]) -> Tensor:
        """The rows of `field` at the sample's positions, all texts concatenated."""
        pairs = zip(self.texts, self.positions, strict=True)
        return torch.cat([field(text)[p.to(text.tokens.device)] for text, p in pairs])

    def states(self, index: int) -> Tensor:
        """float[N, hidden]: the whole model's hidden states before sublayer `index`."""
        pairs = [(text, p.to(text.kept.device)) for text, p in zip(self.texts, self.positions, strict=True)]
        return torch.cat([text.states[index, torch.searchsorted(text.kept, p)] for text, p in pairs])
