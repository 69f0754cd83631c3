"""Processes with a live datastore, killed at random moments: what is in the store afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib import servers
from bench.lib.prompts import BY_KIND
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.maintenance import forget
from sssd_plugin.datastore.live.opening import open_live

LEARN_FOREVER = """
import sys, time
import numpy as np
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.opening import open_live
live_store.MEMTABLE_TOKENS = 256
store = open_live(sys.argv[1], 1000, max_tokens=1 << 18, isolation="shared")
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


def forget_odd(folder: Path) -> None:
    """Erase what a tenant wrote."""
    forget(folder, [str(tenant_key("odd"))])


def compact(folder: Path) -> None:
    """Rewrite the file again and again."""
    log = Log.open(folder, 1000, 1 << 24, None, "shared")
    while True:
        log.compact()


def _run(work: Callable[[Path], None], folder: Path, begun: Path, done: Path) -> None:
    begun.touch()
    work(folder)
    done.touch()


def documents_in(folder: Path, vocab_size: int) -> list[list[int]]:
    """The documents in a store, oldest first."""
    log = Log.open(folder, vocab_size, 1 << 24, None, "shared")
    texts = [record.tokens.tolist() for record in log.load()]
    log.close()
    return texts


def kills_of(work: Callable[[Path], None], times: int) -> dict[str, Any]:
    """Kill a process at random moments of its work: what it left is what there was, or that without one tenant's."""
    rng = np.random.default_rng()
    wrong = undone = ended = copies = 0
    with tempfile.TemporaryDirectory() as name:
        folder, begun, done = (Path(name) / part for part in ("store", "begun", "done"))
        even: list[list[int]] = []
        first = odd_left = 0
        for _ in range(times):
            store = open_live(folder, 1000, isolation="shared")
            for number in range(first, first + 200):
                text = [number // 1000, number % 1000, *([900 + number % 2] * (number % 50))]
                store.insert(np.array(text, np.int32), store.tenant(tenant_key("odd" if number % 2 else "even")))
                even += [text] if number % 2 == 0 else []
            first, odd_left = first + 200, odd_left + 100
            store.close()
            process = multiprocessing.get_context("fork").Process(target=_run, args=(work, folder, begun, done))
            process.start()
            while not begun.exists():
                time.sleep(0.0002)
            time.sleep(float(rng.random()) * 0.06)
            process.kill()
            process.join()
            confirmed = done.exists()
            begun.unlink()
            done.unlink(missing_ok=True)
            texts = documents_in(folder, 1000)
            odd = [text for text in texts if text[1] % 2]
            wrong += [text for text in texts if text[1] % 2 == 0] != even or len(odd) not in (0, odd_left)
            undone += confirmed and len(odd) > 0
            ended += confirmed
            if not odd:
                odd_left = 0
                copies += np.array([901] * 4, "<i4").tobytes() in (folder / "live" / "learnt.sqlite").read_bytes()
    return {
        "kills": times,
        "ended_before_the_kill": ended,
        "restarts_with_wrong_data": wrong,
        "erasures_that_came_back": undone,
        "erasures_that_left_copies": copies,
    }


def kills(times: int) -> dict[str, Any]:
    rng = np.random.default_rng()
    number = wrong = lost = late = 0
    opening: list[float] = []
    longest = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name) / "store", Path(name) / "output"
        for _ in range(times):
            command = [sys.executable, "-c", LEARN_FOREVER, str(folder), str(number)]
            with output.open("w") as out:
                process = subprocess.Popen(command, stdout=out, start_new_session=True)
            while not output.read_text().startswith("ready\n"):
                if process.poll() is not None:
                    raise RuntimeError("a restart did not open the store")
                time.sleep(0.01)
            time.sleep(float(rng.random()) * 1.8)
            killed = time.time()
            process.send_signal(signal.SIGKILL)
            process.wait()
            # When each document was in: (how many there were, time).
            learnt = [(int(n), float(t)) for n, t in (line.split() for line in output.read_text().split("\n")[1:-1])]
            started = time.perf_counter()
            texts = documents_in(folder, 1000)
            opening.append(time.perf_counter() - started)
            numbers = [text[0] * 1_000_000 + text[1] * 1000 + text[2] for text in texts]
            wrong += any(t[3:] != [n % 7] * (n % 50) for t, n in zip(texts, numbers, strict=True))
            wrong += bool(numbers) and numbers != list(range(numbers[0], numbers[0] + len(numbers)))
            kept = numbers[-1] + 1 if numbers else 0
            missing = [t for n, t in learnt if n > kept]
            if missing:
                lost += 1
                longest = max(longest, killed - missing[0])
                late += killed - missing[0] > 1.0
            late += kept < number
            number = max(number, kept)
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
    from openai import OpenAI

    tokens, texts = 32, BY_KIND[::2]
    rng = np.random.default_rng()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speculative: dict[str, object] = {"method": "sssd", "num_speculative_tokens": 6, "policy": "fixed"}
        speculative |= {"live": True, "isolation": "shared", "datastore": str(folder / "store")}

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

        def ask_on(server: servers.Server) -> None:
            for text in texts:
                with contextlib.suppress(Exception):  # its server was killed
                    ask(server, text)

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
                asking = threading.Thread(target=ask_on, args=(server,), daemon=True)
                asking.start()
                time.sleep(float(rng.random()) * 3.0)
                assert server.process is not None
                killed = time.time()
                os.killpg(server.process.pid, signal.SIGKILL)
            finally:
                server.stop()
            asking.join()
            documents = [tuple(text) for text in documents_in(folder / "store", 1 << 30)]
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
