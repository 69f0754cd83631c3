"""The OpenAI-compatible server of stock vLLM with `--speculative-config '{"method": "sssd"}'`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_server import Server, clients_that_go_away, command, serving

from bench.lib.servers import free_port
from tests.support.prompts import SHORT


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    speculative = {"method": "sssd", "num_speculative_tokens": 8, "knee": 24}
    with serving(demo_model, tmp_path_factory.mktemp("server"), speculative) as made:
        yield made


def test_eight_clients_with_aborts_lose_nothing_and_leak_nothing(server: Server) -> None:
    clients_that_go_away(server, SHORT[:4])


def test_the_log_says_so_once_and_nothing_per_step(server: Server) -> None:
    lines = [line for line in server.log.read_text().splitlines() if re.match(r"freedraft[\w.]* ", line)]
    assert sum("sssd drafts up to 8 tokens per request" in line for line in lines) == 1
    assert sum("method 'sssd': vLLM" in line and "attention CPU_ATTN" in line for line in lines) == 1
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
