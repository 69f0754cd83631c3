"""The demo's figures, and its server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.demo import server
from bench.demo.measure import BASELINE, SSSD, Answer, Prompt, row


def test_a_row_sums_up_the_prompts_of_a_kind() -> None:
    def prompt(*seconds: float, last: int = 3) -> Prompt:
        plain = [Answer((1, 2, 3, 4), second, 4) for second in seconds]
        drafted = [Answer((1, 2, 3, 4), second / 2, 2) for second in seconds]
        return Prompt("code", [], {BASELINE: plain, SSSD: [*drafted[:-1], drafted[-1]._replace(steps=last)]})

    found = row("code", [prompt(1.0, 2.0), prompt(3.0, 2.0, last=1)])
    assert found == {
        "kind": "code", "plain_tps": 2.0, "sssd_tps": 4.0, "ratio": 2.0, "ratio_min": 2.0, "ratio_max": 2.0,
        "tokens_per_step": 2.0, "identical": True,
    }  # fmt: skip
    other = prompt(1.0)
    other.answers[SSSD][0] = Answer((1, 2, 3, 5), 1.0, 2)
    assert not row("code", [other])["identical"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_of_each_engine_is_found_again_and_stopped(tmp_path: Path, monkeypatch, engine: str) -> None:
    monkeypatch.setattr(server, "STATE", tmp_path / "server.json")
    waits = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)", "--port", "12345"]
    process = subprocess.Popen(waits, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    state = {"engine": engine, "pid": process.pid, "port": 12345}
    server.STATE.write_text(json.dumps(state | {"port": 1234}))
    assert server.recorded() is None, "another process has that pid now"
    server.STATE.write_text(json.dumps(state))
    assert server.recorded() == state
    server.stop()
    assert process.stdout.read() == b"" and server.recorded() is None
