"""The live datastore: how soon it is as good as a prepared one, what learning costs, whether it survives kills.

    python bench/live_datastore.py --trace FILE --tokenizer DIR --json OUT [--kills 100] [--model DIR]

Cold start: the rows of the trace are replayed in order (see bench/replay.py), and each finished answer enters a store
that began empty. After as many rows as bench/replay.py puts into its static store, its test rows are replayed with
either. Rebuild: drafting while one thread sorts and merges runs all the time, as the live datastore's does, in turns
with drafting alone. Kills: a process that appends, rotates, merges and drops is killed at random moments; every
document that it had learnt a second before must be there afterwards, in order, and no other. Engine, with --model: the
same for vLLM's server, whose greedy answers must be those of a plain server before and after. With --json, parts that
are not run keep the figures that the file has of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))
from replay import MAX_OUTPUT, MIN_OUTPUT, MIN_PROMPT, STORE_ROWS, accepted, build_store, test_rows, untainted_weights

from sssd_plugin.datastore.index import runs as runs_module
from sssd_plugin.datastore.index.runs import Run, merged, release, sorted_run
from sssd_plugin.datastore.live.merging import NICE
from sssd_plugin.datastore.live.segments import SegmentLog
from sssd_plugin.datastore.live.store import LiveDatastore, open_live
from sssd_plugin.drafter import Drafter
from sssd_plugin.trace import Row, Trace

HUNDRED = 100

LEARN_FOREVER = """
import sys, time
import numpy as np
from sssd_plugin.datastore.live.store import segments, store as live
live.MEMTABLE_TOKENS, segments.SEGMENT_TOKENS = 256, 2000
store = live.open_live(sys.argv[1], 1000, max_tokens=1 << 18)
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    parts = [number // 1000000, number // 1000 % 1000, number % 1000]
    while not store.insert(np.array([*parts, *([number % 7] * (number % 50))], np.int32)):
        time.sleep(0.001)
    number += 1
    if number % 20 == 0:
        print(number, time.time(), flush=True)
        time.sleep(0.002)
"""


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
    live = LiveDatastore(trace.vocab_size)
    drafter = Drafter(vocab_size=trace.vocab_size, max_nodes=budget, weights=weights, live=live)
    by_hundred, steps, tokens = [], 0, 0
    for number, (prompt, output) in enumerate(trace.rows[:STORE_ROWS], 1):
        if len(prompt) >= MIN_PROMPT and len(output) >= MIN_OUTPUT:
            s, t = replay_row(drafter, (prompt, output[:MAX_OUTPUT]), "r", budget)
            steps, tokens = steps + s, tokens + t
        live.insert(output)
        if number % HUNDRED == 0 or number == STORE_ROWS:
            by_hundred.append({"rows": number, "tokens_per_step": round(tokens / max(1, steps), 4)})
            steps = tokens = 0
    rows = test_rows(trace)
    stats = live.stats()
    at_end = rate(drafter, rows, budget)
    none = rate(Drafter(vocab_size=trace.vocab_size, max_nodes=budget, weights=weights), rows, budget)
    static = Drafter(
        vocab_size=trace.vocab_size, max_nodes=budget, weights=weights, snapshot=build_store(trace)
    )  # fmt: skip
    prepared = rate(static, rows, budget)
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


def update_cost(trace: Trace) -> dict[str, Any]:
    """Learning the whole trace several times over, as fast as it goes."""
    result = {}
    for where in ("memory", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            live = open_live(Path(folder) if where == "disk" else None, trace.vocab_size)
            seconds = []
            for _ in range(5):
                for _, output in trace.rows:
                    started = time.perf_counter()
                    live.insert(output)
                    seconds.append(time.perf_counter() - started)
            live.settle()
            stats = live.stats()
            started = time.perf_counter()
            live.close()
            result[where] = {
                "tokens": stats.inserted,
                "us_per_token": round(sum(seconds) / stats.inserted * 1e6, 3),
                "visible_after_ms_p50": round(float(np.percentile(seconds, 50)) * 1e3, 3),
                "visible_after_ms_p99": round(float(np.percentile(seconds, 99)) * 1e3, 3),
                "visible_after_ms_max": round(max(seconds) * 1e3, 3),
                "background_us_per_token": round(stats.merge_seconds / stats.inserted * 1e6, 3),
                "merges": stats.merges,
                "longest_merge_ms": round(stats.longest_merge * 1e3, 1),
                "bytes_per_token": round(stats.nbytes / stats.tokens, 2),
                "sub_indices": stats.max_sub_indices,
                "close_ms": round((time.perf_counter() - started) * 1e3, 1),
            }
            if where == "disk":
                started = time.perf_counter()
                again = open_live(Path(folder), trace.vocab_size)
                result["reopen_seconds"] = round(time.perf_counter() - started, 3)
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
    return sorted_run(documents[:half], trace.vocab_size, 0), sorted_run(rest, trace.vocab_size, half), documents[:half]


def with_the_gil(older: Run, newer: Run, vocab_size: int) -> dict[str, float]:
    """What a merge and letting go of its inputs do besides compiled code, in the thread's own time."""
    inside = 0.0
    compiled = runs_module._merged

    def timed(*arguments: Any) -> Any:
        nonlocal inside
        started = time.thread_time()
        made = compiled(*arguments)
        inside += time.thread_time() - started
        return made

    def once() -> tuple[float, float]:
        nonlocal inside
        inside = 0.0
        started = time.thread_time()
        result = [merged(older, newer, vocab_size)]
        merging = time.thread_time() - started - inside
        release(result)  # type: ignore[arg-type]
        started = time.thread_time()
        result.clear()
        return merging, time.thread_time() - started

    runs_module._merged = timed
    try:
        done = [once() for _ in range(20)]
    finally:
        runs_module._merged = compiled
    merging, freeing = zip(*done, strict=True)
    return {"merging_max_us": round(max(merging) * 1e6, 1), "freeing_max_us": round(max(freeing) * 1e6, 1)}


def rebuild(trace: Trace, budget: int, weights: Path, delta: int) -> dict[str, Any]:
    older, newer, documents = runs_of(trace, delta)
    started = time.perf_counter()
    sorted_run(documents, trace.vocab_size, 0)
    sorting = time.perf_counter() - started
    started = time.perf_counter()
    merged(older, newer, trace.vocab_size)
    merging = time.perf_counter() - started
    gil = with_the_gil(older, newer, trace.vocab_size)
    live = LiveDatastore(trace.vocab_size)
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
            if not go.wait(0.1):
                continue
            merged(older, sorted_run(documents, trace.vocab_size, 0), trace.vocab_size)
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


def kills(times: int) -> dict[str, Any]:
    rng = np.random.default_rng()
    number = wrong = lost = late = 0
    opening: list[float] = []
    longest = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder, said = Path(name) / "store", Path(name) / "said"
        for _ in range(times):
            with said.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, "-c", LEARN_FOREVER, str(folder), str(number)], stdout=out, start_new_session=True
                )
            while not said.read_text().startswith("ready\n"):
                if process.poll() is not None:
                    raise RuntimeError("a restart did not open the store")
                time.sleep(0.01)
            time.sleep(float(rng.random()) * 1.8)
            killed = time.time()
            process.send_signal(signal.SIGKILL)
            process.wait()
            # When each document was in: (how many there were, time).
            told = [(int(n), float(t)) for n, t in (line.split() for line in said.read_text().split("\n")[1:-1])]
            started = time.perf_counter()
            log = SegmentLog.open(folder, vocab_size=1000, max_tokens=1 << 18)
            texts = [record.tokens.tolist() for record in log.take_recovered()]
            log.close()
            opening.append(time.perf_counter() - started)
            found = [text[0] * 1_000_000 + text[1] * 1000 + text[2] for text in texts]
            wrong += any(t[3:] != [n % 7] * (n % 50) for t, n in zip(texts, found, strict=True))
            wrong += bool(found) and found != list(range(found[0], found[0] + len(found)))
            have = found[-1] + 1 if found else 0
            missing = [t for n, t in told if n > have]
            if missing:
                lost += 1
                longest = max(longest, killed - missing[0])
                late += killed - missing[0] > 1.0
            late += have < number
            number = max(number, have)
    return {
        "kills": times,
        "restarts_that_opened": times,
        "documents_learnt": number,
        "restarts_with_wrong_data": wrong,
        "restarts_that_lost_what_was_older_than_1_s": late,
        "restarts_that_lost_something": lost,
        "oldest_lost_ms": round(longest * 1e3, 1),
        "open_ms_p50": round(float(np.median(opening)) * 1e3, 1),
    }


