"""The live datastore: how soon it is as good as a prepared one, what learning costs, whether it survives kills.

    python bench/live_datastore.py --trace FILE --tokenizer DIR --json OUT [--kills 100] [--model DIR]

Cold start: the rows of the trace are replayed in order (see bench/replay.py), and each finished answer enters a store
that began empty. After as many rows as bench/replay.py puts into its static store, its test rows are replayed with
either. Rebuild: drafting while one thread sorts and merges runs all the time, as the live datastore's does, in turns
with drafting alone. Kills: a process that appends, rotates, merges and drops is killed at random moments; every
document that it had learnt a second before must be there afterwards, in order, and no other. The same while the command
that forgets, or the rewriting that leaves no copies, is killed: what it had confirmed must not come back. Engine, with
--model: the same for vLLM's server, whose greedy answers must be those of a plain server before and after. With --json,
parts that are not run keep the figures that the file has of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from bench.lib.kills import compact, engine_kills, forget_odd, kills, kills_of
from bench.lib.machine import cpu, timed
from bench.lib.results import earlier_figures, write_json
from bench.lib.trace import Row, Trace
from bench.replay import MAX_OUTPUT, MIN_OUTPUT, MIN_PROMPT, STORE_ROWS, accepted, build_store, test_rows
from bench.replay import untainted_weights as weights_for
from sssd_plugin.datastore.index import runs as runs_module
from sssd_plugin.datastore.index.runs import Run, merged, release, sorted_run
from sssd_plugin.datastore.live.opening import open_live
from sssd_plugin.datastore.live.store import NICE, LiveStore
from sssd_plugin.drafter import Drafter

HUNDRED = 100
PACE = 50_000  # tokens per second of a server's answers


def replay_row(
    drafter: Drafter, row: Row, name: str, budget: int, seconds: list[float] | None = None
) -> tuple[int, int]:
    """Steps and tokens of one row."""
    prompt, output = row
    tokens = np.concatenate([prompt, output]).astype(np.int32)
    position, known, steps = len(prompt), 0, 0
    drafter.replace(name, tokens[:0])
    while position < len(tokens):
        started = time.perf_counter()
        drafter.update([name], tokens, np.array([known]), np.array([position]), np.array([position], np.int32))
        known = position
        batch = drafter.draft([name], max_nodes=budget)
        if seconds is not None:
            seconds.append(time.perf_counter() - started)
        position = min(position + accepted(batch, tokens[position:]) + 1, len(tokens))
        steps += 1
    drafter.finish([name])
    return steps, len(output)


def rate(drafter: Drafter, rows: list[Row], budget: int) -> float:
    done = [replay_row(drafter, row, "r", budget) for row in rows]
    return sum(tokens for _, tokens in done) / sum(steps for steps, _ in done)


def cold_start(trace: Trace, budget: int, weights: Path) -> dict[str, Any]:
    live = LiveStore(trace.vocab_size, isolation="shared")
    make = partial(Drafter, vocab_size=trace.vocab_size, max_nodes=budget, weights=weights)
    drafter = make(live=live)
    by_hundred, steps, tokens = [], 0, 0
    for number, (prompt, output) in enumerate(trace.rows[:STORE_ROWS], 1):
        if len(prompt) >= MIN_PROMPT and len(output) >= MIN_OUTPUT:
            s, t = replay_row(drafter, (prompt, output[:MAX_OUTPUT]), "r", budget)
            steps, tokens = steps + s, tokens + t
        live.insert(output)
        if number % HUNDRED == 0 or number == STORE_ROWS:
            by_hundred.append({"rows": number, "tokens_per_step": round(tokens / max(1, steps), 4)})
            steps = tokens = 0
    rows, stats = test_rows(trace), live.stats()
    rates = [rate(d, rows, budget) for d in (drafter, make(), make(snapshot=build_store(trace)))]
    at_end, none, prepared = rates
    live.close()
    return {
        "by_hundred_rows": by_hundred,
        "test_rows": {
            "no_store": round(none, 4),
            "live_store": round(at_end, 4),
            "static_store": round(prepared, 4),
            "live_over_static": round(at_end / prepared, 4),
        },
        "sub_indices": stats.max_sub_indices,
        "bytes_per_token": round(stats.nbytes / stats.tokens, 2),
    }


def insert_all(live: LiveStore, trace: Trace, tokens_per_second: float) -> list[float]:
    """Seconds that each answer of a trace takes until it is visible."""
    seconds, due = list[float](), time.perf_counter()
    for _, output in trace.rows:
        time.sleep(max(due - time.perf_counter(), 0.0))
        seconds.append(timed(partial(live.insert, output))[1])
        due += len(output) / tokens_per_second
    return seconds


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    at = {"p50": 50, "p99": 99, "max": 100}
    return {name: round(float(np.percentile(seconds, q)) * 1e3, 3) for name, q in at.items()}


def update_cost(trace: Trace) -> dict[str, Any]:
    """Learning the whole trace several times over, as fast as it goes, and once more at the rate of a busy server."""
    result: dict[str, Any] = {"paced_tokens_per_second": PACE}
    for where in ("memory", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            live = open_live(Path(folder) if where == "disk" else None, trace.vocab_size, isolation="shared")
            seconds = [each for _ in range(5) for each in insert_all(live, trace, math.inf)]
            live.settle()
            stats = live.stats()
            paced = insert_all(live, trace, PACE)
            closing = timed(live.close)[1]
            result[where] = {
                "tokens": stats.inserted,
                "us_per_token": round(sum(seconds) / stats.inserted * 1e6, 3),
                "visible_after_ms": percentiles_ms(seconds),
                "visible_after_ms_paced": percentiles_ms(paced),
                "background_us_per_token": round(stats.merge_seconds / stats.inserted * 1e6, 3),
                "merges": stats.merges,
                "longest_merge_ms": round(stats.longest_merge * 1e3, 1),
                "bytes_per_token": round(stats.nbytes / stats.tokens, 2),
                "sub_indices": stats.max_sub_indices,
                "close_ms": round(closing * 1e3, 1),
            }
            if where == "disk":
                again, took = timed(lambda: open_live(Path(folder), trace.vocab_size, isolation="shared"))
                result["reopen_seconds"] = round(took, 3)
                result["reopen_tokens"] = again.stats().tokens
                again.close()
    return result


def runs_of(trace: Trace, tokens: int) -> tuple[Run, Run, list[NDArray[np.int32]]]:
    documents: list[NDArray[np.int32]] = []
    rng = np.random.default_rng(0)
    while sum(map(len, documents)) < 2 * tokens:
        documents += [trace.rows[i][1] for i in rng.permutation(len(trace.rows))]
    total, half = 0, 0
    while total < tokens:
        total += len(documents[half]) + 1
        half += 1
    rest = documents[half : 2 * half]
    older, newer = (sorted_run(part, trace.vocab_size, _nobody(part)) for part in (documents[:half], rest))
    return older, newer, documents[:half]


def _nobody(documents: list[NDArray[np.int32]]) -> NDArray[np.int64]:
    """`Run.documents` of documents whose tenant and time do not matter."""
    return np.zeros((len(documents), 3), np.int64)


def with_the_gil(older: Run, newer: Run, vocab_size: int) -> dict[str, float]:
    """What a merge and letting go of its inputs do besides compiled code, in the thread's own time."""
    inside = 0.0
    compiled = runs_module._merged

    def watched(*arguments: Any) -> Any:
        nonlocal inside
        started = time.thread_time()
        run = compiled(*arguments)
        inside += time.thread_time() - started
        return run

    def once() -> tuple[float, float]:
        nonlocal inside
        inside = 0.0
        started = time.thread_time()
        result = [merged(older, newer, vocab_size)]
        merging = time.thread_time() - started - inside
        release(result)
        started = time.thread_time()
        result.clear()
        return merging, time.thread_time() - started

    runs_module._merged = watched
    try:
        done = [once() for _ in range(20)]
    finally:
        runs_module._merged = compiled
    merging, freeing = zip(*done, strict=True)
    return {"merging_max_us": round(max(merging) * 1e6, 1), "freeing_max_us": round(max(freeing) * 1e6, 1)}


