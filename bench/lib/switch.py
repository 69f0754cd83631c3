"""A `Method` inside an engine, watched and switched off and on from outside."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from freedraft.draft import DraftBatch
from freedraft.step import Step


@dataclass(frozen=True)
class Call:
    """One call of `Method.draft`, which comes between two steps of the engine.

    Attributes:
        began, ended: seconds on the clock of `time.perf_counter`.
        on: whether the method was asked.
        ids: the requests of the step. contexts: their tokens, in all.
        gained: tokens that each of them gained by the step that has just ended.
        drafted: depth of each request's draft. nodes: of all drafts, roots included.
        kinds: of each draft's first token (`DraftBatch.kinds`); 0 where there is none.
    """

    began: float
    ended: float
    on: bool
    ids: list[str]
    contexts: int
    gained: list[int]
    drafted: list[int]
    nodes: int
    kinds: list[int]

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def pass_seconds(self) -> float | None:
        """The time of one draft pass, its share of the decisions included; None where nothing was drafted."""
        depth = max(self.drafted, default=0)
        return (self.ended - self.began) / depth if depth else None


class Turns:
    """For `Switch`: off and on in turns of `length` steps within the same requests, so that both meet the same machine
    and contexts."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._step = -1

    def __call__(self, step: Step) -> bool:
        self._step += 1
        return self._step // self.length % 4 in (1, 2)  # off, on, on, off, ...: neither is always the first


class Switch:
    """Stands in for `method.draft` from now on.

    Where `wants(step)` is false the method is not asked, and the drafts are nothing but roots; it only hears what
    became of the drafts that it made the step before. The file `log` gets every call as a line of JSON.

    Attributes:
        calls: all calls so far; the caller may clear them.
        error: the last exception of the method, which is also passed on to the engine.
    """

    def __init__(self, method: Any, wants: Callable[[Step], bool] = lambda step: True, log: Path | None = None) -> None:
        self.wants, self.log = wants, log
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self._draft: Callable[[Step], DraftBatch] = method.draft
        self._method = method
        self._drafted: list[str] = []  # for which requests it has just made drafts
        method.draft = self._watched

    def _watched(self, step: Step) -> DraftBatch:
        began, on = time.perf_counter(), self.wants(step)
        try:
            if on:
                draft, self._drafted = self._draft(step), list(step.request_ids)
            else:
                if self._drafted == step.request_ids:
                    self._method.controller.update(step)
                    self._method.update(step)
                self._method.controller.interrupt()
                draft, self._drafted = DraftBatch.roots(step.roots), []
        except Exception as error:
            self.error = error
            raise
        ended = time.perf_counter()
        nodes = np.arange(draft.max_nodes) < draft.counts[:, None]
        ids, gained, depths = list(step.request_ids), step.gained.tolist(), np.where(nodes, draft.depths, 0)
        drafted, total = depths.max(1, initial=0).tolist(), int(nodes.sum())
        kinds = np.where(nodes, draft.kinds, 0)[:, 1:2].max(1, initial=0).tolist()
        self.calls.append(Call(began, ended, on, ids, int(step.contexts.sum()), gained, drafted, total, kinds))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(json.dumps(asdict(self.calls[-1])) + "\n")
        return draft


def calls_in(log: Path) -> list[Call]:
    """None as long as there is no such file."""
    return [Call(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def baseline_seconds(calls: Sequence[Call], batch: int) -> list[float]:
    """Seconds of each step of `batch` requests that verified no drafts, from one call's end to the next one's begin."""
    pairs = [(a, b) for a, b in pairwise(calls) if a.batch == batch and a.ids == b.ids]
    return [after.began - call.ended for call, after in pairs if not any(call.drafted)]


def verdicts(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """(drafted, accepted) tokens of each request in each step, as far as the request took part in the next one."""
    return [
        (drafted, after.gained[after.ids.index(name)] - 1)
        for call, after in pairwise(calls)
        for name, drafted in zip(call.ids, call.drafted, strict=True)
        if name in after.ids
    ]
