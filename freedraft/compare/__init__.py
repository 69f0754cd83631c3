"""`freedraft compare`: kinds of request to a plain and a drafting server, and which kinds they answer differently."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

KINDS = Path(__file__).with_name("kinds.yaml")
SAME, DIFFERS, ONE = "same", "differs", "refused by one"
BOTH, ITSELF = "refused by both", "plain differs from itself"
# Not of an answer but of its request: names, times, counts of caches and of drafts.
OWN = re.compile(r"id|rid|created|model|system_fingerprint|metrics|sglext|.*(cached|spec_|time|latency).*")
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


def load(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kinds of the package's file with their "requests", and `names` in place of words with $."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {filled(key): filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return names.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value

    def whole(request: dict[str, Any], salt: str) -> dict[str, Any]:
        at = request.get("at", "completions")
        return filled(
            request | {"at": at, "send": {"cache_salt": salt} | told["defaults"][at] | request.get("send", {})}
        )

    told = yaml.safe_load(KINDS.read_text(encoding="utf-8"))
    for kind in told["kinds"]:
        each = kind.get("together") or kind.get("in_turn") or [kind]
        kind["requests"] = [whole(request, kind["kind"]) for request in each] * kind.get("times", 1)
    return list(told["kinds"])


def names_of(server: Server) -> dict[str, Any]:
    """What the words with $ stand for, by the server's answer to the first kind."""
    request = load({})[0]["requests"][0]
    status, answer = server.ask(request)
    asked = server.client.post("/tokenize", json={"model": server.model, "prompt": request["send"]["prompt"]})
    if status != 200 or asked.status_code != 200:
        raise ValueError(
            f"{server.url} refuses a plain completion, or /tokenize: {answer if status != 200 else asked.text}"
        )
    ids, prompt = list(dict.fromkeys(answer["choices"][0]["token_ids"])), asked.json()["tokens"]
    text = (prompt * (server.room // len(prompt) + 1))[: server.room]
    names = {f"id{i}": ids[i % len(ids)] for i in range(16)} | {"ids": ids, "page": text[:129]}
    return names | {f"room{n}": text[n:] for n in (0, 1, 5, 24, 64)}


def compare(
    plain: Server, drafting: Server, only: Sequence[str] = (), tolerance: float = 1e-3
) -> Iterator[dict[str, Any]]:
    """Ask both servers twice, in turns; yield a row for each kind. A request to which plain's two answers differ is not
    compared.

    Args:
        only: patterns of names of kinds; none for all kinds.
        tolerance: by how much logprobs may differ.

    Raises:
        ValueError: the servers do not serve the same, or one is gone; one line.
    """
    unlike = [name for name, value in plain.about.items() if drafting.about.get(name, value) != value]
    if unlike:
        said = ", ".join(f"{name} {plain.about[name]} and {drafting.about[name]}" for name in unlike)
        raise ValueError(f"these servers cannot be compared: {said}")
    if plain.drafts or not drafting.drafts:
        raise ValueError("name a server without speculative decoding first, and one with it second")
    kinds = [kind for kind in load(names_of(plain)) if kind.get("engine") in (None, plain.engine)]
    kinds = [kind for kind in kinds if not only or any(fnmatch(kind["kind"], pattern) for pattern in only)]
    if not kinds:
        raise ValueError(f"no kind of request is called {' or '.join(only)}")
    for kind in kinds:
        before = drafting.accepted()
        rounds = [ask(server, kind) for server in (plain, drafting) * 2]
        accepted = None if before is None else (drafting.accepted() or 0) - before
        outcome, found = judged(rounds, tolerance)
        yield {
            "kind": kind["kind"],
            "outcome": outcome,
            "difference": found,
            "plain": short(rounds[0][0]),
            "accepted": accepted,
        }


def ask(server: Server, kind: dict[str, Any]) -> list[Answer]:
    with ThreadPoolExecutor(len(kind["requests"]) if "together" in kind else 1) as pool:
        return list(pool.map(server.ask, kind["requests"]))


def judged(rounds: list[list[Answer]], tolerance: float) -> tuple[str, str | None]:
    """The outcome of a kind, and the first difference, from the answers of plain, drafting, plain and drafting."""
    itself = None
    for i, (first, drafted, again, drafted_again) in enumerate(zip(*rounds, strict=True), 1):
        if difference := next(differences(first, again, tolerance), None):
            itself = itself or f"request {i}{difference}"
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
        for key in sorted(a.keys() | b.keys(), key=str):
            if not OWN.fullmatch(str(key)):
                yield from differences(a.get(key), b.get(key), tolerance, f"{at} {key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, tolerance, f"{at} {i}")
    elif a != b and not (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= tolerance):
        yield f"{at}: {a!r:.200} and {b!r:.200}"


def short(answer: Answer) -> str:
    """The first text in an answer; its status where there is none."""
    status, body = answer
    found = re.search(
        r'"(?:text|content|arguments|reasoning\w*)": "((?:[^"\\]|\\.)+)"', json.dumps(body, ensure_ascii=False)
    )
    return found[1][:60] if found and status == 200 else str(status)


def report(plain: Server, drafting: Server, only: Sequence[str], tolerance: float, file: Path | None) -> int:
    """Print a row for each kind as it is answered; return 1 if a kind differs. Raises ValueError: as `compare`, and
    where no draft token was accepted, which shows nothing."""
    print(f"{'kind of request':42} {'drafting answers':25} accepted  plain answers")
    rows = []
    for row in compare(plain, drafting, only, tolerance):
        rows.append(row)
        print(f"{row['kind']:42} {row['outcome']:25} {row['accepted'] or '-':>8}  {row['plain']}", flush=True)
        if row["difference"]:
            print(f"    {row['difference']}", flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print(f"{len(rows)} kinds: {', '.join(f'{n} {outcome}' for outcome, n in counts.most_common())}")
    if file is not None:
        about = {"about": plain.about, "tolerance": tolerance, "outcomes": counts}
        file.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    if not any(row["accepted"] is None or row["accepted"] for row in rows):
        raise ValueError(f"{drafting.url} accepted no draft token, which shows nothing: see 'freedraft top'")
    return 1 if counts[DIFFERS] + counts[ONE] else 0
