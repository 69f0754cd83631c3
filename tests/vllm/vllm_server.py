"""vLLM's OpenAI-compatible server as a process, and clients that go away in the midst of an answer."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.lib.servers import free_port

CLIENTS = 8
ROUNDS = 3
TOKENS = 24


def command(model: Path, port: int, speculative: dict[str, Any], *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and environment of a server of its own processes."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    # The prefix becomes a part of the log's format: each line begins with the name of its logger.
    environment |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_PREFIX": "%(name)s "}
    return [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "16", "--speculative-config", json.dumps(speculative)),
        *arguments,
    ], environment


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


class Server(NamedTuple):
    """A server that answers.

    Attributes:
        drafters: ports of the metrics of our drafters, one for each process that drafts.
    """

    port: int
    drafters: tuple[int, ...]
    log: Path


@contextmanager
def serving(
    model: Path,
    folder: Path,
    speculative: dict[str, Any],
    *arguments: str,
    drafters: int = 1,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """A server of `sssd` with so many drafters, its log in `folder`."""
    port, first, log = free_port(), free_port(), folder / "server.log"
    words, variables = command(model, port, speculative | {"metrics_port": first}, *arguments)
    with log.open("w") as output:
        process = subprocess.Popen(words, env=variables | (environment or {}), stdout=output, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if get(port, "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield Server(port, tuple(range(first, first + drafters)), log)
    finally:
        process.terminate()
        process.wait(60)


def complete(port: int, prompt: str, abort_after: int | None = None) -> str | None:
    """A streamed completion; None when it was left after `abort_after` pieces."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    text, pieces, reason = "", 0, None
    try:
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            choice = json.loads(line[len(b"data: ") :])["choices"][0]
            text += choice["text"]
            reason = choice["finish_reason"] or reason
            pieces += 1
            if abort_after is not None and pieces >= abort_after:
                return None
    finally:
        # Closing the socket is how a client goes away.
        response.close()
        connection.close()
    assert reason in ("length", "stop"), f"the stream broke off: {text!r}"
    return text


def metric(server: Server, name: str) -> float:
    """The sum over all drafters."""
    return sum(metrics(server, name))


def metrics(server: Server, name: str) -> list[float]:
    """Of each drafter."""
    pages = [get(port, "/metrics")[1] for port in server.drafters]
    found = [re.search(rf'^{name}{{method="sssd"}} (\S+)$', page, re.MULTILINE) for page in pages]
    assert all(found), pages
    return [float(match[1]) for match in found if match]


def clients_that_go_away(server: Server, prompts: Sequence[str]) -> None:
    """Eight clients at once, whose answers are those of a client alone; nothing is held afterwards."""
    expected = {prompt: complete(server.port, prompt) for prompt in prompts}
    assert all(expected.values())
    wrong: list[str] = []
    done = threading.Lock()
    finished = 0
    most = budget = 0.0

    def client(number: int) -> None:
        nonlocal finished
        choose = random.Random(number)
        for _ in range(ROUNDS):
            prompt = choose.choice(prompts)
            try:
                complete(server.port, choose.choice(prompts), abort_after=choose.randint(1, 5))
                text = complete(server.port, prompt)
            except Exception as error:
                wrong.append(f"{prompt!r}: {error!r}")
                continue
            with done:
                finished += 1
                if text != expected[prompt]:
                    wrong.append(f"{prompt!r}: {text!r} instead of {expected[prompt]!r}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in clients:
        thread.start()
    while any(thread.is_alive() for thread in clients):
        most = max(most, metric(server, "freedraft_requests"))
        budget = max(budget, metric(server, "freedraft_budget_tokens"))
        time.sleep(0.1)
    assert wrong == []
    assert finished == CLIENTS * ROUNDS
    assert most > 1
    for _ in range(100):
        if metric(server, "freedraft_requests") == 0:
            break
        time.sleep(0.1)
    assert metric(server, "freedraft_requests") == 0
    assert metric(server, "freedraft_draft_tokens_total") > metric(server, "freedraft_accepted_tokens_total") > 0
    assert metric(server, "freedraft_drafting_seconds_sum") > 0
    assert budget > 0
