"""Servers that are compared: what they serve, and their whole answers to requests of any kind."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
# What is joined where a stream brings it in pieces.
TEXTS = {"text", "content", "reasoning", "reasoning_content", "arguments", "refusal"}


@dataclass
class Request:
    """A request of some kind.

    Attributes:
        at: a key of `PATHS`.
        cut_ms: milliseconds after which the client goes away; its answer is not compared.
    """

    at: str = "completions"
    send: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cut_ms: int | None = None


@dataclass(frozen=True)
class Answer:
    """status: of HTTP, or the name of the error that left the client without an answer."""

    status: int | str
    body: Any = None

    @property
    def refused(self) -> bool:
        return self.status != 200


class Server:
    """A running server of either engine. Raises ValueError, one line: it does not answer, or is of neither."""

    def __init__(self, url: str, timeout: float, key: str | None = None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_keepalive_connections=0)  # servers close idle connections as the next request comes
        self.client = httpx.Client(base_url=url, timeout=timeout, headers=headers, limits=limits)
        self.url = url
        try:
            card = self.client.get("/v1/models").raise_for_status().json()["data"][0]
            self.engine, self.model, self.room = card["owned_by"], card["id"], int(card["max_model_len"])
            info = self._json("/server_info?config_format=json")  # vLLM: with VLLM_SERVER_DEV_MODE=1 only
            version = self._json("/version")
            self.drafts = info.get("speculative_algorithm") is not None or ACCEPTED in self.client.get("/metrics").text
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"no vLLM or SGLang server at {url}: {error or type(error).__name__}") from None
        if self.engine not in ("vllm", "sglang"):
            raise ValueError(f"{url} serves '{self.model}' of '{self.engine}': only vLLM and SGLang can be compared")
        config = info.get("vllm_config", {}).get("model_config", info)
        self.about = {"engine": self.engine, "max_model_len": self.room, "version": None} | version
        self.about |= {"model": config.get("model_path", card["root"])}
        self.about |= {name: config.get(name) for name in ("version", "dtype", "quantization") if config.get(name)}

    def _json(self, path: str) -> dict[str, Any]:
        answer = self.client.get(path)
        found = answer.json() if answer.status_code == 200 else {}
        return found if isinstance(found, dict) else {}

    def ask(self, request: Request) -> Answer:
        """The whole answer, the pieces of a stream joined."""
        body = request.send | ({} if request.at == "generate" else {"model": self.model})
        more: dict[str, Any] = {"headers": request.headers}
        if request.cut_ms is not None:
            body["stream"], more["timeout"] = True, request.cut_ms / 1000
        end = time.monotonic() + (request.cut_ms or 1e9) / 1000
        whole: dict[str, Any] = {}
        try:
            with self.client.stream("POST", PATHS[request.at], json=body, **more) as answer:
                if answer.status_code != 200 or not body.get("stream"):
                    return Answer(answer.status_code, json.loads(answer.read() or "null"))
                for line in answer.iter_lines():
                    if time.monotonic() > end:
                        break
                    if line.startswith("data: ") and line != "data: [DONE]":
                        piece = json.loads(line.removeprefix("data: "))
                        join(whole, piece) if request.at != "generate" else whole.update(piece)
        except (httpx.HTTPError, ValueError) as error:
            if request.cut_ms is None:
                return Answer(type(error).__name__)
        return Answer(200, whole if request.cut_ms is None else "cut")

    def accepted(self, answers: list[Answer]) -> int:
        """Draft tokens accepted: of these answers (SGLang), of all until now (vLLM)."""
        if self.engine == "sglang":
            return sum(map(counted, (answer.body for answer in answers)))
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(int(sample.value) for family in families for sample in family.samples if sample.name == ACCEPTED)


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


def counted(body: Any) -> int:
    """SGLang's counts of accepted draft tokens, wherever they stand in an answer."""
    if isinstance(body, dict):
        return int(body.get("spec_num_correct_drafts") or 0) + sum(map(counted, body.values()))
    return sum(map(counted, body)) if isinstance(body, list) else 0
