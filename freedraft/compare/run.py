"""Send kinds of request to a plain and a drafting server, and say which kinds they answer differently."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from freedraft.compare.server import Server

KINDS = Path(__file__).with_name("kinds.yaml")
SAME, DIFFERS, ONE = "same", "differs", "refused by one"
BOTH, ITSELF = "refused by both", "plain differs from itself"
# Not of an answer but of its request: names, times, counts of caches and of drafts.
OWN = re.compile(r"id|rid|created|model|system_fingerprint|metrics|sglext|.*(cached|spec_|time|latency).*")


def load(names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kinds of the package's file with their "requests", and `names` in place of words with $."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {filled(key): filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return names.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value

    def whole(request: dict[str, Any]) -> dict[str, Any]:
        at = request.get("at", "completions")
        return filled(request | {"at": at, "send": told["defaults"][at] | request.get("send", {})})

    told = yaml.safe_load(KINDS.read_text(encoding="utf-8"))
    for kind in told["kinds"]:
        each = kind.get("together") or kind.get("in_turn") or [kind]
        kind["requests"] = [whole(request) for request in each] * kind.get("times", 1)
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


def ask(server: Server, kind: dict[str, Any]) -> list[Any]:
    with ThreadPoolExecutor(len(kind["requests"]) if "together" in kind else 1) as pool:
        return list(pool.map(server.ask, kind["requests"]))


def judged(rounds: list[list[Any]], tolerance: float) -> tuple[str, str | None]:
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


def short(answer: Any) -> str:
    """The first text in an answer; of a refusal its status."""
    status, body = answer
    body = body[0] if isinstance(body, list) else body
    if status != 200 or body == "cut":
        return str(status if status != 200 else body)
    choice = body["choices"][0] if body.get("choices") else body
    message = choice.get("message") or choice.get("delta") or choice
    text = next(filter(None, map(message.get, ("tool_calls", "content", "text", "reasoning", "reasoning_content"))), "")
    return " ".join(str(text).split())[:60]


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
