"""`DraftRanks`: draft passes on tensor-parallel ranks. The first decides, and all do the same passes at the same time.

Every rank has its shard of the weights and of the KV cache, and the same block tables. What the first rank builds and
runs it tells the others, who wait for it between two steps, until it says that it has ended. Before the layers run, who
wait for one another, all ranks agree that they can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp, all_reduce

if TYPE_CHECKING:
    from freedraft.engines.vllm.draft_model import PagedDraftModel
    from freedraft.engines.vllm.draft_passes import PagedDraftRound
    from freedraft.engines.vllm.pages import Pages

logger = logging.getLogger(__name__)


class DraftRanks:
    """Of one model.

    Args:
        group: vLLM's GroupCoordinator of the tensor-parallel ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.several: bool = group.world_size > 1
        self.first: bool = group.rank_in_group == 0

    @contextmanager
    def leading(self) -> Iterator[None]:
        """What the first rank builds and runs within, the others do in `follow`, which ends with it."""
        try:
            yield
        finally:
            if self.several:
                self._group.broadcast_object(None, src=0)

    def tell(self, name: str, *arguments: Any) -> None:
        """In the first rank: let the others call this method of `PagedDraftModel`, or of its round."""
        if self.several and self.first:
            self._group.broadcast_object((name, arguments), src=0)

    def follow(self, model: PagedDraftModel, pages: Callable[[], Pages] | None = None) -> None:
        """In the others: do what the first rank tells. A failure ends drafting in this step on all of them.

        Args:
            pages: of the step, whose rows the first rank names; None where nothing is run yet.
        """
        round_: PagedDraftRound | None = None
        while (told := self._group.broadcast_object(None, src=0)) is not None:
            name, arguments = told
            try:
                if name == "build":
                    recipe, options = arguments
                    model.build(recipe, **options)
                elif name == "start":
                    assert pages is not None
                    rows, first, max_draft_len = arguments
                    round_ = model.round(pages()._replace(rows=rows), first, max_draft_len)
                else:
                    number, *inputs = arguments
                    if round_ is not None and (draft_pass := model.built[number]) is not None:
                        round_.run(draft_pass, *inputs)
                    else:
                        self.agree(False)
            except Exception:
                logger.exception("freedraft: this rank cannot do a draft pass that the first one wants")
                if name == "build":
                    model.built.append(None)  # the others keep their numbers
                elif name == "start":
                    round_ = None

    def agree(self, able: bool) -> bool:
        """Whether all ranks are able."""
        if not self.several:
            return able
        all_able = torch.tensor(int(able))
        all_reduce(all_able, ReduceOp.MIN, group=self._group.cpu_group)
        return bool(all_able)
