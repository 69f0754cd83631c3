"""A draft loop over made-up draft models, as `LayerSkipMethod` drives a policy, and costs that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.cost.acceptance import Acceptance
from freedraft.draft import DraftBatch
from layerskip_plugin.lookahead import Cost, Lookahead
from layerskip_plugin.rounds import Candidate, Outcome
from layerskip_plugin.skip_set import SkipSet
from tests.support.continuations import observe

Feature = Callable[[int, NDArray[np.int32]], NDArray[np.float32]]
RECIPE = SkipSet(2, frozenset({1}), frozenset())


class Line:
    """Seconds by size: straight lines between the points, and beyond the last two."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self.at, self.seconds = np.array(sorted(points.items()), np.float64).T
        slopes = np.diff(self.seconds) / np.diff(self.at)
        self.slope = max([0.0, *slopes[-1:]])

    def __call__(self, size: ArrayLike) -> NDArray[np.float64]:
        size = np.asarray(size, np.float64)
        return np.interp(size, self.at, self.seconds) + self.slope * np.maximum(size - self.at[-1], 0)


class KnownCosts:
    """Costs of a machine: draft passes by recipe and number of requests, steps by query tokens."""

    def __init__(
        self, draft: Mapping[int, float] | Mapping[SkipSet, Mapping[int, float]], step: Mapping[int, float],
        widths: Sequence[int] | None = None, longest: int = 64,
    ) -> None:  # fmt: skip
        self.widths, self.max_draft_tokens = None if widths is None else np.array(widths), longest
        by_recipe = draft if isinstance(next(iter(draft)), SkipSet) else {RECIPE: draft}
        self.draft = {recipe: Line(points) for recipe, points in by_recipe.items()}
        self.step = Line(step)
        self.acceptance = Acceptance()

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        return self.step(query_tokens)

    def pass_seconds(self, recipe: SkipSet, batch: ArrayLike) -> NDArray[np.float64]:
        return self.draft[recipe](batch)


def cost(draft: Mapping[int, float], step: Mapping[int, float], **rest: object) -> Cost:
    """A cost policy over one skip set."""
    return Cost(KnownCosts(draft, step, **rest), [RECIPE])


def outcome(
    ids: Sequence[str], drafted: NDArray[np.int32], accepted: NDArray[np.int32], top: NDArray[np.float32] | None = None,
    entropy: NDArray[np.float32] | None = None, recipe: SkipSet = RECIPE,
) -> Outcome:  # fmt: skip
    """What verification said of chains that were verified whole; top: [R, D, K]; entropy: [R, D]."""
    top = np.zeros((len(ids), int(drafted.max(initial=0)), 1), np.float32) if top is None else top
    entropy = np.zeros(top.shape[:2], np.float32) if entropy is None else entropy
    return Outcome(recipe, ids, drafted, drafted, accepted, accepted, top, entropy)


class Driver:
    """Drives a policy; what verification says teaches the acceptance of the costs, too, as a controller does."""

    def __init__(self, policy: Lookahead, seed: int = 0) -> None:
        self.policy, self.rng = policy, np.random.default_rng(seed)

    def draft(
        self, ids: Sequence[str], longest: int, confidence: Feature | float, recipe: SkipSet = RECIPE
    ) -> NDArray[np.int32]:
        """How many tokens the policy drafts for each request; `confidence(position, rows)` gives float32[R]."""
        policy = self.policy
        self.ids, self.recipe, self.confidences = list(ids), recipe, np.ones((len(ids), longest), np.float32)
        policy.begin(ids, recipe, longest)
        drafted = np.zeros(len(ids), np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        for position in range(longest):
            drafted[rows] += 1
            top = np.zeros((len(rows), policy.outputs.top), np.float32)
            top[:, 0] = confidence(position, rows) if callable(confidence) else confidence
            self.confidences[rows, position] = top[:, 0]
            more = policy.should_continue(position, rows, top, np.zeros(len(rows), np.float32))
            assert more.dtype == np.bool_ and more.shape == rows.shape
            rows = rows[more]
            if not len(rows):
                break
        assert not len(rows), "a policy must stop at the longest draft allowed"
        return drafted

    def judge(self, drafted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """Verified and accepted tokens of the requests of the last round."""
        top = self.confidences[:, :, None]
        self.policy.record_acceptance(outcome(self.ids, drafted, accepted, top, recipe=self.recipe))
        if isinstance(self.policy, Cost):
            draft = DraftBatch.empty(len(self.ids), self.confidences.shape[1] + 1)
            draft.counts[:] = drafted + 1
            draft.tokens[:] = draft.depths[:] = np.arange(draft.max_nodes)
            draft.parents[:] = np.arange(-1, draft.max_nodes - 1)
            draft.scores[:, 0], draft.scores[:, 1:] = 1.0, np.cumprod(self.confidences, 1)
            draft.kinds[:] = self.policy.kind
            followed = [[*range(1, n + 1), 10**6] for n in accepted.tolist()]
            observe(self.policy.costs.acceptance, draft, followed)

    def luck(self, drafted: NDArray[np.int32], chance: ArrayLike, longest: int) -> NDArray[np.int32]:
        """Accepted tokens, where each is accepted with this chance."""
        lucky = self.rng.random((len(drafted), longest)) < np.reshape(chance, (-1, 1))
        return np.minimum(np.cumprod(lucky, 1).sum(1), drafted).astype(np.int32)

    def serve(
        self,
        steps: int,
        accept: float | Mapping[SkipSet, float] | Callable[[SkipSet, NDArray[np.int32]], NDArray[np.int32]],
        longest: int = 5,
        confidence: Feature | float = 0.7,
        candidates: Sequence[Candidate] = (Candidate(RECIPE, 1, 1),),
        context: float = 300.0,
    ) -> list[SkipSet | None]:
        """The recipe that drafted, by step, of a `Cost`; `self.lengths` are the mean drafts of the steps with one.

        Args:
            accept: the chance that a token is accepted, or that by recipe, or how many of those drafted are.
            candidates: of each step; all requests of the first one are the batch.
        """
        used: list[SkipSet | None] = []
        self.lengths: list[float] = []
        batch = candidates[0].requests if candidates else 1
        for _ in range(steps):
            self.policy.choose(candidates, batch, context)
            used.append(self.policy.recipe_of_round())
            if (recipe := used[-1]) is not None:
                drafted = self.draft([f"r{i}" for i in range(batch)], longest, confidence, recipe)
                if callable(accept):
                    self.judge(drafted, accept(recipe, drafted))
                else:
                    chance = accept[recipe] if isinstance(accept, Mapping) else accept
                    self.judge(drafted, self.luck(drafted, chance, longest))
                self.lengths.append(float(drafted.mean()))
        return used


def share(used: Sequence[SkipSet | None]) -> float:
    """The share of steps with drafts."""
    return sum(recipe is not None for recipe in used) / len(used)
