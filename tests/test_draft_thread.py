"""Drafts in a thread of their own: work keeps its order, and nobody waits longer than the bound."""

from __future__ import annotations

import threading
import time

import pytest

from freedraft.draft_thread import DraftThread
from tests.support.waiting import wait_until


def test_work_in_order():
    thread, seen = DraftThread(10.0, pytest.fail), []
    for i in range(100):
        thread.call(lambda i=i: seen.append(i))
        assert thread.result(thread.start(lambda i=i: seen.append(-i) or i)) == i
    assert seen == [sign * i for i in range(100) for sign in (1, -1)]


def test_late_drafts_delay_no_step_and_what_comes_after_them_waits_for_them(caplog):
    late_steps, seen, go_on = [], [], threading.Event()
    thread = DraftThread(0.05, lambda: late_steps.append(1))
    late = thread.start(lambda: go_on.wait(30) and seen.append("late"))
    started = time.monotonic()
    assert thread.result(late) is None
    assert 0.05 <= time.monotonic() - started < 5
    started = time.monotonic()
    assert thread.start(lambda: seen.append("never")) is None and thread.result(None) is None
    thread.call(lambda: seen.append("request ends"))
    assert time.monotonic() - started < 5 and seen == [] and len(late_steps) == 2
    assert [record.getMessage() for record in caplog.records if "draft_timeout_ms" in record.getMessage()]
    go_on.set()
    again = []
    wait_until(lambda: (len(seen) == 2 and again.append(thread.start(lambda: "drafts"))) or any(again))
    assert seen == ["late", "request ends"] and again[-1].result(10) == "drafts"


def test_errors_reach_who_waits():
    thread = DraftThread(10.0, pytest.fail)

    def fail():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        thread.result(thread.start(fail))
    assert thread.result(thread.start(lambda: 1)) == 1
