"""What a method raises costs drafts, never more: it is counted, and tried again after a pause."""

import logging
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from freedraft.config import PluginOptions
from freedraft.cost.controller import FullLength
from freedraft.cost.hardware import HardwareProfile
from freedraft.draft import DraftBatch
from freedraft.engines.draft_round import DraftRanks
from freedraft.guarded_method import FIRST_PAUSE, FORGIVEN, LONGEST_PAUSE, EngineMustEnd, GuardedMethod
from freedraft.method import Method, MethodSpec
from freedraft.on_top import register_installed
from freedraft.step import EngineContext, Step
from tests.support.steps import make_step

REASONS = ("cost", "no match", "no room", "failure", "off")
PROFILE = HardwareProfile(name="x", peak_flops=1e12, bandwidth=1e10, source="measured")


class Fragile(Method):
    """A method that raises in the calls that a test names. It can rest."""

    needs_logits = True

    def __init__(self, options: Any, context: EngineContext) -> None:
        super().__init__(options, context, FullLength(PROFILE, 4), "fragile")
        self.fails: set[str] = set()
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise RuntimeError(f"{name} fails")

    def begin(self, request_id: str, tokens: Any, tenant: Any, extra: Any) -> None:
        self._call("begin")

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        self._call("propose")
        return DraftBatch.roots(step.roots)

    def record_acceptance(self, step: Step) -> None:
        super().record_acceptance(step)
        self._call("record_acceptance")

    def finish(self, request_id: str, output: Any) -> None:
        self._call("finish")

    def rests(self) -> bool:
        return True

    def update(self, step: Step) -> None:
        self._call("update")
        self.taken = list(step.request_ids), step.tokens[step.starts].tolist(), step.contexts.tolist()


@pytest.fixture
def guarded() -> GuardedMethod:
    return GuardedMethod(MethodSpec("fragile", f"{__name__}:Fragile", PluginOptions), PluginOptions(), EngineContext())


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"freedraft_{name}", {"method": "fragile"} | labels) or 0.0


STEP = make_step(["a"], [[7]], drafted=2)


def taken(guarded: GuardedMethod, step: Step, undrafted: str = "") -> DraftBatch | None:
    draft = guarded.step(step, undrafted)
    guarded.settle()
    return draft


