"""`freedraft compare`: kinds of request to a plain and a drafting server, and which ones they answer differently."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

SAME, DIFFERS, ONE = "same", "differs", "refused by one"
BOTH, ITSELF = "refused by both", "plain differs from itself"
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
PATHS |= {"responses": "/v1/responses", "messages": "/v1/messages", "ollama": "/api/chat"}
# By engine, the field of a request that turns its drafts off, and the endpoints that have it
OFF = {"vllm": ("vllm_xargs", PATHS.keys()), "sglang": ("custom_params", {"completions", "chat", "generate"})}
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total", "freedraft_accepted_tokens_total")
# Texts that are streamed in pieces
TEXTS = {"text", "content", "reasoning", "reasoning_content", "thinking", "arguments", "refusal", "delta"}
TEXTS |= {"partial_json"}
# Of a request, not of its answer: names, times, counts of caches and of drafts.
OWN = re.compile(
    r"id|\w+_id|sequence_number|signature|created\w*|completed_at|model|system_fingerprint|metrics|sglext|spec_\w+"
    r"|cached?_\w+|(prompt|input)_tokens_details|num_retractions|\w+_(duration|latency|throughput|time|ts|wait)"
)

Answer = tuple[int | str, Any]
"""Status of HTTP, or the name of the error that left the client without an answer; and the body."""


class Server:
    """A running server. off: turn drafts off in each request. Raises ValueError, one line: it does not answer as vLLM
    or SGLang."""

    def __init__(self, url: str, *, off: bool = False) -> None:
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
        limits = httpx.Limits(max_keepalive_connections=0)  # servers close idle ones as the next request comes
        try:
            self.client = httpx.Client(base_url=url, timeout=600, headers=headers, limits=limits)
            card = self._json("/v1/models")["data"][0]
            info = self._json("/server_info?config_format=json")  # vLLM: with VLLM_SERVER_DEV_MODE=1 only
            told = info.get("vllm_config", {}).get("model_config", info) | self._json("/version")
            self.about = {"engine": card["owned_by"], "max_model_len": int(card["max_model_len"])}
            self.about["model"] = told.get("model_path", card["root"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"no vLLM or SGLang server at {url}: {error}") from None
        self.about |= {name: told[name] for name in ("version", "dtype", "quantization") if told.get(name)}
        self.url, self.model = url, card["id"]
        self.counted = uncounted if card["owned_by"] == "vllm" else None
        self.off = off
        self.drafts = not off and (info.get("speculative_algorithm") is not None or self.accepted() is not None)

    def _json(self, path: str) -> Any:
        answer = self.client.get(path)
        return answer.json() if answer.status_code == 200 else {}

    def accepted(self) -> int | None:
        """Draft tokens accepted since the start; None where its page of metrics, if any, does not count them."""
        try:
            families = text_string_to_metric_families(self.client.get("/metrics").text)
            found = [sample.value for family in families for sample in family.samples if sample.name in ACCEPTED]
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(f"{self.url} is gone: {error}") from None
        return int(sum(found)) if found else None

    def ask(self, request: dict[str, Any]) -> Answer:
        """The answer to a request as `load` gives it, pieces of a stream joined."""
        cut, whole = request.get("cut_ms", 0) / 1000, dict[str, Any]()
        body = {"model": self.model} | request["send"] | ({"stream": True} if cut else {})
        if self.off:
            holder = body = deepcopy(body)
            if request["at"] == "generate":
                holder = body.setdefault("sampling_params", {})
            holder.setdefault(OFF[self.about["engine"]][0], {})["freedraft"] = "off"
        how = {"json": body, "headers": request.get("headers")} | ({"timeout": cut} if cut else {})
        end = time.monotonic() + cut
        try:
            with self.client.stream("POST", PATHS[request["at"]], **how) as answer:
                if answer.status_code != 200 or not body.get("stream"):
                    return answer.status_code, json.loads(answer.read() or "null")
                for line in answer.iter_lines():
                    if cut and time.monotonic() > end:
                        break
                    if (line := line.removeprefix("data: ")).startswith("{"):
                        join(whole, json.loads(line, object_hook=self.counted))
        except (httpx.HTTPError, ValueError) as error:
            return (200, None) if cut else (type(error).__name__, str(error))
        return 200, None if cut else whole


def join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece of a stream: texts and lists behind what is there, choices and tool calls by their index."""
    if "meta_info" in piece:  # SGLang's own interface: the whole until now
        whole.clear()
    if isinstance(piece.get("type"), str) and not whole.keys() - {"events"}:  # of an endpoint that streams events
        what, text = apart(piece)
        events = whole.setdefault("events", [["", ""]])
        if events[-1][0] == what:
            events[-1][1] += text
        else:
            events.append([what, text])
        return
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


def apart(event: Any) -> tuple[Any, str]:
    """An event without what is a request's own, and without its texts; and these, one behind another."""
    if not isinstance(event, dict):
        return event, ""
    texts = {key for key, value in event.items() if key in TEXTS and isinstance(value, str)}
    parts = {key: apart(value) for key, value in event.items() if key not in texts and not OWN.fullmatch(key)}
    inner = "".join(text for _, text in parts.values())
    return {key: rest for key, (rest, _) in parts.items()}, "".join(event[key] for key in sorted(texts)) + inner


