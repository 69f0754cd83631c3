"""`Composer`: two drafters in an engine, an n-gram one and one that runs the model, under one controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import create_model

from freedraft.acceptance import KINDS
from freedraft.composition import Choice, Outlook, choose, sizes
from freedraft.config import ConfigError, PluginOptions
from freedraft.controller import Controller
from freedraft.draft import DraftBatch
from freedraft.pace import Pace
from freedraft.step_times import CENTRES

NAME = "freedraft"
DRAFT = ("sssd", "layerskip")
"""The two drafters: the first costs no pass of the model, the second runs it."""
MODEL_KIND = KINDS - 1
"""What `DraftBatch.kinds` says of nodes that the model drafted; n-gram drafters number theirs from 0."""
PROBE_EVERY, PROBE_RARELY = 128, 512
"""Steps without draft passes after which they are tried again, at first and at most."""
HOPE_STEPS = 16
"""Steps after which it is asked again whether passes could pay at all."""


def merged_options(parts: Mapping[str, type[PluginOptions]]) -> type[PluginOptions]:
    """The options of both drafters, and `draft`, which names them.

    Raises:
        ConfigError: one of them is not registered.
    """
    for name in DRAFT:
        if name not in parts:
            raise ConfigError(f"'{NAME}' needs '{name}', which is not registered: run 'freedraft doctor'")
    made: type[PluginOptions] = create_model(
        "ComposedOptions", __base__=tuple(parts[name] for name in DRAFT), draft=(tuple[str, ...], DRAFT)
    )
    made.source_name = NAME
    return made


def part_options(options: Mapping[str, Any], name: str, part: type[PluginOptions]) -> dict[str, Any]:
    """The options of one drafter. Metrics are served once for both."""
    return {
        key: value
        for key, value in options.items()
        if key in part.model_fields and (key != "metrics_port" or name == DRAFT[0])
    }


def check_options(options: Any) -> None:
    """Raises ConfigError for what does not go together."""
    if tuple(options.draft) != DRAFT:
        raise ConfigError(
            f"option 'draft' must be {list(DRAFT)}, not {list(options.draft)}: to draft with one of them, use its name"
        )
    if options.policy not in (None, "auto") or (options.policy is None and options.knee is not None):
        raise ConfigError("option 'policy' must be auto, without a knee: it weighs both drafters by what steps take")
    if options.lookahead != "cost":
        raise ConfigError("option 'lookahead' must be cost: it weighs both drafters by what passes take")


class Composer:
    """Decides step by step which requests get draft passes.

    Args:
        controller: of the n-gram drafter; None where it has none.
        outlook: (numbers of requests, most tokens) -> what draft passes would bring and take.

    Raises:
        ConfigError: there is no controller, so that nothing can be priced.
    """

    def __init__(self, controller: Controller | None, outlook: Callable[[NDArray[np.int64], int], Outlook]) -> None:
        if controller is None:
            raise ConfigError(f"'{NAME}' cannot price this model's steps (see the warning above): use 'sssd'")
        self.controller = controller
        self.outlook = outlook
        # Which of the two may draft; benchmarks change it.
        self.drafting = frozenset(DRAFT)
        self.idle, self.probe_every = 0, PROBE_EVERY
        self.hopeful: dict[int, tuple[bool, int]] = {}
        self.kept = np.zeros(0, np.int32)
        self.pace = Pace()
        self.last: tuple[frozenset[str], float] = frozenset(), 0.0

    def observe(self, request_ids: Sequence[str], gained: NDArray[np.integer]) -> None:
        """The step is over that `decided` was told of: int [B], tokens that each request has gained by it."""
        before, seconds = self.last
        if seconds:
            known = np.array([request_id in before for request_id in request_ids], np.bool_)
            self.pace.note([request_ids[i] for i in np.flatnonzero(known)], gained[known], seconds)

    def decided(self, request_ids: Sequence[str], chosen: int, passes: float) -> None:
        """What the step is to verify (see `Controller.cut`), and the seconds that draft passes took."""
        batch = len(request_ids)
        tokens = batch + chosen if self.controller.widths is None else batch * max(chosen, 1)
        self.last = frozenset(request_ids), passes + float(self.seconds(batch, tokens)) if batch else 0.0

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        self.pace.finish(request_ids)

    def choose(self, request_ids: Sequence[str], draft: DraftBatch, allowed: NDArray[np.bool_], most: int) -> Choice:
        """The requests that get draft passes in place of their n-grams; all of them now and then, to see how it goes.

        Args:
            request_ids: the B requests of the step.
            draft: of n-grams.
            allowed: bool [B], requests that may get passes.
            most: tokens that a request may draft.
        """
        batch = draft.batch_size
        choice = Choice(np.zeros(0, np.intp), 0, 0.0)
        if most == 0 or DRAFT[1] not in self.drafting or not allowed.any():
            return choice
        self.kept = draft.counts
        if self.hopes(batch, most):
            p, self.kept = self.controller.worth(draft)
            outlook = self.outlook(sizes(int(allowed.sum())), most)
            table, rate = self.controller.price(batch), self.pace.of(request_ids)
            choice = choose(p, self.kept, allowed, outlook, table, self.controller.widths, rate)
        if len(choice.rows):
            self.idle, self.probe_every = 0, PROBE_EVERY
            return choice
        self.idle += 1
        if self.idle < self.probe_every:
            return choice
        self.idle, self.probe_every = 0, min(2 * self.probe_every, PROBE_RARELY)
        return Choice(np.flatnonzero(allowed), most, max(choice.rate, self.pace.of(request_ids)))

    def hopes(self, batch: int, most: int) -> bool:
        """Whether passes would pay if n-grams offered nothing: where not, there is no need to compare, step by step."""
        known, left = self.hopeful.get(batch, (False, 0))
        if left == 0:
            nothing = np.zeros((batch, 1)), np.ones(batch, np.int32), np.ones(batch, np.bool_)
            table, outlook = self.controller.price(batch), self.outlook(sizes(batch), most)
            known = len(choose(*nothing, outlook, table, self.controller.widths).rows) > 0
            left = HOPE_STEPS
        self.hopeful[batch] = known, left - 1
        return known

    def others(self, choice: Choice) -> tuple[int, int, float]:
        """The requests without passes: how many, their query tokens as far as known, and the step's expected rate."""
        mask = np.ones(len(self.kept), np.bool_)
        mask[choice.rows] = False
        return int(mask.sum()), int(np.maximum(self.kept[mask], 1).sum()), choice.rate

    def cut(self, draft: DraftBatch, passed: DraftBatch, rows: NDArray[np.intp]) -> tuple[DraftBatch, int]:
        """The draft with the rows of `passed` in it, cut to what pays; what n-grams said there is learned from, too.

        Returns:
            the composed draft, and what `Controller.cut` says of it.
        """
        composed = replaced(draft, passed, rows)
        counts = np.zeros_like(draft.counts)
        counts[rows] = draft.counts[rows]
        unverified = DraftBatch(draft.tokens, draft.parents, draft.depths, draft.scores, counts, draft.kinds)
        return composed, self.controller.cut(composed, unverified)

    def seconds(self, batch: ArrayLike, tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a step of the whole model over so many requests, with so many query tokens in all."""
        sizes = np.asarray(batch)
        if sizes.ndim == 0:
            return np.interp(np.asarray(tokens, np.float64), CENTRES, self.controller.price(int(sizes)))
        pairs = zip(*np.broadcast_arrays(sizes, tokens), strict=True)
        return np.array([np.interp(t, CENTRES, self.controller.price(int(b))) for b, t in pairs])


def roots_only(batch: int) -> DraftBatch:
    """Drafts without draft nodes."""
    draft = DraftBatch.empty(batch, 1)
    draft.parents[:], draft.scores[:], draft.counts[:] = -1, 1.0, 1
    return draft


def replaced(draft: DraftBatch, other: DraftBatch, rows: NDArray[np.intp]) -> DraftBatch:
    """A copy of `draft` with some rows of `other`, whose nodes count as the model's."""
    made = DraftBatch.empty(draft.batch_size, max(draft.max_nodes, other.max_nodes))
    for name in ("tokens", "parents", "depths", "scores", "kinds"):
        target = getattr(made, name)
        target[:, : draft.max_nodes] = getattr(draft, name)
        target[rows, : other.max_nodes] = getattr(other, name)[rows]
    made.kinds[rows, 1:] = MODEL_KIND
    made.counts[:] = draft.counts
    made.counts[rows] = other.counts[rows]
    return made
