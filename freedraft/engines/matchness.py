"""`SetScores`: how well recipes would have drafted the newest tokens of a request, by a pre-norm decoder under several
skip sets at once, sublayer by sublayer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from freedraft.draft_model import Recipe
from freedraft.engines.draft_round import Sublayer, T, sublayers_of
from freedraft.step import Step

SETS = 16  # most sets of a pass sublayer by sublayer, which is padded to it


def run_sublayer(
    sublayers: Sequence[Sublayer], passes: int, index: int, states: torch.Tensor, **attention: Any
) -> torch.Tensor:
    """The residual stream after sublayer `index` of all 2L of a pass over the same tokens under `passes` sets. states:
    float [J, W, H], the stream before it under each of J sets; attention: its keyword arguments."""
    norm, run, is_attention = sublayers[index]
    width, size = states.shape[1:]
    added = []
    for part in states.split(passes):
        rows = norm(part.reshape(-1, size))
        if is_attention:  # always over all rows of a pass
            rows = run(hidden_states=pad(rows, (0, 0, 0, (passes - len(part)) * width)), **attention)
        else:
            rows = run(rows)
        added.append(rows[: len(part) * width])
    return states + torch.cat(added).view_as(states)


class Target(Protocol):
    """An engine's target model, for rereading text that is in its KV cache."""

    def parts(self) -> tuple[Any, Any, Any, Any]:
        """Its embedding, decoder layers, last norm, and head, which takes the keyword arguments of attention too."""

    def prompt_lengths(self, step: Step) -> NDArray[Any]:
        """int [B]: tokens of each request's prompt."""

    def locate(self, step: Step, row: int) -> tuple[Any, int]:
        """The place of the KV of the request at `row` of the step, and its number of tokens."""

    def read_again(self, place: Any, tokens: NDArray[np.int64], first: int, sets: int, work: Callable[..., T]) -> T:
        """Return the result of `work`(token ids, positions, keyword arguments of attention) in a pass over int64 [n]
        tokens from position `first` on, `sets` times; attention writes no KV of requests."""


class SetScores:
    """SWIFT's matchness of recipes: the share of the newest `window` generated tokens of a request that a recipe's most
    likely token predicts. By the target's own modules, uncompiled. Attention reads the target's KV, also of the window;
    a real draft would read the draft's own KV of the newest token. max_recipes: most recipes per pass; part: most
    tokens of the window per pass and recipe."""

    def __init__(self, model: Target, window: int, max_recipes: int, part: int) -> None:
        self.model, self.window, self.max_recipes, self.part = model, window, max_recipes, part
        self.tokens: NDArray[np.int64] = np.zeros(0, np.int64)  # [window + 1], the tokens to read, and the next one
        self.first = self._turn = 0  # position of the first token
        self._place: Any = None

    def observe(self, step: Step) -> bool:
        """Take the newest tokens of one request of this step, a different one each time; False if none has enough."""
        if step.engine is None:  # the step is over, and its pages may be reused
            return False
        # `window` tokens, each followed by a generated one.
        eligible = np.flatnonzero(step.contexts - self.model.prompt_lengths(step) > self.window)
        if not len(eligible):
            return False
        row = int(eligible[self._turn % len(eligible)])
        self._turn += 1
        self.tokens = step.history(row)[-self.window - 1 :].astype(np.int64)
        self._place, computed = self.model.locate(step, row)
        self.first = computed - self.window
        return True

    def __call__(self, recipes: Sequence[Recipe]) -> NDArray[np.float64]:
        """float64 [J]: matchness of each recipe on the tokens that `observe` took; one batched forward pass."""
        bits = np.array([recipe.bits for recipe in recipes], np.bool_)
        parts = range(0, self.window, self.part)
        right = [
            np.concatenate([self._right(bits[i : i + self.max_recipes], j, j + self.part) for j in parts], 1)
            for i in range(0, len(bits), self.max_recipes)
        ]
        return np.concatenate(right).mean(1)

    def run_sublayers(self, visit: Callable[[torch.Tensor, Callable[..., torch.Tensor]], T]) -> T:
        """Return the result of `visit`, which runs the model sublayer by sublayer over the newest of these tokens that
        fit into one pass. Its arguments: the embedded tokens, float [W, H], and a function (index of a sublayer, float
        [J, W, H]) -> the residual stream after it, for J streams before it."""
        sets, (embedding, layers, *_) = min(self.max_recipes, SETS), self.model.parts()

        def work(ids: torch.Tensor, positions: torch.Tensor, **given: Any) -> T:
            run = partial(run_sublayer, sublayers_of(layers), sets, positions=positions, **given)
            return visit(embedding(ids[: self.part]), run)

        return self._read(work, sets, self.window - self.part, self.window)

    def _right(self, skipped: NDArray[np.bool_], start: int, end: int) -> NDArray[np.bool_]:
        """bool [J, n]: after which tokens of the window from `start` on each of J recipes drafts the actual next
        token."""
        sets, (embedding, layers, norm, head) = len(skipped), self.model.parts()

        def best(ids: torch.Tensor, positions: torch.Tensor, **given: Any) -> torch.Tensor:
            stream = embedding(ids).view(sets, len(ids) // sets, -1)
            sublayers = sublayers_of(layers)
            for index in range(2 * len(layers)):
                keep = torch.from_numpy(np.flatnonzero(~skipped[:, index])).to(stream.device)
                if len(keep):
                    stream[keep] = run_sublayer(sublayers, sets, index, stream[keep], positions=positions, **given)
            logits: torch.Tensor = head(norm(stream.view(len(ids), -1)), **given)
            return logits.argmax(-1)

        drafted = self._read(best, sets, start, end)
        return drafted.view(sets, -1).cpu().numpy() == self.tokens[1:][start:end]

    def _read(self, work: Callable[..., T], sets: int, start: int, end: int) -> T:
        return self.model.read_again(self._place, self.tokens[:-1][start:end], self.first + start, sets, work)
