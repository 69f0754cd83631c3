"""Throughput under full load: what counts of a run of `vllm bench serve`."""

from __future__ import annotations

import pytest

from bench.lib.load import full_load


def run(*requests: tuple[float, float, list[float], int]) -> dict[str, object]:
    """Of (start, time to the first chunk, gaps between chunks, tokens)."""
    return dict(
        zip(("start_times", "ttfts", "itls", "output_lens"), map(list, zip(*requests, strict=True)), strict=True)
    )


def test_tokens_between_the_first_free_place_and_the_last_request() -> None:
    """Two at a time; the first answer ends at 103 s, and another request takes its place; the last is sent at 106 s."""
    result = run(
        (100.0, 1.0, [0.0, 1.0, 1.0], 3),  # tokens at 101, 102, 103: before
        (100.0, 1.5, [0.0, 2.5, 2.0], 9),  # three tokens a chunk, at 101.5, which is before, 104 and 106
        (103.0, 0.5, [0.0, 0.5, 2.5], 3),  # at 103.5, 104, and 106.5, which is the tail
        (106.0, 0.5, [0.0, 0.5], 2),
    )
    seconds, tokens = full_load(result, 2)
    assert seconds == pytest.approx(3)
    assert tokens == pytest.approx(6 + 2)


def test_one_at_a_time_and_runs_that_are_never_full() -> None:
    """Of four requests of a second for the prompt and one for a second token the two in the middle count."""
    one = run(*[(2.0 * i, 1.0, [0.0, 1.0], 2) for i in range(4)])
    assert full_load(one, 1) == (pytest.approx(4), pytest.approx(4))
    assert full_load(one, 3) == full_load(one, 9) == (0.0, 0.0)
    failed = run((0.0, 0.0, [], 0), (0.1, 0.5, [0.0, 0.4], 2), (0.5, 0.1, [0.0], 1))
    assert full_load(failed, 1) == (pytest.approx(0.4), 0.0)
