"""What draft tokens cost models of today, by their published sizes: states of recurrent ones, steps of mixtures of
experts. Nothing is run.

python -m tests.support.draft_costs states --json bench/results/recurrent-states.json
python -m tests.support.draft_costs experts --json bench/results/expert-steps.json
"""

import argparse
from pathlib import Path
from typing import Any

from bench.forced import LLAMA
from bench.lib.results import write_json
from freedraft.cost.explain import CURVES, draft_tokens, explain, rooms
from freedraft.cost.hardware import choose_profile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline
from tests.support import published as models

MEMORY, REQUESTS = 80e9, (8, 64)  # bytes of a device; most at once
CONTEXT, QUERY_TOKENS = 1024, [1 << i for i in range(10)]  # of one request
RECURRENT = {  # with tensor-parallel ranks that hold the weights
    "Qwen3.6-27B": (models.QWEN36_27B, 1), "Qwen3-Next-80B-A3B": (models.QWEN3_NEXT_80B, 4),
    "Kimi-Linear-48B-A3B": (models.KIMI_LINEAR_48B, 2), "Nemotron-3-Nano-30B-A3B": (models.NEMOTRON3_NANO_30B, 1),
}  # fmt: skip
MIXED = {
    "Qwen3-30B-A3B": (models.QWEN3_30B, 1), "Qwen3-235B-A22B": (models.QWEN3_235B, 8), "Llama-3.1-8B": (LLAMA, 1),
}  # fmt: skip


def roofline_of(config: dict[str, Any], ranks: int) -> Roofline:
    return Roofline(ModelShape.from_config(config), choose_profile("h100"), ranks)


def states() -> dict[str, Any]:
    """By model, engine and most requests: the default, bytes of states of a request, requests that states allow."""
    rows = []
    for name, (config, ranks) in RECURRENT.items():
        for requests in REQUESTS:
            for engine, room in rooms(config, roofline_of(config, ranks), requests, MEMORY, 1).items():
                length, why, taken = draft_tokens(room, trees=False)
                (found,) = (row for row in taken if row[0] == length)
                row = {"model": name, "ranks": ranks, "engine": engine, "requests": requests, "draft_tokens": length}
                rows.append(row | {"state_bytes_per_request": found[1], "requests_by_states": found[2], "reason": why})
    return {"memory": MEMORY, "sources": {name: models.SOURCES[name] for name in RECURRENT}, "rows": rows}


def experts() -> dict[str, Any]:
    """By model: step times by query tokens, and the best draft lengths by requests; seconds, by the roofline."""
    steps, lengths = [], []
    for name, (config, ranks) in MIXED.items():
        roofline, known = roofline_of(config, ranks), {"model": name, "devices": ranks}
        mixed = roofline.shape.experts
        for n in QUERY_TOKENS:
            share = mixed and 1 - (1 - mixed.active / mixed.total) ** n
            seconds = float(roofline.seconds(1, n, CONTEXT))
            steps.append(known | {"query_tokens": n, "seconds": seconds, "share_of_experts": share})
        for row in explain(roofline, CONTEXT, CURVES["chain"]):
            best = {"requests": row.batch, "draft_tokens": row.best - 1, "speedup": row.speedup}
            lengths.append(known | best)
    sources = {name: models.SOURCES[name] for name in MIXED if name in models.SOURCES}
    return {"profile": "h100", "context": CONTEXT, "sources": sources, "steps": steps, "lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["states", "experts"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = states() if given.what == "states" else experts()
    for name, rows in found.items():
        print(name, *(rows if isinstance(rows, list) else [rows]), sep="\n  ")
    write_json(given.json, found)


if __name__ == "__main__":
    main()
