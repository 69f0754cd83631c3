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
    assert row["over"] == {"ngram": pytest.approx([2.5, 2.5, 2.5])}
    group = find(rows, "ngram", "qa", 4)
    assert group["requests"] == 4 and group["ratio"] == pytest.approx(0.8) and "tokens_per_second" not in group


def test_throughput_is_that_of_full_load_and_a_group_has_its_time_per_token() -> None:
    """Two slots full for half of the time, in which 12 of the 16 tokens left; `rag` is decoded at plain's speed."""
    found = [block("plain", i) for i in range(3)]
    found += [block("sssd", i, seconds=0.4, left=12.0, latency_s=[0.4, 0.8], ttft_s=[0.2, 0.4]) for i in range(3)]
    rows = summary.rows(found, PLAIN)
    assert find(rows, "sssd", "all")["tokens_per_second"] == pytest.approx(30)
    assert find(rows, "sssd", "all")["ratio"] == pytest.approx(3)
    assert find(rows, "sssd", "qa")["ratio"] == pytest.approx(2)
    assert find(rows, "sssd", "rag")["ratio"] == pytest.approx(1)


def test_the_ratio_of_throughputs_is_the_median_of_pairs_of_blocks() -> None:
    found = [block("plain", i) for i in range(3)] + [block("sssd", i, seconds=s) for i, s in enumerate((0.8, 0.8, 80))]
    found.append(block("sssd", 3))
    found += [block("plain", 3, seconds=0.0, left=0.0), block("plain", 4)]
    row = find(summary.rows(found, PLAIN), "sssd", "all")
    assert row["ratio"] == pytest.approx(2), "a slow minute, a block that was never full and one without its pair"


def test_a_differing_answer_shows() -> None:
    found = [b for b in blocks() if (b["arm"], b["block"], b["concurrency"]) != ("sssd", 0, 1)]
    found.append(block("sssd", 0, answers=["a0", "other"]))
    rows = summary.rows(found, PLAIN)
    assert find(rows, "sssd", "rag")["identical"] == pytest.approx(3 / 4)
    assert find(rows, "sssd", "qa")["identical"] == 1.0


def test_only_blocks_that_both_answered_are_compared() -> None:
    found = [b for b in blocks() if (b["arm"], b["block"], b["concurrency"]) != ("plain", 0, 1)]
    found.append(block("plain", 0, errors=["refused"], seconds=1000.0, latency_s=[None, 1.0]))
    row = find(summary.rows(found, PLAIN), "sssd", "qa")
    assert row["ratio"] == pytest.approx(2)
    assert row["requests"] == 4  # its own figures count all that it answered


def test_the_best_fixed_length_of_each_cell() -> None:
    seconds = {
        1: {"plain": 1.0, "sssd": 0.5, "short": 0.49, "long": 0.8},
        8: {"plain": 1.0, "sssd": 1.02, "short": 1.5, "long": 2.0},
    }
    found = [
        block("plain", i, at_once, seconds=s, groups=["qa", "qa"]) | {"arm": arm}
        for at_once, by_arm in seconds.items()
        for arm, s in by_arm.items()
        for i in range(3)
    ]
    fixed = {"method": "sssd", "policy": "fixed"}
    given = {"plain": None, "sssd": {"method": "sssd"}, "short": fixed, "long": fixed, "ngram": {"method": "ngram"}}
    arms = {name: {"engine": "vllm", "speculative": speculative} for name, speculative in given.items()}
    rows = summary.rows(found, dict.fromkeys(seconds[1], "plain"))
    shares = summary.of_best_length(rows, arms)
    cells = [(r["concurrency"], r["group"]) for r in rows if r["arm"] == "sssd"]
    found_shares = dict(zip(cells, shares, strict=True))
    assert found_shares[1, "all"] == pytest.approx(0.49 / 0.5), "of the short fixed length"
    assert found_shares[8, "all"] == pytest.approx(1 / 1.02), "of plain decoding"
