"""The demo's figures, its end, and its server."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.demo import server
from bench.demo.measure import BASELINE, SSSD, Answer, Client, Prompt, measure, prompts, row, rows
from bench.lib.servers import HOST, is_healthy


def prompt(*seconds: float, last: int = 3, kind: str = "code") -> Prompt:
    plain = [Answer((1, 2, 3, 4), second, 4) for second in seconds]
    drafted = [Answer((1, 2, 3, 4), second / 2, 2) for second in seconds]
    drafted[-1:] = [one._replace(steps=last) for one in drafted[-1:]]
    return Prompt(kind, [], {BASELINE: plain, SSSD: drafted})


def test_a_row_sums_up_the_prompts_of_a_kind() -> None:
    assert row("code", [prompt(1.0, 2.0), prompt(3.0, 2.0, last=1)]) == {
        "kind": "code", "tokens_per_step": 2.0, "plain_tps": 2.0, "sssd_tps": 4.0, "ratio": 2.0, "ratio_min": 2.0,
        "ratio_max": 2.0, "identical": True,
    }  # fmt: skip
    other = prompt(1.0)
    other.answers[SSSD][0] = Answer((1, 2, 3, 5), 1.0, 2)
    assert not row("code", [other])["identical"]


def test_a_row_counts_whole_rounds_and_of_the_first_what_was_asked() -> None:
    assert rows([prompt(), prompt(kind="chat")]) == []
    (first,) = rows([prompt(1.0), prompt(), prompt(kind="chat")])
    assert first["plain_tps"] == 4.0 and "ratio_min" not in first, "one round has no range"
    begun = prompt(1.0, 9.0)
    begun.answers[SSSD].pop()
    assert row("code", [begun, prompt(1.0)])["plain_tps"] == 4.0


def test_kinds_take_turns_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts()
    kinds = list(dict.fromkeys(one.kind for one in asked))
    assert [one.kind for one in asked[:10]] == 2 * kinds and len(asked) == 16
    assert [len(one.messages) for one in asked if one.kind == "agent session"] == [1, 3, 5, 7]

    class Clock(Client):
        def __init__(self) -> None:
            """Without a server."""

        def ask(self, *_: object) -> Answer:
            now[0] += 1.0
            return Answer((1, 2), 1.0, 1)

    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clients: dict[str, Client] = {BASELINE: Clock(), SSSD: Clock()}
    measured = [one.kind for one in measure(clients, asked, 0.0)]
    assert measured == kinds, "every kind, though the time was over"
    now[0] = 0.0
    assert len(list(measure(clients, prompts(), 6 + 2 * 20))) == 20, "six requests to warm up"


SLOW_SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.answer(b"")
    def do_POST(self):
        time.sleep(0.05)
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [1, 2], "message": {"role": "assistant"}}
        said = {"id": "x", "object": "chat.completion", "created": 0, "model": "demo", "choices": [choice]}
        self.answer(json.dumps(said).encode())
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DEMO = f"""
import os, sys
from pathlib import Path
from bench.demo import __main__ as demo
from bench.lib import servers
def build(name, engine, model, log, **_):
    print(port := servers.free_port(), flush=True)
    return servers.Server(name, [sys.executable, "-c", {SLOW_SERVER!r}, str(port)], dict(os.environ), port, log)
demo.ensure_store, servers.build = lambda *_: None, build
sys.exit(demo.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_prints_its_table_and_ends_its_servers(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "config.json").touch()
    command = [sys.executable, "-c", DEMO, "--model", str(tmp_path), "--json", str(tmp_path / "demo.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        first = list(iter(process.stdout.readline, "the first of each kind:\n"))
        assert re.fullmatch(r"preparing the datastore; (9:00|8:5\d) left ...\n", first[2])
        for _ in range(2):
            process.send_signal(number)
        last, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 128 + number and errors == ""
    assert [table.count("agent session") for table in last.split("SmolLM2")] == [1, 1]
    assert not any(is_healthy(f"http://{HOST}:{port.strip()}") for port in first[:2])
    assert not (tmp_path / "demo.json").exists()


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
