"""A drafter switched off and on from outside, and what is read off its calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.lib.switch import Switch, Turns, baseline_seconds, calls_in, verdicts
from freedraft.cost.hardware import choose_profile
from freedraft.cost.policies import Fixed
from freedraft.draft import DraftBatch
from freedraft.method import Method
from freedraft.step import EngineContext, Step

LENGTH = 3


class Chains(Method):
    """Drafts the chain 1, 2, 3 for every request; fails on a request called "bad"."""

    def draft(self, step: Step) -> DraftBatch:
        if "bad" in step.request_ids:
            raise KeyError("bad")
        draft = DraftBatch.empty(step.batch_size, LENGTH + 1)
        draft.tokens[:, 0], draft.tokens[:, 1:] = step.roots, np.arange(1, LENGTH + 1)
        draft.parents[:], draft.depths[:] = np.arange(-1, LENGTH), np.arange(LENGTH + 1)
        draft.scores[:], draft.counts[:] = 1.0, LENGTH + 1
        return draft


def method() -> Method:
    return Chains(None, EngineContext(), Fixed(choose_profile("cpu"), LENGTH), "test")


def step(ids: list[str], gained: int, drafted: int) -> Step:
    n = len(ids)
    ends = np.arange(1, n + 1, dtype=np.int64) * gained
    return Step(
        request_ids=ids,
        tokens=np.arange(n * gained, dtype=np.int32),
        starts=ends - gained,
        ends=ends,
        contexts=np.full(n, 10, np.int32),
        capacities=np.full(n, LENGTH, np.int32),
        drafted=np.full(n, drafted, np.int32),
        widths=None,
        previous=None,
        history=lambda b: np.zeros(10, np.int32),
    )


def test_off_means_roots_and_on_means_the_methods_own_drafts() -> None:
    drafter = method()
    switch = Switch(drafter)
    on = drafter.draft(step(["a", "b"], 2, 0))
    on.check()
    assert on.chain(1) == [1, 2, 3]
    switch.wants = lambda step: False
    off = drafter.draft(step(["a", "b"], 3, 3))
    off.check()
    assert off.counts.tolist() == [1, 1] and off.tokens[:, 0].tolist() == [2, 5]
    assert [call.drafted for call in switch.calls] == [[3, 3], [0, 0]]
    assert [call.nodes for call in switch.calls] == [8, 2] and switch.calls[0].contexts == 20


def test_verdicts_are_those_of_the_next_step() -> None:
    drafter = method()
    switch = Switch(drafter)
    drafter.draft(step(["a", "b"], 1, 0))
    drafter.draft(step(["b", "c"], 3, 3))  # b got two of its three draft tokens and one more; a has ended
    assert verdicts(switch.calls) == [(3, 2)]


def test_steps_without_drafts_are_timed_from_outside() -> None:
    drafter = method()
    switch = Switch(drafter, lambda step: False)
    for ids in (["a", "b"], ["a", "b"], ["a", "c"]):
        drafter.draft(step(ids, 1, 0))
    (seconds,) = baseline_seconds(switch.calls, 2)
    assert seconds == switch.calls[1].began - switch.calls[0].ended and baseline_seconds(switch.calls, 1) == []
    assert all(call.pass_seconds is None for call in switch.calls)


def test_a_failure_is_kept_and_passed_on() -> None:
    drafter = method()
    switch = Switch(drafter)
    with pytest.raises(KeyError):
        drafter.draft(step(["bad"], 1, 0))
    assert isinstance(switch.error, KeyError) and switch.calls == []


def test_calls_are_read_from_their_file(tmp_path: Path) -> None:
    drafter = method()
    switch = Switch(drafter, lambda step: step.request_ids[0] == "a", tmp_path / "calls.jsonl")
    assert not calls_in(tmp_path / "calls.jsonl")
    drafter.draft(step(["a"], 2, 0))
    drafter.draft(step(["b"], 1, 0))
    assert calls_in(tmp_path / "calls.jsonl") == switch.calls and [call.on for call in switch.calls] == [True, False]


def test_turns_within_a_request_tell_the_method_what_became_of_its_last_drafts() -> None:
    drafter = method()
    heard: list[int] = []
    drafter.update = lambda step: heard.append(int(step.accepted.sum()))  # type: ignore[method-assign]
    switch = Switch(drafter, Turns(2))
    for i in range(10):
        drafter.draft(step(["a"], 1 + i % 3, LENGTH if i and switch.calls[-1].on else 0))
    assert [call.on for call in switch.calls] == [False] * 2 + [True] * 4 + [False] * 4
    assert len(heard) == 1 and switch.calls[2].kinds == [0]  # the fake drafter's own `draft` does not update
    drafter.draft(step(["b"], 1, 0))
    assert len(heard) == 1  # nothing was drafted for it
