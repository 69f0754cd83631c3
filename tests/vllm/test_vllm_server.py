"""The OpenAI-compatible server of stock vLLM with `--speculative-config '{"method": "sssd"}'`."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.prompts import SHORT

CLIENTS = 8
ROUNDS = 3
TOKENS = 24
PROMPTS = SHORT[:4]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


class Server(NamedTuple):
    port: int
    metrics_port: int
    log: Path


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, metrics_port = free_port(), free_port()
    log = tmp_path_factory.mktemp("server") / "server.log"
    speculative = {"method": "sssd", "num_speculative_tokens": 8, "knee": 24, "metrics_port": metrics_port}
    arguments, environment = command(demo_model, port, speculative)
    with log.open("w") as output:
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=subprocess.STDOUT)
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
        yield Server(port, metrics_port, log)
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
    text = get(server.metrics_port, "/metrics")[1]
    found = re.search(rf'^{name}{{method="sssd"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_eight_clients_with_aborts_lose_nothing_and_leak_nothing(server: Server) -> None:
    expected = {prompt: complete(server.port, prompt) for prompt in PROMPTS}
    assert all(expected.values())
    wrong: list[str] = []
    done = threading.Lock()
    finished = 0
    most = 0.0

    def client(number: int) -> None:
        nonlocal finished
        choose = random.Random(number)
        for _ in range(ROUNDS):
            prompt = choose.choice(PROMPTS)
            try:
                complete(server.port, choose.choice(PROMPTS), abort_after=choose.randint(1, 5))
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
    assert metric(server, "freedraft_budget_tokens") > 0


def test_the_log_says_so_once_and_nothing_per_step(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if re.match(r"freedraft[\w.]* ", line)]
    assert sum("sssd drafts up to 8 tokens per request" in line for line in lines) == 1
    assert len(lines) < 8, lines


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"datastroe": "x"}, ["unknown option 'datastroe'", "did you mean 'datastore'?"]),
        ({"datastore": "/no/such/store"}, ["/no/such/store"]),
    ],
)
def test_a_bad_option_stops_the_server_with_one_line(demo_model: Path, option: dict, words: list[str]) -> None:
    speculative = {"method": "sssd", "num_speculative_tokens": 8} | option
    arguments, environment = command(demo_model, free_port(), speculative)
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("freedraft: ")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words)
    assert "Traceback" not in result.stderr
