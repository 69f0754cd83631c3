"""Throughput while so many requests are under way: what counts of a run of `vllm bench serve`."""

from __future__ import annotations

import pytest

from bench.lib.load import full_load


def run(*requests: tuple[float, float, list[float], int]) -> dict[str, object]:
    """Of (start, time to the first chunk, gaps between chunks, tokens)."""
    return dict(
        zip(("start_times", "ttfts", "itls", "output_lens"), map(list, zip(*requests, strict=True)), strict=True)
    )


def test_tokens_between_the_first_of_all_slots_and_the_last_request() -> None:
    """Two at a time: full from 101.5 s, when the second one begins to answer, to 105 s, when the last one is sent."""
    result = run(
        (100.0, 1.0, [0.0, 1.0, 1.0], 3),  # tokens at 101 (too early), 102, 103
        (100.0, 1.4, [0.1, 1.0, 2.5], 9),  # three tokens a chunk, at 101.5, which is the ramp, 102.5 and 105
        (103.0, 0.5, [0.0, 0.5, 2.0], 3),  # at 103.5, 104, and 106, which is the tail
        (105.0, 0.5, [0.0, 0.5], 2),
    )
    seconds, tokens = full_load(result, 2)
    assert seconds == pytest.approx(3.5)
    assert tokens == pytest.approx(2 + 6 + 2)


def test_one_at_a_time_and_runs_that_are_never_full() -> None:
    one = run((0.0, 1.0, [0.0, 1.0], 2), (2.0, 1.0, [0.0, 1.0], 2), (4.0, 1.0, [0.0], 1))
    assert full_load(one, 1) == (pytest.approx(3.0), pytest.approx(1 + 2))
    assert full_load(one, 3)[0] == 0.0
    failed = run((0.0, 0.0, [], 0), (0.1, 0.5, [0.0, 0.4], 2))
    assert full_load(failed, 1) == (pytest.approx(0.1), 0.0)
