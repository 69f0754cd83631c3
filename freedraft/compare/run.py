"""Send all kinds of request to two servers, and say which kinds were answered differently."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from freedraft.compare.servers import Answer, Request, Server

KINDS = Path(__file__).with_name("kinds.yaml")
SAME, DIFFERS, ONE = "same", "differs", "refused by one"
BOTH, ITSELF = "refused by both", "plain differs from itself"
# Of one answer, not of its request: names, times, counts of caches and of drafts.
OWN = re.compile(r"id|rid|created|model|system_fingerprint|metrics|sglext|.*(cached|spec_|time|latency|_ts\b).*")


@dataclass(frozen=True)
class Kind:
    """A kind of request: requests in turn, or together. engine: the one that has it, None for both."""

    name: str
    requests: list[Request]
    together: bool
    engine: str | None


@dataclass
class Row:
    """What a kind showed.

    Attributes:
        plain: the plain server's first answer in short.
        accepted: draft tokens accepted while it was asked.
        difference: the first one, None if there is none.
    """

    kind: str
    outcome: str
    plain: str
    accepted: int
    difference: str | None = None


@dataclass
class Comparison:
    """Outcomes of kinds on two servers; `about` says what they have in common."""

    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def different(self) -> list[str]:
        return [row.kind for row in self.rows if row.outcome in (DIFFERS, ONE)]

    @property
    def accepted(self) -> int:
        return sum(row.accepted for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"outcomes": Counter(row.outcome for row in self.rows), "accepted": self.accepted}


def load(names: Mapping[str, Any]) -> list[Kind]:
    """The kinds of the package's file, with `names` in place of words with $."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {filled(key): filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return names[value[1:]] if isinstance(value, str) and value.startswith("$") else value

    def request(send: dict[str, Any], at: str = "completions", **more: Any) -> Request:
        whole = filled(told["defaults"][at] | send)
        if at == "generate":
            whole["sampling_params"] = told["defaults"][at]["sampling_params"] | whole["sampling_params"]
        return Request(at, whole, **more)

    def kind(kind: str, engine: str | None = None, times: int = 1, **given: Any) -> Kind:
        together = given.pop("together", [])
        each = together or given.pop("in_turn", None) or [given]
        return Kind(kind, [request(**{"send": {}} | one) for one in each] * times, bool(together), engine)

    told = yaml.safe_load(KINDS.read_text(encoding="utf-8"))
    return [kind(**given) for given in told["kinds"]]


def names_of(server: Server) -> dict[str, Any]:
    """What the words with $ stand for, by the server's answer to the default prompt."""
    nothing = dict.fromkeys([*(f"id{i}" for i in range(16)), "ids", "page", *(f"room{n}" for n in (0, 1, 5, 24, 64))])
    first = load(nothing)[0].requests[0]
    answer = server.ask(first)
    asked = server.client.post("/tokenize", json={"model": server.model, "prompt": first.send["prompt"]})
    if answer.refused or asked.status_code != 200:
        raise ValueError(f"{server.url} refuses a plain completion, or /tokenize: {answer.body or asked.text}")
    ids, prompt = answer.body["choices"][0]["token_ids"], asked.json()["tokens"]
    text = (prompt * math.ceil(server.room / len(prompt)))[: server.room]
    rooms = {name: text[int(name[4:]) :] for name in nothing if name.startswith("room")}
    return {f"id{i}": ids[i % len(ids)] for i in range(16)} | {"ids": sorted({*ids}), "page": text[:129]} | rooms


def compare(
    plain: Server, drafting: Server, only: str = "", tolerance: float = 1e-3, show: Callable[[Row], None] = lambda _: None
) -> Comparison:
    """Ask both servers twice in turns. Requests to which plain's two answers differ are not compared.

    Args:
        only: a regular expression; kinds with it in their names.
        tolerance: by how much logprobs may differ.
        show: called with each row.

    Raises:
        ValueError: the servers do not serve the same; one line.
    """
    common = plain.about.keys() & drafting.about.keys()
    if unlike := [f"{n} {plain.about[n]} and {drafting.about[n]}" for n in plain.about if n in common and plain.about[n] != drafting.about[n]]:
        raise ValueError(f"the servers cannot be compared: {', '.join(unlike)}")
    if plain.drafts or not drafting.drafts:
        raise ValueError(f"{plain.url if plain.drafts else drafting.url} {'drafts' if plain.drafts else 'does not draft'}: name the plain server first, the drafting one second")
    kinds = [kind for kind in load(names_of(plain)) if kind.engine in (None, plain.engine) and re.search(only, kind.name)]
    if not kinds:
        raise ValueError(f"no kind of request has '{only}' in its name")
    done = Comparison({"plain": plain.about, "drafting": drafting.about, "tolerance": tolerance})
    for kind in kinds:
        done.rows.append(_row(kind, plain, drafting, tolerance))
        show(done.rows[-1])
    return done


def _row(kind: Kind, plain: Server, drafting: Server, tolerance: float) -> Row:
    before = drafting.accepted([])
    first, drafted, again, drafted_again = (_ask(server, kind) for server in (plain, drafting) * 2)
    accepted = drafting.accepted(drafted + drafted_again) - before
    steady = [next(differences(a, b, tolerance), None) is None for a, b in zip(first, again, strict=True)]
    found, refused = None, False
    for i, answers in enumerate(zip(first, drafted, drafted_again, strict=True)):
        for answer in answers[1:] if steady[i] else ():
            difference = next(differences(answers[0], answer, tolerance), None)
            if difference and not found:
                found, refused = f"request {i + 1}{difference}", answers[0].refused != answer.refused
    outcome = (ONE if refused else DIFFERS) if found else ITSELF if not all(steady) else SAME
    if outcome == SAME and all(answer.refused for answer in first):
        outcome = BOTH
    return Row(kind.name, outcome, _short(first[0]), accepted, found)


def _ask(server: Server, kind: Kind) -> list[Answer]:
    with ThreadPoolExecutor(len(kind.requests) if kind.together else 1) as pool:
        return list(pool.map(server.ask, kind.requests))


def differences(a: Any, b: Any, tolerance: float, at: str = "") -> Iterator[str]:
    """Where two answers differ, and how; refusals differ by their status only, and never are alike without one."""
    if isinstance(a, Answer):
        if a.status != b.status or not isinstance(a.status, int):
            yield f": {_short(a)} and {_short(b)}"
        elif not a.refused:
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
    elif isinstance(a, float) and isinstance(b, float):
        if not math.isclose(a, b, rel_tol=0, abs_tol=tolerance):
            yield f"{at}: {a:.5g} and {b:.5g}"
    elif a != b:
        yield f"{at}: {a!r:.200} and {b!r:.200}"


def _short(answer: Answer) -> str:
    """The first text in an answer; of a refusal its status."""
    if answer.refused or not isinstance(answer.body, dict | list):
        return str(answer.status if answer.refused else answer.body)
    body = answer.body[0] if isinstance(answer.body, list) else answer.body
    choices = body.get("choices", body)
    choice = choices[0] if 0 in choices or isinstance(choices, list) else choices
    message = choice.get("message") or choice.get("delta") or choice
    text = next((message[name] for name in ("tool_calls", "content", "text", "reasoning", "reasoning_content") if message.get(name)), "")
    return " ".join(str(text).split())[:60]
