"""Results of a serving benchmark, made up: two groups, three arms."""

from __future__ import annotations

from typing import Any

SPEED = {"plain": 10.0, "sssd": 20.0, "ngram": 8.0}
ACCEPTED = {"plain": None, "sssd": 4, "ngram": 0}


def block(arm: str, group: str, number: int, concurrency: int = 1, **changes: Any) -> dict[str, Any]:
    """A block of two requests of eight tokens; `SPEED` tokens per second."""
    seconds = 16 / SPEED[arm]
    drafted = None if ACCEPTED[arm] is None else 8
    made = {"arm": arm, "concurrency": concurrency, "repeat": 0, "block": number, "group": group, "served": 0}
    made |= {"seconds": seconds, "latency_s": [seconds / 2] * 2, "ttft_s": [seconds / 4] * 2, "tokens": [8, 8]}
    made |= {"answers": [f"a{number}", f"b{number}"], "drafted": drafted, "accepted": ACCEPTED[arm], "errors": []}
    return made | changes


def blocks() -> list[dict[str, Any]]:
    return [
        block(arm, group, number, concurrency)
        for concurrency in (1, 4)
        for arm in SPEED
        for number, group in enumerate(("qa", "rag", "qa", "rag"))
    ]
