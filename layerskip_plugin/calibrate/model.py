"""`CalibrationModel`: what the searches ask of a model, whether a serving engine runs it or transformers.

Every token of a text is drafted as a serving engine's first draft pass would do it: its own hidden state goes through
the kept sublayers, and it attends to the whole model's KV of everything before it and to its own draft KV.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerskip_plugin.calibrate.pass_times import PassTimes
from layerskip_plugin.calibrate.sample import Sample, Text
from layerskip_plugin.knapsack_search import cosine
from layerskip_plugin.skip_set import SkipSet

ROWS = 2048
"""Rows (sets x tokens) in one pass: bounds memory at about 0.1 GB for a small model."""


class CalibrationModel(ABC):
    """A decoder that is run sublayer by sublayer.

    Attributes:
        n_layers: decoder layers, L.
        fingerprint: `model_fingerprint` of its configuration.
        device: of the weights: "cpu", "cuda:0".
    """

    n_layers: int
    fingerprint: str
    device: str

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The greedy answer to each prompt, up to its end of sequence, which is part of it."""

    @abstractmethod
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> Text:
        """Read a text with the whole model; `keep`: ascending positions whose hidden states a `Sample` needs.

        Raises:
            ValueError: an empty text, or one that is too long.
        """

    @abstractmethod
    def sublayer(self, index: int, h: Tensor, sample: Sample) -> Tensor:
        """The hidden states behind sublayer `index`, for float[J, N, hidden] before it; N tokens of `sample`."""

    @abstractmethod
    def norm(self, h: Tensor) -> Tensor:
        """float[..., hidden]: what goes into the LM head."""

    @abstractmethod
    def best(self, final: Tensor) -> Tensor:
        """int64[...]: the top-1 token of float[..., hidden] normed hidden states."""

    @abstractmethod
    def pass_times(self, context: int) -> PassTimes:
        """Seconds at one context length and batch 1, measured now.

        Raises:
            ValueError: a context that is longer than the model takes.
        """

    def close(self) -> None:
        """Give back what the model holds."""

    @property
    def sublayers(self) -> int:
        """Number of sublayers, 2L: attention 0, MLP 0, attention 1, ..."""
        return 2 * self.n_layers

    def empty(self) -> SkipSet:
        """The set that skips nothing of this model."""
        return SkipSet.empty(self.n_layers, self.fingerprint)

    def skip(self, sublayers: Sequence[int]) -> SkipSet:
        """The set that skips these sublayers of this model."""
        return SkipSet.of_sublayers(sublayers, self.n_layers, self.fingerprint)

    def timed_sets(self) -> list[SkipSet]:
        """Those whose passes `engine_times` compares: nothing, every second attention, every second MLP skipped."""
        every_second = range(0, self.n_layers, 2)
        return [self.empty(), *(self.skip([2 * i + kind for i in every_second]) for kind in (0, 1))]

    @torch.inference_mode()
    def scores(self, sets: Sequence[SkipSet], sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per set: the share of tokens with the whole model's top-1 choice, and the mean cosine to its last state."""
        best, final = sample.gather(lambda t: t.best), sample.gather(lambda t: t.final)
        agreement, similarity = [], []
        size = max(1, ROWS // len(sample))
        for i in range(0, len(sets), size):
            drafted = self.final_states(sets[i : i + size], sample)
            agreement.append((self.best(drafted) == best).double().mean(1).numpy(force=True))
            similarity.append(cosine(drafted, final))
        return np.concatenate(agreement), np.concatenate(similarity)

    @torch.inference_mode()
    def final_states(self, sets: Sequence[SkipSet], sample: Sample) -> Tensor:
        """float[J, N, hidden]: the normed last hidden states of `sample`'s tokens under each set, in one pass."""
        bits = torch.tensor([skip.bits for skip in sets])
        # Up to the first sublayer that one of them skips, all are the whole model.
        skipped = bits.any(0).nonzero()
        start = int(skipped[0]) if len(skipped) else self.sublayers
        h = sample.states(start)[None].repeat(len(sets), 1, 1)
        for index in range(start, self.sublayers):
            keep = (~bits[:, index]).nonzero()[:, 0]
            if len(keep) == len(sets):
                h = self.sublayer(index, h, sample)
            elif len(keep):
                h[keep] = self.sublayer(index, h[keep], sample)
        return self.norm(h)
