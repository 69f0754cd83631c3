"""How well recipes would have drafted the newest tokens of a request: many of them in one forward pass of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from freedraft.draft_model import MatchnessScorer, T, Visit
from freedraft.draft_pass import Recipe
from freedraft.engines.many_sets import SETS, forward, run_sublayer, sublayers_of
from freedraft.engines.on_device import on_device
from freedraft.engines.sglang.passes import Passes, Tokens
from freedraft.engines.sglang.verify import SPARE_SLOT
from freedraft.step import Step


class SetScores(MatchnessScorer):
    """Matchness of recipes on the newest tokens that a request has generated.

    Each token of the window is a row of an eager decoding pass, under each recipe: it reads the target's KV of what
    comes before it and writes into SGLang's spare slot, so that no committed KV is touched. Where the attention backend
    reads the token's own KV from the pool (the CPU platform's does) it is the target's; in a real draft it would be the
    draft's. All else is as there.
    """

    def __init__(self, model: Passes, window: int) -> None:
        self.model = model
        self.window = window
        # SGLang keeps memory for one row per request: so a pass has at most that many recipes, and tokens of each.
        rows = int(model.runner.max_running_requests)
        self._recipes, self._part = max(1, rows // window), min(window, rows)
        self._turn = 0
        self._batch: Any = None
        self._row = self._length = 0
        self._tokens = self._next = np.zeros(0, np.int64)

    def observe(self, step: Step) -> bool:
        batch = step.engine
        prompts = np.array([len(request.origin_input_ids_unpadded) for request in batch.reqs])
        able = np.flatnonzero(step.contexts - prompts > self.window)
        if not len(able):
            return False
        row = int(able[self._turn % len(able)])
        self._turn += 1
        text = step.history(row)[-self.window - 1 :].astype(np.int64)
        # The newest token's KV is not computed yet.
        self._batch, self._row, self._length = batch, row, int(batch.seq_lens_cpu[row])
        self._tokens, self._next = text[:-1], text[1:]
        return True

    def __call__(self, recipes: Sequence[Recipe]) -> NDArray[np.float64]:
        bits = np.array([recipe.bits for recipe in recipes], np.bool_)
        parts = range(0, self.window, self._part)
        right = [
            np.concatenate([self._right(bits[i : i + self._recipes], j, j + self._part) for j in parts], 1)
            for i in range(0, len(bits), self._recipes)
        ]
        return np.concatenate(right).mean(1)

    def run_sublayers(self, visit: Visit[T]) -> T:
        """Over as many of the newest tokens as there may be running requests."""
        sets, count = min(self._recipes, SETS), self._part

        def work(ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> T:
            decoder = self.model.decoder
            sublayers = sublayers_of(decoder.layers, positions=positions, forward_batch=batch)
            return visit(decoder.embed_tokens(ids)[:count], partial(run_sublayer, sublayers, sets))

        return self.model.compute(work, self._pass(sets, self.window - count, self.window))

    def _right(self, skipped: NDArray[np.bool_], start: int, end: int) -> NDArray[np.bool_]:
        """bool [J, n]: after which tokens of the window from `start` on each recipe drafts what came."""
        recipes = len(skipped)

        def hidden_of(ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
            decoder = self.model.decoder
            embedded = decoder.embed_tokens(ids).view(recipes, len(ids) // recipes, -1)
            sublayers = sublayers_of(decoder.layers, positions=positions, forward_batch=batch)
            stream = forward(embedded, sublayers, skipped)
            return decoder.norm(stream.view(len(ids), -1))

        drafted = self.model.logits(hidden_of, self._pass(recipes, start, end)).argmax(-1)
        return drafted.view(recipes, -1).cpu().numpy() == self._next[start:end]

    def _pass(self, sets: int, start: int, end: int) -> ForwardBatch:
        """Build the batch that feeds the window from `start` on, once per skip set."""
        first, device = self._length - self.window + start, self._batch.seq_lens.device
        ids = np.tile(self._tokens[start:end], sets)
        past = np.tile(np.arange(first, first + end - start), sets)
        rows = np.full(len(ids), self._row)
        rows_there, ids_there, positions = on_device(np.stack((rows, ids, past)), device)
        slots = torch.full((len(ids),), SPARE_SLOT, device=device)
        here = torch.from_numpy(rows), torch.from_numpy(past)
        return self.model.one_token_each(self._batch, Tokens(*here, rows_there, ids_there, positions, slots))
