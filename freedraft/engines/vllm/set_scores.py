"""How well recipes would have drafted the newest tokens of a request: many of them in one forward pass of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_model import MatchnessScorer, T, Visit
from freedraft.draft_pass import Recipe
from freedraft.engines.many_sets import SETS, forward, run_sublayer, sublayers_of
from freedraft.engines.vllm.forward import Forward
from freedraft.engines.vllm.pages import StepState
from freedraft.step import Step

NO_SLOT = -1  # What the KV kernels take for "write nothing"


class SetScores(MatchnessScorer):
    """Matchness of recipes on the newest `window` tokens that a request has generated.

    Every recipe reads the whole window in one prompt-like pass, uncompiled, through the target's own modules: attention
    reads the target's KV, that of the window included, and writes none. In a real draft the newest token's own KV
    would be the draft's; all else is as there.
    """

    def __init__(self, model: Forward, window: int) -> None:
        self.model = model
        self.window = window
        # Recipes are to a pass what requests are to a step of the engine.
        self.max_recipes = max(1, min(model.runner.max_num_reqs, model.runner.max_num_tokens // window))
        self.turn = 0
        self.tokens = np.zeros(0, np.int64)
        self.first = 0
        self.page: Any = None

    def observe(self, step: Step) -> bool:
        engine: StepState | None = step.engine
        if engine is None:  # the step is over, and its pages may be others'
            return False
        # `window` tokens, each followed by one that was generated.
        eligible = np.flatnonzero(step.contexts - engine.prompt_lengths() > self.window)
        if not len(eligible):
            return False
        chosen = int(eligible[self.turn % len(eligible)])
        self.turn += 1
        self.first = int(step.contexts[chosen]) - self.window - 1
        self.tokens = step.history(chosen)[self.first :].astype(np.int64)
        pages = engine.pages()
        self.page = pages.table[int(pages.rows[chosen])]
        return True

    @torch.inference_mode()
    def __call__(self, recipes: Sequence[Recipe]) -> NDArray[np.float64]:
        bits = np.array([recipe.bits for recipe in recipes], np.bool_)
        parts = [self._scores(bits[i : i + self.max_recipes]) for i in range(0, len(bits), self.max_recipes)]
        return np.concatenate(parts)

    @torch.inference_mode()
    def run_sublayers(self, visit: Visit[T]) -> T:
        sets = min(self.max_recipes, SETS)

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> T:
            backbone = self.model.backbone
            sublayers = sublayers_of(backbone.layers, positions=positions)
            return visit(backbone.embedding(tokens[: self.window]), partial(run_sublayer, sublayers, sets))

        result: T = self._run(run, sets)
        return result

    def _scores(self, skipped: NDArray[np.bool_]) -> NDArray[np.float64]:
        drafted = self._run(partial(self._best, skipped), len(skipped))
        return (drafted.view(len(skipped), -1).cpu().numpy() == self.tokens[1:]).mean(1)

    def _run(self, module: Any, sets: int) -> Any:
        model, window = self.model, self.window
        end, n = self.first + window, sets * window
        starts = torch.arange(0, n + 1, window, dtype=torch.int32)
        return model.run(
            module,
            model.tensor(np.tile(self.tokens[:-1], sets)),
            positions=model.tensor(np.tile(np.arange(self.first, end), sets)),
            slots=torch.full((n,), NO_SLOT, dtype=torch.int64, device=model.device),
            lengths=np.full(sets, end, np.int32),
            starts=(starts.to(model.device), starts),
            pages=self.page.expand(sets, -1).contiguous(),
        )

    def _best(self, skipped: NDArray[np.bool_], tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [J * window]: the most likely token after each."""
        backbone = self.model.backbone
        hidden = backbone.embedding(tokens).view(len(skipped), self.window, -1)
        stream = forward(hidden, sublayers_of(backbone.layers, positions=positions), skipped)
        return backbone.logits(backbone.norm(stream.view(len(tokens), -1))).argmax(-1)