def rebuild(trace: Trace, budget: int, weights: Path, delta: int) -> dict[str, Any]:
    older, newer, documents = runs_of(trace, delta)
    sorting = timed(lambda: sorted_run(documents, trace.vocab_size, _nobody(documents)))[1]
    merging = timed(lambda: merged(older, newer, trace.vocab_size))[1]
    gil = with_the_gil(older, newer, trace.vocab_size)
    live = LiveStore(trace.vocab_size, isolation="shared")
    for _, output in trace.rows[:STORE_ROWS]:
        live.insert(output)
    live.settle()
    drafter = Drafter(vocab_size=trace.vocab_size, max_nodes=budget, weights=weights, live=live)
    rows = test_rows(trace)[:24]
    go, stop = threading.Event(), threading.Event()
    rebuilds = 0

    def work() -> None:
        nonlocal rebuilds
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not stop.is_set():
            if go.wait(0.1):
                merged(older, sorted_run(documents, trace.vocab_size, _nobody(documents)), trace.vocab_size)
                rebuilds += 1

    thread = threading.Thread(target=work)
    thread.start()
    seconds: dict[str, list[float]] = {"idle": [], "rebuilding": []}
    for turn in range(6):
        name = ("idle", "rebuilding")[turn % 2]
        (go.clear if name == "idle" else go.set)()
        time.sleep(0.3)  # the last rebuild ends
        for row in rows:
            replay_row(drafter, row, "r", budget, seconds[name])
    stop.set()
    thread.join()
    live.close()
    figures = {
        name: {f"p{p}_us": round(float(np.percentile(values, p)) * 1e6, 1) for p in (50, 99)}
        | {"max_us": round(max(values) * 1e6, 1), "drafts": len(values)}
        for name, values in seconds.items()
    }
    return {
        "delta_tokens": older.n,
        "sort_seconds": round(sorting, 4),
        "merge_with_as_many_seconds": round(merging, 4),
        "rebuilds_meanwhile": rebuilds,
        "gil_held_per_merge": gil,
        "drafting": figures,
        "p99_rebuilding_over_idle": round(figures["rebuilding"]["p99_us"] / figures["idle"]["p99_us"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help='JSONL with "prompt" and "output"')
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, default=16, help="nodes per step, root included")
    parser.add_argument("--delta", type=int, default=256 << 10, help="tokens of the delta that is rebuilt")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", type=Path, help="model folder: also kill a server of it")
    parser.add_argument("--engine-kills", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="parts, as the file names them (default: all)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        trace = Trace.load(arguments.trace, arguments.tokenizer)
        if len(trace.rows) <= STORE_ROWS:
            raise ValueError(f"trace: {arguments.trace} has no row to replay after its first {STORE_ROWS}")
        weights = weights_for(trace)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "update": lambda: update_cost(trace),
        "rebuild": lambda: rebuild(trace, arguments.budget, weights, arguments.delta),
        "cold_start": lambda: cold_start(trace, arguments.budget, weights),
        "crashes": lambda: kills(arguments.kills),
        "crashes_while_forgetting": lambda: kills_of(forget_odd, arguments.kills),
        "crashes_while_compacting": lambda: kills_of(compact, arguments.kills),
    }
    if arguments.model is not None:
        parts["engine"] = lambda: engine_kills(arguments.model, arguments.engine_kills)
    before = earlier_figures(arguments.json) or {}
    result = before | {
        "trace": arguments.trace.name,
        "budget": arguments.budget,
        "machine": {"cpu": cpu(), "cores": os.cpu_count()},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **{name: part() for name, part in parts.items() if not arguments.only or name in arguments.only},
    }
    print(json.dumps(result, indent=1))
    write_json(arguments.json, result, data=[arguments.trace], earlier=bool(before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
