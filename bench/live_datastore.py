"""The live datastore: how soon it matches a prepared one, and the cost of learning.

    python bench/live_datastore.py --trace FILE --tokenizer DIR --json OUT

Cold start: the rows of the trace are replayed in order (see bench/replay.py), and each finished answer is added to an
initially empty store; then the test rows are replayed with either store. Rebuild: drafting while one thread sorts and
merges continuously, as in the live datastore, in turns with drafting alone.
"""

import argparse
import json
import math
import os
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.machine import rounded, timed
from bench.lib.results import write_json
from bench.lib.trace import STORE_ROWS, Trace, replayed
from bench.replay import drafting, replay
from freedraft.draft import DraftBatch
from sssd_plugin.datastore.index.runs import merged, sorted_run
from sssd_plugin.datastore.live.runs import NICE
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.drafter import Drafter

NODES, HUNDRED = 16, 100  # per step, root included; rows
DELTA, PACE = 256 << 10, 50_000  # tokens that are sorted and merged; tokens per second of a server's answers


def cold_start(trace: Trace) -> dict[str, Any]:
    live = LiveStore(trace.vocab_size, isolation="shared")
    make = partial(Drafter, vocab_size=trace.vocab_size, max_nodes=NODES)
    drafter = make(live=live)
    by_hundred, steps, tokens = [], 0, 0
    for number, (prompt, output) in enumerate(trace.rows[:STORE_ROWS], 1):
        if rows := replayed([(prompt, output)]):
            found = replay(rows, drafting(drafter, NODES))
            steps, tokens = steps + found["steps"], tokens + found["output_tokens"]
        live.insert(output)
        if number % HUNDRED == 0 or number == STORE_ROWS:
            by_hundred.append({"rows": number, "tokens_per_step": tokens / max(1, steps)})
            steps = tokens = 0
    drafters = {"no_store": make(), "live_store": drafter, "static_store": make(snapshot=trace.snapshot)}
    rates = {name: replay(trace.test_rows, drafting(d, NODES))["tokens_per_step"] for name, d in drafters.items()}
    live.close()
    return {"by_hundred_rows": by_hundred, "test_rows": rates}


def insert_all(live: LiveStore, trace: Trace, tokens_per_second: float) -> list[float]:
    """Insert all answers of a trace; return the seconds until each is visible."""
    seconds, due = list[float](), time.perf_counter()
    for _, output in trace.rows:
        time.sleep(max(due - time.perf_counter(), 0.0))
        seconds.append(timed(partial(live.insert, output))[1])
        due += len(output) / tokens_per_second
    return seconds


def percentiles(seconds: list[float], unit: float) -> dict[str, float]:
    """Return median, 99th percentile and maximum in multiples of `unit` (seconds)."""
    return {name: float(np.percentile(seconds, q)) / unit for name, q in (("p50", 50), ("p99", 99), ("max", 100))}


def update_cost(trace: Trace) -> dict[str, Any]:
    """Measure learning of the whole trace: five times at full speed, and once at the rate of a busy server."""
    result: dict[str, Any] = {"paced_tokens_per_second": PACE}
    for where in ("memory", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            live = LiveStore(trace.vocab_size, Path(folder) if where == "disk" else None, isolation="shared")
            seconds = [each for _ in range(5) for each in insert_all(live, trace, math.inf)]
            live.settle()
            stats = live.stats()
            result[where] = {
                "tokens": stats.inserted,
                "us_per_token": sum(seconds) / stats.inserted * 1e6,
                "visible_after_ms": percentiles(seconds, 1e-3),
                "visible_after_ms_paced": percentiles(insert_all(live, trace, PACE), 1e-3),
                "background_us_per_token": stats.merge_seconds / stats.inserted * 1e6,
                "bytes_per_token": stats.nbytes / stats.tokens,
            }
            live.close()
    return result


def rebuild(trace: Trace) -> dict[str, Any]:
    def sort(documents: list[NDArray[np.int32]]) -> Any:  # a run without tenants and times
        return sorted_run(documents, trace.vocab_size, np.zeros((len(documents), 3), np.int64))

    documents = list[NDArray[np.int32]]()
    order = np.random.default_rng(0).permutation(2 * len(trace.rows)) % len(trace.rows)
    while sum(len(document) + 1 for document in documents) < DELTA:
        documents.append(trace.rows[order[len(documents) % len(order)]][1])
    older, sorting = timed(lambda: sort(documents))
    newer = sort([trace.rows[i][1] for i in order[-len(documents) :]])
    merging = timed(lambda: merged(older, newer, trace.vocab_size))[1]
    live = LiveStore(trace.vocab_size, isolation="shared")
    for output in trace.documents:
        live.insert(output)
    live.settle()
    draft = drafting(Drafter(vocab_size=trace.vocab_size, max_nodes=NODES, live=live), NODES)
    seconds: dict[str, list[float]] = {"idle": [], "rebuilding": []}
    rebuilds, name, last = 0, "", ""

    def work(stop: threading.Event) -> None:
        nonlocal rebuilds
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while not stop.is_set():
            merged(older, sort(documents), trace.vocab_size)
            rebuilds += 1

    def timed_draft(request: str, tokens: NDArray[np.int32], n: int) -> DraftBatch:
        nonlocal last
        batch, took = timed(lambda: draft(request, tokens, n))
        if request == last:  # the first one indexes the prompt
            seconds[name].append(took)
        last = request
        return batch

    for turn in range(6):
        name, stop = ("idle", "rebuilding")[turn % 2], threading.Event()
        thread = threading.Thread(target=work, args=(stop,))
        if name == "rebuilding":
            thread.start()
        replay(trace.test_rows[:24], timed_draft)
        stop.set()
        if name == "rebuilding":
            thread.join()
    live.close()
    figures = {name: {f"{at}_us": us for at, us in percentiles(each, 1e-6).items()} for name, each in seconds.items()}
    times = {"sort_seconds": sorting, "merge_with_as_many_seconds": merging, "delta_tokens": older.n}
    return times | {"rebuilds_meanwhile": rebuilds, "drafting": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help='JSONL with "prompt" and "output"')
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trace = Trace.load(arguments.trace, arguments.tokenizer)
    result = {"trace": arguments.trace.name, "budget": NODES, "update": update_cost(trace)}
    result = rounded(result | {"rebuild": rebuild(trace), "cold_start": cold_start(trace)})
    print(json.dumps(result, indent=1))
    write_json(arguments.json, result, data=[arguments.trace])


if __name__ == "__main__":
    main()