def uncounted(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a stream of vLLM without its count of reasoning tokens, from which tokens without a text of their own
    are missing, unless its server read them together with the next one."""
    return {name: value for name, value in part.items() if name != "reasoning_tokens"}


def load(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kinds of the package's file, each with its "requests", and `names` in place of words with $."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {filled(key): filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return names.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value

    told = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
    for kind in told["kinds"]:
        each = [{"at": "completions"} | one for one in kind.get("together") or kind.get("in_turn") or [kind]]
        sent = [{"cache_salt": kind["kind"]} | told["defaults"][one["at"]] | one.get("send", {}) for one in each]
        requests = [one | {"send": filled(send)} for one, send in zip(each, sent, strict=True)]
        kind["requests"] = requests * kind.get("times", 1)
    return list(told["kinds"])


def names_of(server: Server) -> dict[str, Any]:
    """What the words with $ stand for, by the server's answer to the first kind."""
    request, room = load({})[0]["requests"][0], server.about["max_model_len"]
    status, answer = server.ask(request)
    asked = server.client.post("/tokenize", json={"model": server.model, "prompt": request["send"]["prompt"]})
    if status != 200 or asked.status_code != 200:
        raise ValueError(f"{server.url} refuses a completion, or /tokenize: {answer}; {asked.text}")
    ids, prompt = list(dict.fromkeys(answer["choices"][0]["token_ids"])), asked.json()["tokens"]
    text = (prompt * (room // len(prompt) + 1))[:room]
    names = {f"id{i}": ids[i % len(ids)] for i in range(16)} | {"ids": ids, "page": text[:129]}
    return names | {f"room{n}": text[n:] for n in (0, 1, 8, 24, 64)}


def compare(
    plain: Server, drafting: Server, only: Sequence[str] = (), tolerance: float = 1e-3
) -> Iterator[dict[str, Any]]:
    """Ask both servers twice, in turns, and yield a row for each kind. A request to which plain's two answers differ is
    not compared.

    Args:
        only: patterns of names of kinds; none for all kinds.
        tolerance: by how much logprobs may differ.

    Raises:
        ValueError: the servers do not serve the same, or one is gone; one line.
    """
    pairs = {name: (value, drafting.about.get(name, value)) for name, value in plain.about.items()}
    if unlike := [f"{name} {one} and {other}" for name, (one, other) in pairs.items() if one != other]:
        raise ValueError(f"these servers cannot be compared: {', '.join(unlike)}")
    if plain.drafts or not drafting.drafts:
        raise ValueError("name a server without speculative decoding first, and one with it second")
    engine = plain.about["engine"]
    kinds = [kind for kind in load(names_of(plain)) if kind.get("engine") in (None, engine)]
    if plain.off:  # what can be asked without drafts
        kinds = [kind for kind in kinds if all(request["at"] in OFF[engine][1] for request in kind["requests"])]
    kinds = [kind for kind in kinds if not only or any(fnmatch(kind["kind"], pattern) for pattern in only)]
    if not kinds:
        raise ValueError(f"no kind of request is called {' or '.join(only)}")
    for kind in kinds:
        before = drafting.accepted()
        with ThreadPoolExecutor(len(kind["requests"]) if "together" in kind else 1) as pool:
            rounds = [list(pool.map(server.ask, kind["requests"])) for server in (plain, drafting) * 2]
        outcome, difference = judged(rounds, tolerance)
        row = {"kind": kind["kind"], "outcome": outcome, "difference": difference, "plain": short(rounds[0][0])}
        yield row | {"accepted": None if before is None else (drafting.accepted() or 0) - before}


def judged(rounds: list[list[Answer]], tolerance: float) -> tuple[str, str | None]:
    """The outcome of a kind, and the first difference, from answers of plain, drafting, plain and drafting."""
    itself = None
    for i, (first, drafted, again, drafted_again) in enumerate(zip(*rounds, strict=True), 1):
        if difference := next(differences(first, again, tolerance), None):
            itself = f"request {i}{difference}"
            continue
        for answer in (drafted, drafted_again):
            if difference := next(differences(first, answer, tolerance), None):
                return ONE if (first[0] == 200) != (answer[0] == 200) else DIFFERS, f"request {i}{difference}"
    refused = all(status != 200 for status, _ in rounds[0])
    return ITSELF if itself else BOTH if refused else SAME, itself


def differences(a: Any, b: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Where two answers, or parts of them, differ, and how. Refusals differ by their status only."""
    if isinstance(a, tuple):
        if a[0] != b[0] or isinstance(a[0], str):
            yield f": {short(a)} and {short(b)}"
        elif a[0] == 200:
            yield from differences(a[1], b[1], tolerance)
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({key for key in a.keys() | b.keys() if not OWN.fullmatch(str(key))}, key=str):
            yield from differences(a.get(key), b.get(key), tolerance, f"{at} {key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, tolerance, f"{at} {i}")
    elif a != b and not (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= tolerance):
        yield f"{at}: {a!r:.200} and {b!r:.200}"


def short(answer: Answer) -> str:
    """The first text in an answer; its status where there is none."""
    text = r'"(?:text|content|arguments|reasoning\w*)": "((?:[^"\\]|\\.)+)"'
    found = re.search(text, json.dumps(answer[1], ensure_ascii=False)) if answer[0] == 200 else None
    return found[1][:60] if found else str(answer[0])
