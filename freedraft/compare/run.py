"""Send kinds of request to two servers, and say which kinds they answer differently."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from freedraft.compare.servers import Answer, Request, Server

KINDS = Path(__file__).with_name("kinds.yaml")
SAME, DIFFERS, ONE = "same", "differs", "refused by one"
BOTH, ITSELF = "refused by both", "plain differs from itself"
# Not of an answer but of its request: names, times, counts of caches and of drafts.
OWN = re.compile(r"id|rid|created|model|system_fingerprint|metrics|sglext|.*(cached|spec_|time|latency).*")


class Kind(NamedTuple):
    """engine: the one that has it; None for both."""

    name: str
    requests: list[Request]
    together: bool
    engine: str | None


@dataclass
class Row:
    """What a kind showed. plain: the first answer in short. accepted: draft tokens, None where they are not counted."""

    kind: str
    outcome: str
    difference: str | None
    plain: str
    accepted: int | None


def load(names: Mapping[str, Any]) -> list[Kind]:
    """The kinds of the package's file, with `names` in place of words with $."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {filled(key): filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return names.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value

    def kind(kind: str, engine: str | None = None, times: int = 1, **given: Any) -> Kind:
        each = given.get("together") or given.get("in_turn") or [given]
        whole = [one | {"send": defaults[one.get("at", "completions")] | one.get("send", {})} for one in each]
        return Kind(kind, [Request(**filled(one)) for one in whole] * times, "together" in given, engine)

    told = yaml.safe_load(KINDS.read_text(encoding="utf-8"))
    defaults = told["defaults"]
    return [kind(**given) for given in told["kinds"]]


def names_of(server: Server) -> dict[str, Any]:
    """What the words with $ stand for, by the server's answer to the first kind."""
    first = load({})[0].requests[0]
    answer = server.ask(first)
    asked = server.client.post("/tokenize", json={"model": server.model, "prompt": first.send["prompt"]})
    if answer.status != 200 or asked.status_code != 200:
        raise ValueError(f"{server.url} refuses a plain completion, or /tokenize: {answer.body or asked.text}")
    ids, prompt = list(dict.fromkeys(answer.body["choices"][0]["token_ids"])), asked.json()["tokens"]
    text = (prompt * math.ceil(server.room / len(prompt)))[: server.room]
    names = {f"id{i}": ids[i % len(ids)] for i in range(16)} | {"ids": ids, "page": text[:129]}
    return names | {f"room{n}": text[n:] for n in (0, 1, 5, 24, 64)}


def compare(plain: Server, drafting: Server, only: Sequence[str] = (), tolerance: float = 1e-3) -> Iterator[Row]:
    """Ask both servers twice, in turns. A request to which plain's two answers differ is not compared.

    Args:
        only: patterns of names of kinds; none for all kinds.
        tolerance: by how much logprobs may differ.

    Raises:
        ValueError: the servers do not serve the same, or one is gone; one line.
    """
    if unlike := [name for name, value in plain.about.items() if drafting.about.get(name, value) != value]:
        said = ", ".join(f"{name} {plain.about[name]} and {drafting.about[name]}" for name in unlike)
        raise ValueError(f"these servers cannot be compared: {said}")
    if plain.drafts or not drafting.drafts:
        raise ValueError("name a server without speculative decoding first, and one with it second")
    kinds = [kind for kind in load(names_of(plain)) if kind.engine in (None, plain.engine)]
    kinds = [kind for kind in kinds if not only or any(fnmatch(kind.name, pattern) for pattern in only)]
    if not kinds:
        raise ValueError(f"no kind of request is called {' or '.join(only)}")
    return (_row(kind, plain, drafting, tolerance) for kind in kinds)


def _row(kind: Kind, plain: Server, drafting: Server, tolerance: float) -> Row:
    before = drafting.accepted()
    rounds = [_ask(server, kind) for server in (plain, drafting) * 2]
    accepted = None if before is None else (drafting.accepted() or 0) - before
    outcome, found = SAME if any(answer.status == 200 for answer in rounds[0]) else BOTH, None
    for i, (first, drafted, again, drafted_again) in enumerate(zip(*rounds, strict=True), 1):
        if unsteady := next(differences(first, again, tolerance), None):
            outcome, found = (ITSELF, f"request {i}{unsteady}") if outcome in (SAME, BOTH) else (outcome, found)
            continue
        for answer in (drafted, drafted_again):
            difference = next(differences(first, answer, tolerance), None)
            if difference and outcome not in (DIFFERS, ONE):
                outcome = ONE if (first.status == 200) != (answer.status == 200) else DIFFERS
                found = f"request {i}{difference}"
    return Row(kind.name, outcome, found, _short(rounds[0][0]), accepted)


def _ask(server: Server, kind: Kind) -> list[Answer]:
    with ThreadPoolExecutor(len(kind.requests) if kind.together else 1) as pool:
        return list(pool.map(server.ask, kind.requests))


def differences(a: Any, b: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Where two answers differ, and how; refusals by their status only. No answer is like another missing one."""
    if isinstance(a, Answer):
        if a.status != b.status or isinstance(a.status, str):
            yield f": {_short(a)} and {_short(b)}"
        elif a.status == 200:
            yield from differences(a.body, b.body, tolerance)
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            if not OWN.fullmatch(str(key)):
                yield from differences(a.get(key), b.get(key), tolerance, f"{at} {key}")
    elif isinstance(a, list) and isinstance(b, list):
        for i, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from differences(one, other, tolerance, f"{at} {i}")
        if len(a) != len(b):
            yield f"{at}: {len(a)} and {len(b)} items"
    elif a != b and not (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= tolerance):
        yield f"{at}: {a!r:.200} and {b!r:.200}"


def _short(answer: Answer) -> str:
    """The first text in an answer; of a refusal its status."""
    if answer.status != 200 or answer.body == "cut":
        return str(answer.body if answer.status == 200 else answer.status)
    body = answer.body[0] if isinstance(answer.body, list) else answer.body
    choice = body["choices"][0] if "choices" in body else body
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
        count = "-" if row.accepted is None else row.accepted
        print(f"{row.kind:42} {row.outcome:25} {count:8}  {row.plain}", flush=True)
        if row.difference:
            print(f"    {row.difference}", flush=True)
    counts = Counter(row.outcome for row in rows)
    print(f"{len(rows)} kinds: {', '.join(f'{n} {outcome}' for outcome, n in counts.most_common())}")
    if file is not None:
        done = {"about": plain.about, "tolerance": tolerance, "outcomes": counts, "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    if not any(row.accepted is None or row.accepted for row in rows):
        raise ValueError(
            f"{drafting.url} accepted no draft token, so that nothing is shown: see docs/troubleshooting.md"
        )
    return 1 if counts[DIFFERS] + counts[ONE] else 0
