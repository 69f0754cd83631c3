"""A drafter of one screen: it proposes what followed the last token when that token came before. For both engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.config import PluginOptions
from freedraft.cost.controller import FullLength
from freedraft.cost.hardware import choose_profile
from freedraft.draft import DraftBatch
from freedraft.method import Method, MethodSpec
from freedraft.step import EngineContext, Step


class RepeatOptions(PluginOptions):
    fail_every: int = 0
    """Raise at every step of that number; 0 for never."""


class RepeatMethod(Method):
    def __init__(self, options: RepeatOptions, context: EngineContext) -> None:
        controller = FullLength(choose_profile("cpu"), context.max_draft_tokens, context.widths)
        super().__init__(options, context, controller, SPEC.name)
        self.tokens: dict[str, list[int]] = {}
        self.calls = 0

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        self.tokens[request_id] = tokens.tolist()

    def update(self, step: Step) -> None:
        for b, request_id in enumerate(step.request_ids):
            self.tokens[request_id] = step.history(b).tolist()

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        self.calls += 1
        if self.options.fail_every and self.calls % self.options.fail_every == 0:
            raise RuntimeError("this drafter fails on purpose")
        draft = DraftBatch.empty(step.batch_size, max_draft_len + 1)
        draft.tokens[:, 0], draft.parents[:], draft.depths[:] = step.roots, *chain_of(max_draft_len + 1)
        draft.scores[:] = 1.0
        for b, request_id in enumerate(step.request_ids):
            text = self.tokens[request_id]
            last = next((i for i in range(len(text) - 2, -1, -1) if text[i] == text[-1]), len(text))
            chain = text[last + 1 : last + 1 + max_draft_len]
            draft.tokens[b, 1 : len(chain) + 1], draft.counts[b] = chain, len(chain) + 1
        return draft

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        self.tokens.pop(request_id, None)


def chain_of(nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Parents and depths of the nodes of a chain."""
    return np.arange(-1, nodes - 1), np.arange(nodes)


SPEC = MethodSpec("repeat", f"{__name__}:RepeatMethod", RepeatOptions)
