"""Figures of a serving benchmark, from its blocks: throughput, latency, ratio to plain, acceptance, identity."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

ALL = "all"
RESAMPLES = 2000
Block = dict[str, Any]
Key = tuple[int, int, int]


def key(block: Block) -> Key:
    """The key that a block shares with the block of the same questions of another arm."""
    return block["concurrency"], block["repeat"], block["block"]


def rows(blocks: Sequence[Block], baseline_of: dict[str, str | None]) -> list[dict[str, Any]]:
    """One row for each arm, concurrency and group, and for all groups together; where requests at a time are so many
    that one group holds all questions, only the latter.

    Args:
        blocks: as `serve.py` writes them.
        baseline_of: for each arm the one that it is compared with: plain decoding on its engine.
    """
    arms = list(baseline_of)
    several = len({b["group"] for b in blocks}) > 1
    result = []
    for concurrency in sorted({b["concurrency"] for b in blocks}):
        groups = list(dict.fromkeys(b["group"] for b in blocks if b["concurrency"] == concurrency))
        for group in [*(groups if len(groups) > 1 else ()), ALL] if several else groups:
            for arm in arms:
                these = [b for b in blocks if b["concurrency"] == concurrency and not b["errors"]]
                here = [b for b in these if group in (ALL, b["group"])]
                mine = {key(b): b for b in here if b["arm"] == arm}
                if not mine:
                    continue
                row = {"arm": arm, "concurrency": concurrency, "group": group} | measures(list(mine.values()))
                plain = paired(mine, here, baseline_of[arm])
                if plain and arm != baseline_of[arm]:
                    ratio, *interval = compared(plain)
                    row |= {"ratio": ratio, "ratio_interval": interval, "identical": identical(plain)}
                    others = {b["arm"] for b in here} - {arm, baseline_of[arm]}
                    pairs = {other: paired(mine, here, other) for other in arms if other in others}
                    row["over"] = {other: compared(each) if each else None for other, each in pairs.items()}
                result.append(row)
    return result


def of_best_length(rows: Sequence[dict[str, Any]], arms: dict[str, Any]) -> list[dict[str, Any]]:
    """How arms that choose their draft length by themselves compare with the best of those that do not: an arm whose
    policy is "fixed" stands for the others of its method and engine; plain decoding is the length 0.

    Args:
        rows: of `rows`; arms: by name, as `serve.py` keeps them.

    Returns:
        one row for each arm that chooses, concurrency and group: `share` of the best fixed length's throughput, which
        arm that is (`best`), and `over_plain`.
    """
    kinds = {name: (arm["engine"], (arm["speculative"] or {}).get("method")) for name, arm in arms.items()}
    fixed = {name for name, arm in arms.items() if (arm["speculative"] or {}).get("policy") == "fixed"}
    found = []
    for row in rows:
        engine, method = kinds[row["arm"]]
        rivals = [name for name in fixed if kinds[name] == (engine, method)]
        if row["arm"] in fixed or not rivals:
            continue
        rivals += [name for name in arms if kinds[name] == (engine, None)]
        here = [r for r in rows if (r["group"], r["concurrency"]) == (row["group"], row["concurrency"])]
        rates = {r["arm"]: r["tokens_per_second"] for r in here if r["arm"] in rivals}
        if rates:
            best = max(rates, key=lambda name: rates[name])
            share = row["tokens_per_second"] / rates[best]
            place = {name: row[name] for name in ("arm", "concurrency", "group")}
            found.append(place | {"best": best, "share": share, "over_plain": row.get("ratio")})
    return found


def below_plain(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """For each arm that was compared with plain decoding, in how many cells it is more than 1 % slower, and of how
    many."""
    compared: dict[str, list[float]] = {}
    for row in rows:
        if "ratio" in row:
            compared.setdefault(row["arm"], []).append(row["ratio"])
    return {arm: (sum(ratio < 0.99 for ratio in ratios), len(ratios)) for arm, ratios in compared.items()}


def measures(blocks: Sequence[Block]) -> dict[str, Any]:
    """Throughput over the time of all blocks; latencies over all requests."""
    tokens = sum(sum(b["tokens"]) for b in blocks)
    requests = [each for b in blocks for each in zip(b["latency_s"], b["ttft_s"], b["tokens"], strict=True)]
    decode = [1e3 * (s - first) / (n - 1) for s, first, n in requests if n > 1]
    row: dict[str, Any] = {
        "requests": sum(len(b["tokens"]) for b in blocks),
        "tokens": tokens,
        "tokens_per_second": tokens / sum(b["seconds"] for b in blocks),
        "ms_per_token": statistics.median(1e3 * s / n for s, _, n in requests),
        "decode_ms_per_token": statistics.median(decode) if decode else None,
        "decode_ms_per_token_p99": quantiles(decode, 0.99)[0] if decode else None,
        "ttft_ms": 1e3 * statistics.median(x for b in blocks for x in b["ttft_s"]),
        "ttft_ms_p99": 1e3 * quantiles([x for b in blocks for x in b["ttft_s"]], 0.99)[0],
        "tokens_per_second_by_pass": [
            sum(sum(b["tokens"]) for b in part) / sum(b["seconds"] for b in part)
            for repeat in sorted({b["repeat"] for b in blocks})
            if (part := [b for b in blocks if b["repeat"] == repeat])
        ],
    }
    counted = [b for b in blocks if b["accepted"] is not None]
    if counted:
        produced, accepted = sum(sum(b["tokens"]) for b in counted), sum(b["accepted"] for b in counted)
        # Every accepted token saved its request a forward pass. A request's last step may accept beyond its end.
        passes = max(produced - accepted, 1)
        row["tokens_per_step"] = produced / passes
        if all(b["drafted"] is not None for b in counted):
            drafted = sum(b["drafted"] for b in counted)
            row |= {"drafted_per_step": drafted / passes, "acceptance": accepted / drafted if drafted else None}
    return row


def paired(mine: dict[Key, Block], blocks: Sequence[Block], other: str | None) -> list[tuple[Block, Block]]:
    """Blocks of two arms on the same questions."""
    theirs = {key(b): b for b in blocks if b["arm"] == other}
    return [(mine[k], theirs[k]) for k in sorted(mine.keys() & theirs.keys())]


def identical(pairs: Sequence[tuple[Block, Block]]) -> float | None:
    """The share of answers that are the same, of those that neither arm failed to give."""
    answers = [(a, b) for x, y in pairs for a, b in zip(x["answers"], y["answers"], strict=True) if None not in (a, b)]
    return sum(a == b for a, b in answers) / len(answers) if answers else None


def compared(pairs: Sequence[tuple[Block, Block]]) -> list[float]:
    """Ratio of throughputs over the same blocks, and its 95 % interval (bootstrap over blocks)."""
    seconds = np.array([[b["seconds"] for b in pair] for pair in pairs])
    tokens = np.array([[sum(b["tokens"]) for b in pair] for pair in pairs], float)
    picks = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    whole, resampled = tokens.sum(0) / seconds.sum(0), tokens[picks].sum(1) / seconds[picks].sum(1)
    return [float(whole[0] / whole[1]), *quantiles(resampled[:, 0] / resampled[:, 1], 0.025, 0.975)]


def quantiles(values: Iterable[float], *at: float) -> list[float]:
    return [float(x) for x in np.quantile(list(values), at)]
