"""Results of a serving benchmark, made up: two groups, three arms."""

from __future__ import annotations

from typing import Any

SPEED = {"plain": 10.0, "sssd": 20.0, "ngram": 8.0}
ACCEPTED = {"plain": None, "sssd": 4, "ngram": 0}


def block(arm: str, number: int, concurrency: int = 1, **changes: Any) -> dict[str, Any]:
    """A block of two requests of eight tokens, of groups qa and rag; `SPEED` tokens per second."""
    seconds = 16 / SPEED[arm]
    drafted = None if ACCEPTED[arm] is None else 8
    made = {"arm": arm, "concurrency": concurrency, "repeat": 0, "block": number, "groups": ["qa", "rag"]}
    made |= {"seconds": seconds, "left": 16.0, "latency_s": [seconds / 2] * 2, "ttft_s": [seconds / 4] * 2}
    made |= {"answers": [f"a{number}", f"b{number}"], "drafted": drafted, "accepted": ACCEPTED[arm], "errors": []}
    return made | {"tokens": [8, 8]} | changes


def blocks() -> list[dict[str, Any]]:
    return [block(arm, number, concurrency) for concurrency in (1, 4) for arm in SPEED for number in range(4)]
