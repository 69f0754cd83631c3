"""What a large fleet moves, on paper: the policy of `freedraft datastore compact` (`compaction.to_merge`) over time.

    python bench/fleet_traffic.py --json OUT [--tokens 10e9] [--replicas 100] [--days 7] [--every 10] [--limit 512]

Replicas on as many hosts learn so much that `--tokens` are held after `--days`, when the oldest go. Every `--every`
seconds what is new becomes a sub-index, of at most `--limit` Mi tokens; sub-indices with text that is a thirty-second
of the age too old are written anew. Nothing is measured here: sizes are the format's, and a compaction takes the
measured time of sorting (`--sort`, in seconds for a million tokens and core) over `--cores`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.results import write_json
from sssd_plugin.datastore.disk.sections import DOCUMENT
from sssd_plugin.datastore.fleet.compaction import to_merge
from sssd_plugin.datastore.fleet.replica import POLL_SECONDS, PUBLISH_SECONDS
from sssd_plugin.datastore.index.sub_index import SPARSE_STEP

DAY = 86400.0
AGE_STEPS = 32
DOCUMENT_TOKENS = 300


def bytes_per_token() -> float:
    return 4 + 4 + 4 / SPARSE_STEP + (4 + DOCUMENT.itemsize) / DOCUMENT_TOKENS


def simulate(rate: float, age: float, every: float, limit: int) -> tuple[list[float], list[int]]:
    """Run for twice the age; return the tokens that each compaction of the second half wrote, and the sub-indices."""
    subs: list[tuple[float, float, float]] = []  # tokens; learnt from, to
    written: list[float] = []
    held: list[int] = []
    now = 0.0
    while now < 2 * age:
        now += every
        oldest = now - age
        stale = [s for s in subs if s[1] < oldest - age / AGE_STEPS]
        left = [(n * (end - oldest) / (end - begin), oldest, end) for n, begin, end in stale if end > oldest]
        others = [s for s in subs if s not in stale]
        merged = to_merge([int(s[0]) for s in others], int(rate * every), limit)
        parts = [(rate * every, now - every, now), *(others[i] for i in merged)]
        new = sum(s[0] for s in parts), min(s[1] for s in parts), now
        subs = [s for i, s in enumerate(others) if i not in merged] + [*left, new]
        if now > age:
            written.append(new[0] + sum(s[0] for s in left))
            held.append(len(subs))
    return written, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=10e9)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--every", type=float, nargs="+", default=[10.0, 60.0, 600.0])
    parser.add_argument("--limit", type=int, default=512, help="Mi tokens")
    parser.add_argument("--sort", type=float, default=0.25)
    parser.add_argument("--cores", type=int, default=8)
    args = parser.parse_args()
    age, per_token = args.days * DAY, bytes_per_token()
    rate = args.tokens / age
    rows: list[dict[str, Any]] = []
    for every in args.every:
        written, held = simulate(rate, age, every, args.limit << 20)
        sent = sum(written) * per_token / age
        seconds = sorted(n / 1e6 * args.sort / args.cores for n in written)
        typical = seconds[len(seconds) // 2]
        rows.append(
            {
                "every_seconds": every,
                "times_each_token_is_written": round(sum(written) / (rate * age), 1),
                "MB_per_second_to_each_host": round(sent / 1e6, 1),
                "MB_per_second_from_the_bucket": round(sent * args.replicas / 1e6),
                "sub_indices": [min(held), max(held)],
                "compaction_seconds_p50_p99": [round(typical, 2), round(seconds[int(0.99 * len(seconds))], 1)],
                "age_when_drafted_seconds_p50": round((PUBLISH_SECONDS + every + POLL_SECONDS) / 2 + typical, 1),
            }
        )
    figures = {
        "tokens": args.tokens, "replicas": args.replicas, "days": args.days,
        "learnt_tokens_per_second": round(rate), "bytes_per_token": round(per_token, 2),
        "GB_on_each_host_mapped": round(args.tokens * per_token / 1e9, 1),
        "kB_per_second_published": round(rate * (4 + DOCUMENT.itemsize / DOCUMENT_TOKENS) / 1e3),
        "lists_per_second": args.replicas / POLL_SECONDS, "periods": rows,
    }  # fmt: skip
    write_json(args.json, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
