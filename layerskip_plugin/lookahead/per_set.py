"""One policy for each skip set of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from freedraft.draft_pass import Recipe, RestOfBatch
from layerskip_plugin.lookahead.base import ALONE, Flags, Floats, Ints, Lookahead, Places


class PerSet(Lookahead):
    """Policies that learn from one skip set's drafts each.

    Args:
        make: makes a policy.
        count: number of skip sets.
    """

    def __init__(self, make: Callable[[], Lookahead], count: int) -> None:
        self.make = make
        self.policies = [make() for _ in range(count)]
        self.needs_top, self.needs_entropy = self.policies[0].needs_top, self.policies[0].needs_entropy

    def replace_recipe(self, place: int, recipe: Recipe) -> None:
        self.policies[place] = self.make()

    def begin(self, request_ids: Sequence[str], places: Places, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, places, max_draft_len, rest)
        self.sets = np.asarray(places)
        self.set_of = dict(zip(request_ids, self.sets.tolist(), strict=True))
        self.place = np.zeros(len(places), np.int32)
        for number, policy in enumerate(self.policies):
            rows = np.flatnonzero(self.sets == number)
            self.place[rows] = np.arange(len(rows))
            policy.begin([request_ids[i] for i in rows.tolist()], self.sets[rows], max_draft_len, rest)

    def end(self, length: int) -> None:
        for number in np.unique(self.sets).tolist():
            self.policies[number].end(length)

    def expected_len(self) -> int:
        return max(self.policies[number].expected_len() for number in np.unique(self.sets).tolist())

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        more = np.zeros(len(rows), np.bool_)
        for number, policy in enumerate(self.policies):
            mine = np.flatnonzero(self.sets[rows] == number)
            if len(mine):
                part = None if entropy is None else entropy[mine]
                more[mine] = policy.should_continue(position, self.place[rows[mine]], top[mine], part)
        return more

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        sets = np.array([self.set_of.get(request, -1) for request in request_ids], np.intp)
        for number, policy in enumerate(self.policies):
            mine = np.flatnonzero(sets == number)
            if len(mine):
                ids = [request_ids[i] for i in mine.tolist()]
                policy.record_acceptance(ids, drafted[mine], accepted[mine], path[mine])

    def finish(self, request_ids: Sequence[str]) -> None:
        for policy in self.policies:
            policy.finish(request_ids)
