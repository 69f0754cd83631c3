"""A server of either engine, and its whole answers to requests of any kind."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total", "freedraft_accepted_tokens_total")
TEXTS = {"text", "content", "reasoning", "reasoning_content", "arguments", "refusal"}  # streamed in pieces

Answer = tuple[int | str, Any]
"""Status of HTTP, or the name of the error that left the client without an answer; and the body."""


class Server:
    """A running server. Raises ValueError, one line: it does not answer, or is of no engine that can be compared."""

    def __init__(self, url: str, timeout: float = 600, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_keepalive_connections=0)  # servers close idle ones as the next request comes
        self.url, self.client = url, httpx.Client(base_url=url, timeout=timeout, headers=headers, limits=limits)
        try:
            card = self.client.get("/v1/models").raise_for_status().json()["data"][0]
            self.model, self.engine, self.room = card["id"], card["owned_by"], int(card["max_model_len"])
            info = self._json("/server_info?config_format=json")  # vLLM: with VLLM_SERVER_DEV_MODE=1 only
            told = info.get("vllm_config", {}).get("model_config", info) | self._json("/version")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"no vLLM or SGLang server at {url}: {error}") from None
        self.about = {"engine": self.engine, "max_model_len": self.room, "model": told.get("model_path", card["root"])}
        self.about |= {name: told[name] for name in ("version", "dtype", "quantization") if told.get(name)}
        self.drafts = info.get("speculative_algorithm") is not None or self.accepted() is not None

    def _json(self, path: str) -> dict[str, Any]:
        answer = self.client.get(path)
        return dict(answer.json()) if answer.status_code == 200 else {}

    def accepted(self) -> int | None:
        """Draft tokens accepted since the start; None where its page of metrics, if any, has no such count."""
        try:
            families = text_string_to_metric_families(self.client.get("/metrics").text)
            found = [sample.value for family in families for sample in family.samples if sample.name in ACCEPTED]
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(f"{self.url} is gone: {error}") from None
        return int(sum(found)) if found else None

    def ask(self, request: dict[str, Any]) -> Answer:
        """The answer to a request of the file of kinds, pieces of a stream joined."""
        body, cut = dict(request["send"]), request.get("cut_ms")
        how: dict[str, Any] = {"headers": request.get("headers")} | ({"timeout": cut / 1000} if cut else {})
        if request["at"] != "generate":
            body["model"] = self.model
        end, whole = time.monotonic() + (cut or 1e9) / 1000, dict[str, Any]()
        try:
            with self.client.stream("POST", PATHS[request["at"]], json=body, **how) as answer:
                if answer.status_code != 200 or not body.get("stream"):
                    return answer.status_code, json.loads(answer.read() or "null")
                for line in answer.iter_lines():
                    if time.monotonic() > end:
                        break
                    if line.startswith("data: {"):
                        piece = json.loads(line.removeprefix("data: "))
                        whole.update(piece) if request["at"] == "generate" else join(whole, piece)
        except (httpx.HTTPError, ValueError) as error:
            if not cut:
                return type(error).__name__, str(error)
        return 200, "cut" if cut else whole


def join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a stream: texts and lists behind what is there, choices and tool calls by their index."""
    for name, value in piece.items():
        if name in ("choices", "tool_calls"):
            for item in value or ():
                join(whole.setdefault(name, {}).setdefault(item["index"], {}), item)
        elif isinstance(value, dict):
            join(whole.setdefault(name, {}), value)
        elif isinstance(value, list) or (isinstance(value, str) and name in TEXTS):
            whole[name] = whole.get(name, type(value)()) + value
        elif value is not None:
            whole[name] = value