def test_a_failure_is_counted_and_followed_by_pauses_that_double(
    guarded: GuardedMethod, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.method.fails = {"propose", "record_acceptance"}  # a method that failed may also fail to count
    before, tried = value("failures_total"), []
    for number in range(40 * FIRST_PAUSE):
        guarded.method.calls.clear()
        assert taken(guarded, STEP) is None
        tried += [number] * guarded.method.calls.count("propose")
    assert np.diff(tried).tolist() == [FIRST_PAUSE * 2**i + 1 for i in range(len(tried) - 1)]
    assert value("failures_total") - before == len(tried) > 3
    assert len(caplog.records) == len(tried) and all(record.exc_info for record in caplog.records)


def test_steps_that_verify_nothing_belong_to_a_pause(guarded: GuardedMethod) -> None:
    guarded.method.fails = {"propose"}
    taken(guarded, STEP)
    guarded.method.fails = set()
    for _ in range(FIRST_PAUSE):
        taken(guarded, STEP, "cost")
    assert guarded.method.calls.count("propose") == 1 and taken(guarded, STEP) is not None


def test_a_method_that_cannot_be_imported_or_registered_is_left_out(monkeypatch, caplog) -> None:
    targets = {"gone": "no_such_package:SPEC", "bad": f"{__name__}:REASONS", "there": f"{__name__}:STEP"}
    points = [EntryPoint(name, target, "g") for name, target in targets.items()]
    monkeypatch.setattr("freedraft.on_top.entry_points", lambda group: points)
    monkeypatch.setattr("freedraft.on_top.METHODS", {})
    found: list[Any] = []
    register_installed(lambda spec: found.append(spec.request_ids))
    assert found == [["a"]] and all(f"no method '{name}'" in caplog.text for name in ("gone", "bad"))


def test_it_drafts_again_and_is_forgiven(guarded: GuardedMethod) -> None:
    method = guarded.method
    method.fails = {"propose"}
    for _ in range(2 * FIRST_PAUSE + 3):
        taken(guarded, STEP)
    method.fails = set()
    assert any(taken(guarded, STEP) is not None for _ in range(LONGEST_PAUSE)), "it never drafted again"
    assert all(taken(guarded, STEP) is not None for _ in range(FORGIVEN))
    method.fails = {"propose"}
    taken(guarded, STEP)
    method.fails = set()
    drafted = [taken(guarded, STEP) is not None for _ in range(FIRST_PAUSE + 1)]
    assert drafted == [False] * FIRST_PAUSE + [True], "the pause is a first one again"


def test_requests_begin_and_finish_during_a_pause(guarded: GuardedMethod) -> None:
    guarded.method.fails = {"propose", "begin", "finish"}
    guarded.begin("a", np.zeros(3, np.int32))
    taken(guarded, STEP)
    guarded.begin("b", np.zeros(3, np.int32))
    assert guarded.running == {"a", "b"}
    for request_id in "ab":
        guarded.finish(request_id)
    assert not guarded.running
    assert [guarded.method.calls.count(name) for name in ("begin", "finish")] == [2, 2]


def test_nothing_is_learnt_of_an_output_whose_end_is_not_found(guarded: GuardedMethod) -> None:
    outputs: list[Any] = []
    guarded.method.finish = lambda request_id, output: outputs.append(output)
    for output in (lambda: int("no number"), lambda: np.array([7]), None):
        guarded.finish("a", output)
    assert outputs[0].tolist() == [] and outputs[1].tolist() == [7] and outputs[2] is None


def test_the_counts_add_up_also_through_failures(guarded: GuardedMethod) -> None:
    """Every request decoded gets a draft or a reason why not, and its tokens are counted; the budget is the last's."""
    names = ("request_steps_total", "tokens_total", "draft_tokens_total", "accepted_tokens_total")
    timed = value("drafting_seconds_count")

    def counts() -> list[float]:
        lengths = [value("accepted_lengths_total", length=str(n)) for n in range(5)]
        reasons = [value("undrafted_requests_total", reason=reason) for reason in REASONS]
        return [value(name) for name in names] + reasons + lengths

    before = counts()
    guarded.begin("d", np.zeros(3, np.int32), None, {"freedraft": "off"})
    guarded.begin("a", np.zeros(3, np.int32), None, {"freedraft": ["off"]})
    step = make_step("abcd", [[1, 2, 3], [4], [5], [6]], drafted=[4, 2, 0, 0], capacities=[4, 0, 4, 0])
    drafted = DraftBatch.empty(4, 2)
    drafted.counts[:] = 2
    taken(guarded, step)  # nothing matches
    assert value("budget_tokens") == 16 and value("drafting_seconds_count") == timed + 1
    guarded.method.propose = lambda *_: drafted
    taken(guarded, step)
    guarded.method.controller.max_draft_tokens = 0
    taken(guarded, step)
    taken(guarded, step, "cost")
    taken(guarded, step, "no room")
    guarded.method.controller.max_draft_tokens = 4
    guarded.method.propose = None
    taken(guarded, step)  # fails
    taken(guarded, step)  # a pause
    taken(guarded, step, "cost")
    more = [now - was for now, was in zip(counts(), before, strict=True)]
    assert more[:4] == [8 * 4, 8 * 6, 8 * 6, 8 * 2] and more[1] == more[0] + more[3]
    reasons = dict(zip(REASONS, more[4:9], strict=True))
    assert reasons == {"cost": 2 + 3, "no match": 2, "no room": 3 * 1 + 3, "failure": 3 * 3, "off": 8}
    assert more[0] - sum(reasons.values()) == 2, "the drafts of a and c"
    assert more[9:] == [8, 0, 8, 0, 0]
    guarded.finish("d")
    taken(guarded, step, "no room")
    assert value("undrafted_requests_total", reason="off") - before[8] == 8, "an id may come again"


NO_OFF = [{"freedraft": sent} for sent in ("of", 0, ["off"], {"off": 1}, None)]


@pytest.mark.parametrize("sent", [{"freedraft": "off"}, *NO_OFF, {"skip_set": ["off"]}], ids=str)
def test_what_a_client_sends_that_is_no_off_is_ignored(guarded: GuardedMethod, sent: dict[str, Any]) -> None:
    before = value("undrafted_requests_total", reason="off")
    guarded.begin("a", np.zeros(3, np.int32), None, sent)
    taken(guarded, STEP)
    assert value("undrafted_requests_total", reason="off") - before == (sent == {"freedraft": "off"})


def survived(guarded: GuardedMethod, error: Exception) -> bool:
    with guarded:
        raise error
    return True


# As torch, cudart, NCCL and Triton raise them.
FAULTS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.cuda.CudaError.__new__(torch.cuda.CudaError),  # only a driver has its words
    torch.distributed.DistBackendError("NCCL error: unhandled system error"),
    RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
]
# What leaves the device as it was.
PASSING = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_faults_of_a_device_are_the_engines(
    guarded: GuardedMethod, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """No step after them can succeed: they are raised as they are, without a word of drafting before them. What leaves
    the device alone is survived."""
    before = value("failures_total")
    with pytest.raises(type(fault)) as raised, caplog.at_level(logging.DEBUG):
        survived(guarded, fault)
    assert raised.value is fault and value("failures_total") == before and not caplog.records
    assert taken(guarded, STEP) is not None, "and no pause follows"
    assert all(survived(guarded, error) for error in PASSING)


def test_a_rank_whose_device_fails_in_a_draft_pass_raises_that(caplog: pytest.LogCaptureFixture) -> None:
    """And not that drafting has ended the engine, which is for what leaves other ranks waiting."""
    ranks = DraftRanks(SimpleNamespace(world_size=2, rank_in_group=1))
    with pytest.raises(torch.AcceleratorError), caplog.at_level(logging.DEBUG), ranks.together():
        raise FAULTS[0]
    assert not caplog.records
    for error in (ValueError("a mistake"), *PASSING):
        with pytest.raises(EngineMustEnd), ranks.together():
            raise error


@pytest.mark.parametrize("fails", [False, True])
def test_steps_of_a_rest_are_taken_at_once_before_anything_else(guarded: GuardedMethod, fails: bool) -> None:
    """In order, and counted, also where taking them fails."""
    guarded.method.fails = {"update"} if fails else set()

    def counts() -> np.ndarray:
        undrafted = value("undrafted_requests_total", reason="failure" if fails else "cost")
        return np.array([value("request_steps_total"), value("tokens_total"), undrafted])

    before = counts()
    assert guarded.rests() and guarded.needs_logits
    guarded.keep(["a", "b"], np.array([5, 6], np.int32), np.array([3, 9]))
    guarded.keep(["a"], np.array([7], np.int32), np.array([4]))
    assert not guarded.method.calls and not guarded.needs_logits
    guarded.finish("a")
    assert guarded.method.calls[0] == "update" and guarded.method.calls[-1] == "finish"
    assert fails or guarded.method.taken == (["a", "b", "a"], [5, 6, 7], [3, 9, 4])
    assert (counts() - before).tolist() == [3, 3, 3]
    assert guarded.rests() == (not fails), "during a pause nothing rests"
