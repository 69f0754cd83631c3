"""KnapSpec with a plan: each context length has its own set and draft length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.selection.base import Counts, Selection
from layerskip_plugin.skip_set import SkipSet, read_json, undamaged, write_json

FORMAT = "freedraft knapsack plan 1"


@dataclass(frozen=True)
class Choice:
    skip: SkipSet  # set of most tokens per second with drafts; empty without any
    length: int  # draft length; 0 if decoding without drafts was faster
    rate: float  # tokens per second expected
    trial_length: int = 0  # if `length` is 0, draft length of later trials


@dataclass(frozen=True)
class Plan:
    contexts: tuple[int, ...]  # ascending; borders are geometric means of neighbours
    choices: tuple[Choice, ...]  # one per context
    hardware: str  # hardware of the measured times

    def __post_init__(self) -> None:
        if not self.contexts or len(self.contexts) != len(self.choices):
            raise ValueError("a plan needs one choice per context length")
        if list(self.contexts) != sorted(set(self.contexts)) or self.contexts[0] < 1:
            raise ValueError(f"context lengths must be positive and ascend, not {list(self.contexts)}")

    def at(self, contexts: Counts) -> NDArray[np.intp]:
        ends = np.sqrt(np.array(self.contexts[1:], np.float64) * np.array(self.contexts[:-1], np.float64))
        return np.searchsorted(ends, contexts, side="right")

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        entries = [
            {"context": c, "length": x.length, "trial_length": x.trial_length, "tokens_per_second": round(x.rate, 3)}
            | {"set": x.skip.to_dict()}
            for c, x in zip(self.contexts, self.choices, strict=True)
        ]
        write_json(path, FORMAT, {"hardware": self.hardware, "entries": entries}, about)

    @classmethod
    def load(
        cls, path: Path, n_layers: int | None = None, model: str | None = None, hardware: str | None = None
    ) -> Self:
        """Read a file of `save`; raises ValueError, one line, if it is damaged or of another model or hardware."""
        values = read_json(path, FORMAT, "knapsack plan")
        with undamaged("knapsack plan", path):
            choices = tuple(
                Choice(SkipSet.from_dict(e["set"], str(path)), int(e["length"]), float(e["tokens_per_second"]),
                       int(e["trial_length"]))
                for e in values["entries"]
            )  # fmt: skip
            plan = cls(tuple(int(e["context"]) for e in values["entries"]), choices, str(values["hardware"]))
        for choice in choices:
            choice.skip.require(n_layers, model, str(path))
        if hardware and hardware != plan.hardware:
            raise ValueError(
                f"knapsack plan: the times in {path} were measured on {plan.hardware}, this is {hardware}; "
                "measure here with: freedraft calibrate knapsack"
            )
        return plan


class Knapsack(Selection):
    """Each request uses the set and draft length of its present context length.

    Args:
        measured: whether the lookahead policy measures the gain of drafting. If so, it occasionally tries the sets of
            context lengths at which decoding without drafts was faster; else these draft nothing.
    """

    def __init__(self, plan: Plan, measured: bool = False) -> None:
        self.plan = plan
        lengths = [choice.length or measured * choice.trial_length for choice in plan.choices]
        self._length = np.array(lengths, np.int32)
        names: dict[SkipSet, str] = {}
        for context, choice, length in zip(plan.contexts, plan.choices, lengths, strict=True):
            if length:  # sets of entries without drafts are not built
                names.setdefault(choice.skip, f"context {context}")
        super().__init__({name: skip for skip, name in (names or {plan.choices[0].skip: "plain"}).items()})

    def choose(self, request_ids: Sequence[str], contexts: Counts) -> list[SkipSet]:
        return [self.plan.choices[i].skip for i in self.plan.at(contexts).tolist()]

    def max_lengths(self, contexts: Counts) -> Counts:
        return self._length[self.plan.at(contexts)]
