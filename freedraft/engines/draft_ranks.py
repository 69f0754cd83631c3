"""`DraftRanks`: draft passes on tensor-parallel ranks. Rank 0 decides; all ranks run the same passes together.

Every rank has its shard of the weights and of the KV cache, and the same requests in the same slots. Rank 0 broadcasts
its calls until it ends. Before the layers run, in which ranks wait for one another, all ranks agree that they can. A
rank that fails after that would leave the others waiting, so it ends the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp, all_reduce

from freedraft.draft_model import DraftRound
from freedraft.guarded_method import EngineMustEnd, is_device_fault

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DraftRanks:
    """The ranks of one model. group: the engine's GroupCoordinator of tensor-parallel ranks (alike in vLLM and
    SGLang)."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.several: bool = group.world_size > 1
        self.first: bool = group.rank_in_group == 0
        self._calls = 0
        self._built: dict[int, Any] = {}  # draft passes of worker ranks, by rank 0's numbers

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Context of rank 0's calls: the other ranks repeat them in `serve`, which ends with it."""
        try:
            yield
        except Exception:
            self._end()
            raise
        self._end()  # no broadcast on process exit: the others may be gone

    def _end(self) -> None:
        if self.several:
            self._group.broadcast_object(None, src=0)

    def tell(self, name: str, *arguments: Any) -> int:
        """In rank 0: broadcast a call: "build" a draft pass, "start" a round, or "run" a pass in it. Returns a number,
        by which "start" refers to a built pass."""
        self._calls += 1
        if self.several and self.first:
            self._group.broadcast_object((self._calls, name, arguments), src=0)
        return self._calls

    def serve(self, build: Callable[..., Any], start: Callable[..., DraftRound]) -> None:
        """In worker ranks: repeat the calls that rank 0 broadcasts, by `build` and `start`. A failure ends drafting in
        this step on all ranks. Raises EngineMustEnd: see `together`."""
        round_: DraftRound | None = None
        while (told := self._group.broadcast_object(None, src=0)) is not None:
            call, name, arguments = told
            try:
                if name == "build":
                    *pass_of, optimize = arguments
                    self._built[call] = build(*pass_of, optimize=optimize)
                elif name == "start":
                    round_ = None
                    number, *rest = arguments
                    round_ = start(self._built[number], *rest)
                elif round_ is not None:
                    round_.launch(*arguments)
                else:
                    self.agree(False)
            except Exception as error:
                if is_device_fault(error):
                    raise
                logger.exception("freedraft: this rank cannot run a draft pass of rank 0")

    def ready(self, prepare: Callable[[], T]) -> T:
        """The result of `prepare`, once it has succeeded on all ranks. Raises RuntimeError: it failed on another rank;
        its own error if it failed on this one."""
        able = False
        try:
            prepared = prepare()
            able = True
        finally:
            agreed = self.agree(able)
        if not agreed:
            raise RuntimeError("another tensor-parallel rank cannot run this draft pass")
        return prepared

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of work that all ranks do at the same time, waiting for one another. Raises EngineMustEnd: it failed
        on this one of several ranks, which would be out of step with the others. With one rank, and after a device
        fault, its own error."""
        try:
            yield
        except Exception as error:
            if not self.several or is_device_fault(error):
                raise
            logger.exception("freedraft: the engine stops: this rank failed during a draft pass")
            raise EngineMustEnd("a draft pass failed that other tensor-parallel ranks wait for") from error

    def agree(self, able: bool) -> bool:
        """Whether `able` is True on all ranks."""
        if not self.several:
            return able
        all_able = torch.tensor(int(able))
        all_reduce(all_able, ReduceOp.MIN, group=self._group.cpu_group)
        return bool(all_able)
