"""What is counted of a server's answers, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from bench.lib import load

TOKENS, VERIFICATIONS = 8, 3


class Sglang(BaseHTTPRequestHandler):
    """Answers of eight tokens: the first by the prompt's pass, the others by three verifications."""

    verified = 5  # of a warm-up
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        metric = "sglang:spec_verify_calls"
        text = f'# TYPE {metric}_total counter\n{metric}_total{{model_name="m"}} {type(self).verified}\n'
        self.answer("text/plain", text if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        type(self).verified += VERIFICATIONS
        chunks = [{"choices": [{"delta": {"content": "a"}}]}] * 4
        chunks.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": TOKENS}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.answer("text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Sglang) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_an_sglang_accepts_is_told_from_its_verifications(url: str) -> None:
    pytest.importorskip("vllm")
    for _ in range(2):
        outcome = load.ask(url, "m", ["one", "two"], 1, TOKENS)
        assert outcome.tokens == [TOKENS, TOKENS] and not outcome.errors
        # Each request brought a token by its prompt and one by each verification.
        assert outcome.accepted == 2 * (TOKENS - 1 - VERIFICATIONS) and outcome.drafted is None


def test_streams_that_break_off_have_failed(url: str) -> None:
    """vLLM's client counts them as answers."""
    pytest.importorskip("vllm")
    outcome = load.ask(url, "m", ["one"], 1, TOKENS + 1)
    assert outcome.errors == [f"an answer of less than {TOKENS + 1} tokens"]
    assert outcome.answers == [None]
    assert not load.ask(url, "m", ["one"], 1, TOKENS + 1, given=["a"]).errors


def test_arguments_of_the_chat_template_are_sent_if_there_are_any(url: str) -> None:
    pytest.importorskip("vllm")
    Sglang.asked.clear()
    load.ask(url, "m", ["one"], 1, TOKENS)
    load.ask(url, "m", ["one"], 1, TOKENS, template={"enable_thinking": False})
    without, with_it = Sglang.asked
    assert "chat_template_kwargs" not in without
    assert with_it == without | {"chat_template_kwargs": {"enable_thinking": False}}


def test_other_servers_do_not_say(url: str) -> None:
    assert load.sglang_verifications(url + "/elsewhere") is None
    assert load.sglang_verifications("http://127.0.0.1:1") is None
