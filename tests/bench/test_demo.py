"""The demo: its figures from answers, and what it prints where the output is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.demo import __main__ as demo
from bench.demo.measure import BASELINE, SSSD, Answer, Prompt, row

TOKENS = tuple(range(10))


def prompt(baseline: list[float], sssd: list[float]) -> Prompt:
    """A prompt that both servers answer alike, in so many seconds at each repeat."""
    answers = {
        server: [Answer(TOKENS, seconds, 5) for seconds in times]
        for server, times in ((BASELINE, baseline), (SSSD, sssd))
    }
    return Prompt("code", "text", answers)


def test_the_ratio_lies_within_its_spread() -> None:
    """Another prompt is slow at each repeat: medians by prompt see no slow one, and say that both are as fast."""
    slow = [[4.0, 1.0, 1.0], [1.0, 4.0, 1.0], [1.0, 1.0, 4.0]]
    figures = row("code", [prompt(times, [1.0, 1.0, 1.0]) for times in slow])
    assert figures["ratio_min"] <= figures["ratio"] <= figures["ratio_max"]
    assert (figures["ratio"], figures["ratio_min"], figures["ratio_max"]) == (2.0, 2.0, 2.0)
    assert figures["tokens_per_step"] == 2.0 and figures["identical"]


def test_the_ratio_is_the_median_over_repeats() -> None:
    figures = row("code", [prompt([1.0, 3.0, 8.0], [1.0, 1.0, 2.0])])
    assert (figures["ratio"], figures["ratio_min"], figures["ratio_max"]) == (3.0, 1.0, 4.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_each_prompt_gets_a_line_where_the_output_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=output, force_terminal=terminal, width=80))
    with demo.progress(1, 2) as report:
        for repeat in range(2):
            report(prompt([2.0], [1.0]), repeat)
    lines = [line for line in output.getvalue().splitlines() if "code" in line]
    expected = [f"measuring: {i} of 2 (repeat {i}, code): plain 2.0 s, sssd 1.0 s" for i in (1, 2)]
    assert lines == ([] if terminal else expected)
