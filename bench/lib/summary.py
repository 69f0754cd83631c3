"""Figures of a serving benchmark, from its blocks: throughput, latency, ratio to plain, acceptance, identity."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

ALL, RESAMPLES = "all", 2000
Block = dict[str, Any]
Pairs = Sequence[tuple[Block, Block]]


def rows(blocks: Sequence[Block], baseline_of: dict[str, str | None]) -> list[dict[str, Any]]:
    """Return a row for each arm, concurrency and group, with ratios of the time per token, and one for all groups
    together, with ratios of throughput. baseline_of: the plain arm that each arm is compared with."""
    result = []
    for concurrency in sorted({b["concurrency"] for b in blocks}):
        these = [b for b in blocks if b["concurrency"] == concurrency and not b["errors"]]
        by_arm = {arm: {(b["repeat"], b["block"]): b for b in these if b["arm"] == arm} for arm in baseline_of}
        for group in [*dict.fromkeys(group for b in these for group in b["groups"]), ALL]:
            for arm, mine in by_arm.items():
                figures = measures(list(mine.values()), group)
                if figures is None:
                    continue
                row = {"arm": arm, "concurrency": concurrency, "group": group} | figures
                for other, theirs in by_arm.items():
                    pairs = [(mine[key], theirs[key]) for key in sorted(mine.keys() & theirs.keys())]
                    found = compared(pairs, group) if other != arm else None
                    if found and other == baseline_of[arm]:
                        row |= {"ratio": found[0], "ratio_interval": found[1:], "identical": identical(pairs, group)}
                    elif found:
                        row.setdefault("over", {})[other] = found
                result.append(row)
    return result


def of_best_length(rows: Sequence[dict[str, Any]], arms: dict[str, Any]) -> list[float]:
    """Return the speed of each cell of an arm with variable draft length, relative to the best of plain decoding and
    its method's arms with policy "fixed". arms: by name, as `serve.py` stores them."""

    def rate(row: dict[str, Any]) -> float:
        return float(row.get("tokens_per_second") or 1e3 / row["decode_ms_per_token"])

    kinds = {name: (arm["engine"], (arm["speculative"] or {}).get("method")) for name, arm in arms.items()}
    fixed = {name for name, arm in arms.items() if (arm["speculative"] or {}).get("policy") == "fixed"}
    shares = []
    for row in rows:
        engine, method = kinds[row["arm"]]
        rivals = {name for name in fixed if kinds[name] == (engine, method)}
        if row["arm"] not in fixed and rivals:
            rivals |= {name for name in arms if kinds[name] == (engine, None)}
            here = [r for r in rows if (r["group"], r["concurrency"]) == (row["group"], row["concurrency"])]
            rates = [rate(r) for r in here if r["arm"] in rivals]
            shares += [rate(row) / max(rates)] if rates else []
    return shares


def members(block: Block, group: str) -> list[int]:
    """Return the indices of a group's requests in a block."""
    return [i for i, name in enumerate(block["groups"]) if group in (ALL, name)]


def per_token(block: Block, i: int) -> float:
    """Return the seconds per token of a request after its first token."""
    seconds: float = (block["latency_s"][i] - block["ttft_s"][i]) / (block["tokens"][i] - 1)
    return seconds


def measures(blocks: Sequence[Block], group: str) -> dict[str, Any] | None:
    """Return throughput under full load, only for all groups together, and latencies over the group's requests; None if
    it has no requests."""
    requests = [(b, i) for b in blocks for i in members(b, group)]
    if not requests:
        return None
    decode, ttft = [1e3 * per_token(b, i) for b, i in requests], [1e3 * b["ttft_s"][i] for b, i in requests]
    row: dict[str, Any] = {"requests": len(requests), "tokens": sum(b["tokens"][i] for b, i in requests)}
    row["ms_per_token"] = median(1e3 * b["latency_s"][i] / b["tokens"][i] for b, i in requests)
    for name, times in (("decode_ms_per_token", decode), ("ttft_ms", ttft)):
        row |= {name: median(times), f"{name}_p99": float(np.quantile(times, 0.99))}
    if group != ALL:
        return row
    row["tokens_per_second"] = throughput(blocks)
    passes = sorted({b["repeat"] for b in blocks})
    row["tokens_per_second_by_pass"] = [throughput([b for b in blocks if b["repeat"] == n]) for n in passes]
    counted = [b for b in blocks if b["accepted"] is not None]
    if counted:
        produced, accepted = sum(sum(b["tokens"]) for b in counted), sum(b["accepted"] for b in counted)
        # Each accepted token saved a forward pass. A request's last step may accept tokens beyond its end.
        steps = max(produced - accepted, 1)
        row["tokens_per_step"] = produced / steps
        if all(b["drafted"] is not None for b in counted):
            drafted = sum(b["drafted"] for b in counted)
            row |= {"drafted_per_step": drafted / steps, "acceptance": accepted / drafted if drafted else None}
    return row


def throughput(blocks: Sequence[Block]) -> float | None:
    seconds = sum(b["seconds"] for b in blocks)
    return sum(b["left"] for b in blocks) / seconds if seconds else None


def identical(pairs: Pairs, group: str) -> float | None:
    """Return the share of identical answers, among those that neither arm failed to give."""
    answers = [(a["answers"][i], b["answers"][i]) for a, b in pairs for i in members(a, group)]
    both = [a == b for a, b in answers if None not in (a, b)]
    return sum(both) / len(both) if both else None


def compared(pairs: Pairs, group: str) -> list[float] | None:
    """Return the speed relative to another arm and its 95 % interval (bootstrap); None without data. All groups
    together: median ratio of throughput over pairs of blocks of the same questions. One group: ratio of the mean time
    per token over pairs of the same question."""
    if group == ALL:
        found = [rates for pair in pairs if all(rates := [throughput([b]) for b in pair])]
    else:
        found = [[per_token(b, i), per_token(a, i)] for a, b in pairs for i in members(a, group)]
    if not found:
        return None
    picks = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    mine, theirs = np.moveaxis(np.array(found, float)[np.vstack([np.arange(len(found)), picks])], 2, 0)
    ratios = np.median(mine / theirs, axis=1) if group == ALL else mine.sum(1) / theirs.sum(1)
    return [float(ratios[0]), *np.quantile(ratios[1:], (0.025, 0.975)).tolist()]