def engine_kills(model: Path, times: int) -> dict[str, Any]:
    """vLLM's server, killed with all its processes while it answers."""
    import servers
    from openai import OpenAI
    from prompts import PROMPTS

    tokens = 32
    texts = [text for prompts in PROMPTS.values() for text in prompts][::2]
    rng = np.random.default_rng()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speculative: dict[str, object] = {
            "method": "sssd",
            "num_speculative_tokens": 6,
            "policy": "fixed",
            "live": True,
            "datastore": str(folder / "store"),
        }

        def start(speculative: dict[str, object] | None) -> servers.Server:
            server = servers.build("s", "vllm", model, folder / "log", speculative=speculative)
            server.start()
            server.wait_until_ready()
            return server

        def ask(server: servers.Server, text: str) -> tuple[int, ...]:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
            answer = client.chat.completions.create(
                model=servers.MODEL_NAME,
                messages=[{"role": "user", "content": text}],
                max_tokens=tokens,
                temperature=0.0,
                extra_body={"return_token_ids": True},
            )
            return tuple(answer.choices[0].token_ids)  # type: ignore[attr-defined]

        plain_server = start(None)
        try:
            plain = [ask(plain_server, text) for text in texts]
        finally:
            plain_server.stop()
        ended: list[float] = []  # when each answer was there
        differ = wrong = lost = 0
        for round_ in range(times + 1):
            server = start(speculative)
            try:
                for text, expected in zip(texts, plain, strict=True):
                    differ += ask(server, text) != expected
                    ended.append(time.time())
                if round_ == times:
                    break
                asking = threading.Thread(target=lambda: [_given_up(ask, server, text) for text in texts], daemon=True)  # noqa: B023
                asking.start()
                time.sleep(float(rng.random()) * 3.0)
                assert server.process is not None
                killed = time.time()
                os.killpg(server.process.pid, signal.SIGKILL)
            finally:
                server.stop()
            asking.join()
            log = SegmentLog.open(folder / "store", vocab_size=1 << 30, max_tokens=1 << 24, writer=False)
            documents = [tuple(record.tokens.tolist()) for record in log.take_recovered()]
            log.close()
            wrong += sum(document not in plain for document in documents)
            lost += len(documents) < sum(moment < killed - 1.0 for moment in ended)
    return {
        "kills": times,
        "answers": len(ended),
        "answers_that_differ_from_plain": differ,
        "documents_found": len(documents),
        "documents_with_wrong_data": wrong,
        "restarts_that_lost_what_was_older_than_1_s": lost,
    }


