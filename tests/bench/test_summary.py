"""What is worked out of blocks: throughput, ratio to plain, acceptance and identity."""

from __future__ import annotations

from typing import Any

import pytest
from results import block, blocks

from bench.lib import summary

PLAIN = {"plain": "plain", "sssd": "plain", "ngram": "plain"}


def find(rows: list[dict[str, Any]], arm: str, group: str, concurrency: int = 1) -> dict[str, Any]:
    (row,) = (r for r in rows if (r["arm"], r["group"], r["concurrency"]) == (arm, group, concurrency))
    return row


def test_rows_by_arm_concurrency_and_group() -> None:
    rows = summary.rows(blocks(), PLAIN)
    assert len(rows) == 3 * 2 * 3
    row = find(rows, "sssd", "all")
    assert row["requests"] == 8 and row["tokens"] == 64
    assert row["tokens_per_second"] == pytest.approx(20)
    assert row["ratio"] == pytest.approx(2) and row["ratio_interval"] == pytest.approx([2, 2])
    assert row["ms_per_token"] == pytest.approx(1000 * 0.4 / 8)
    assert row["ttft_ms"] == pytest.approx(200)
    assert row["decode_ms_per_token"] == pytest.approx(1000 * 0.2 / 7)
    assert row["identical"] == 1.0
    assert "ratio" not in find(rows, "plain", "all")
    assert find(rows, "ngram", "qa", 4)["ratio"] == pytest.approx(0.8)
    assert row["over"] == {"ngram": pytest.approx([2.5, 2.5, 2.5])}


def test_accepted_tokens_save_passes() -> None:
    row = find(summary.rows(blocks(), PLAIN), "sssd", "qa")
    assert row["tokens_per_step"] == pytest.approx(16 / 12)  # 16 tokens of which 4 were accepted drafts
    assert row["drafted_per_step"] == pytest.approx(8 / 12) and row["acceptance"] == pytest.approx(0.5)
    assert "tokens_per_step" not in find(summary.rows(blocks(), PLAIN), "plain", "qa")


def test_a_differing_answer_shows() -> None:
    found = [b for b in blocks() if (b["arm"], b["block"], b["concurrency"]) != ("sssd", 0, 1)]
    found.append(block("sssd", "qa", 0, answers=["a0", "other"]))
    rows = summary.rows(found, PLAIN)
    assert find(rows, "sssd", "qa")["identical"] == pytest.approx(3 / 4)
    assert find(rows, "sssd", "rag")["identical"] == 1.0


def test_only_blocks_that_both_answered_are_compared() -> None:
    found = [b for b in blocks() if (b["arm"], b["block"], b["concurrency"]) != ("plain", 0, 1)]
    found.append(block("plain", "qa", 0, errors=["refused"], seconds=1000.0))
    row = find(summary.rows(found, PLAIN), "sssd", "qa")
    assert row["ratio"] == pytest.approx(2)
    assert row["requests"] == 4  # its own figures count all that it answered


def test_the_interval_is_as_wide_as_blocks_differ() -> None:
    found = [block("plain", "qa", i) for i in range(20)]
    found += [block("sssd", "qa", i, seconds=0.8 * (0.5 if i % 2 else 1.5)) for i in range(20)]
    row = find(summary.rows(found, PLAIN), "sssd", "qa")
    low, high = row["ratio_interval"]
    assert low < row["ratio"] < high and high - low > 0.5


def test_the_best_fixed_length_of_each_cell() -> None:
    seconds = {
        1: {"plain": 1.0, "sssd": 0.5, "short": 0.49, "long": 0.8},
        8: {"plain": 1.0, "sssd": 1.02, "short": 1.5, "long": 2.0},
    }
    found = [
        block("plain", "qa", i, at_once, seconds=s) | {"arm": arm}
        for at_once, by_arm in seconds.items()
        for arm, s in by_arm.items()
        for i in range(3)
    ]
    fixed = {"method": "sssd", "policy": "fixed"}
    given = {"plain": None, "sssd": {"method": "sssd"}, "short": fixed, "long": fixed, "ngram": {"method": "ngram"}}
    arms = {name: {"engine": "vllm", "speculative": speculative} for name, speculative in given.items()}
    rows = summary.rows(found, dict.fromkeys(seconds[1], "plain"))
    few, many = (row for row in summary.of_best_length(rows, arms) if row["arm"] == "sssd")
    assert (few["best"], few["share"]) == ("short", pytest.approx(0.49 / 0.5))
    slower = pytest.approx(1 / 1.02)
    assert (many["best"], many["share"], many["over_plain"]) == ("plain", slower, slower)


def test_questions_that_are_one_group_are_one_cell() -> None:
    """Where groups are put together at many requests at a time, that group is all of them."""
    found = [b for b in blocks() if b["concurrency"] == 1]
    found += [b | {"group": "mixed"} for b in blocks() if b["concurrency"] == 4]
    rows = summary.rows(found, PLAIN)
    assert [r["group"] for r in rows if r["arm"] == "sssd"] == ["qa", "rag", "all", "all"]
    assert find(rows, "sssd", "all", 4)["requests"] == 8
    assert [r["group"] for r in summary.rows([b | {"group": "qa"} for b in blocks()], PLAIN)] == ["qa"] * 6


def test_cells_below_plain_are_those_of_every_arm() -> None:
    rows = summary.rows(blocks(), PLAIN)
    assert summary.below_plain(rows) == {"sssd": (0, 6), "ngram": (6, 6)}