def _given_up(ask: Callable[..., Any], *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # its server was killed
        ask(*arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help='JSONL with "prompt" and "output"')
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, default=16, help="nodes per step, root included")
    parser.add_argument("--delta", type=int, default=256 << 10, help="tokens of the delta that is rebuilt")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--model", type=Path, help="model folder: also kill a server of it")
    parser.add_argument("--engine-kills", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", choices=("update", "rebuild", "cold_start", "crashes", "engine"), help="default: all"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        trace = Trace.load(arguments.trace, arguments.tokenizer)
        if len(trace.rows) <= STORE_ROWS:
            raise ValueError(f"trace: {arguments.trace} has no row to replay after its first {STORE_ROWS}")
        weights = untainted_weights(trace)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "update": lambda: update_cost(trace),
        "rebuild": lambda: rebuild(trace, arguments.budget, weights, arguments.delta),
        "cold_start": lambda: cold_start(trace, arguments.budget, weights),
        "crashes": lambda: kills(arguments.kills),
    }
    if arguments.model is not None:
        parts["engine"] = lambda: engine_kills(arguments.model, arguments.engine_kills)
    before = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    result = before | {
        "trace": arguments.trace.name,
        "budget": arguments.budget,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **{name: part() for name, part in parts.items() if not arguments.only or name in arguments.only},
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
