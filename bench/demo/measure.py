"""The demo's client, its measurement and its figures."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from bench.lib import servers
from bench.lib.prompts import PROMPTS, WARM_UP

BASELINE, SSSD = "plain", "sssd"
SESSION = Path(__file__).with_name("agent_session.json")
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class Answer(NamedTuple):
    """One completion: its token ids, seconds until it is complete, and the model's forward passes, prefill included."""

    tokens: tuple[int, ...]
    seconds: float
    steps: int


Messages = list[dict[str, str]]  # each of "role" and "content"


@dataclass
class Prompt:
    """One request, and its answers by server, one of each round."""

    kind: str
    messages: Messages
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {BASELINE: [], SSSD: []})


def prompts() -> list[Prompt]:
    """Return the prompts of `bench/lib/prompts.json` and the turns of a coding agent's session, their kinds in turns.
    The model answers each of the session's user messages; the answers to those before are written down."""
    of_kind = {kind: [as_chat(text) for text in texts] for kind, texts in PROMPTS.items()}
    session: Messages = json.loads(SESSION.read_text(encoding="utf-8"))
    of_kind["agent session"] = [session[:i] for i, said in enumerate(session, 1) if said["role"] == "user"]
    rounds = zip_longest(*of_kind.values())
    return [Prompt(kind, asked) for each in rounds for kind, asked in zip(of_kind, each, strict=True) if asked]


def as_chat(text: str) -> Messages:
    return [{"role": "user", "content": text}]


class Client:
    """Sends greedy requests to one server."""

    def __init__(self, engine: str, server: servers.Server, max_tokens: int) -> None:
        self.engine, self.server, self.max_tokens = engine, server, max_tokens
        self.openai = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)
        self.extra = {"return_token_ids": True} | ({"return_meta_info": True} if engine == "sglang" else {})

    def ask(self, messages: Messages, tenant: str | None = None, max_tokens: int | None = None) -> Answer:
        """Send a request as `tenant`, which shares no drafts and no cached prefixes with others; None sends no salt."""
        accepted = self._accepted()
        start, extra = time.perf_counter(), self.extra | ({"cache_salt": tenant} if tenant else {})
        create: Any = self.openai.chat.completions.create  # its message types are one class per role
        answer = create(
            model=servers.MODEL_NAME, messages=messages, temperature=0.0,
            max_tokens=max_tokens or self.max_tokens, extra_body=extra,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        choice: Any = answer.choices[0]
        if self.engine == "vllm":
            tokens = tuple(choice.token_ids)
            return Answer(tokens, seconds, len(tokens) - (self._accepted() - accepted))
        tokens = tuple(choice.response_token_ids)
        verified = (choice.meta_info or {}).get("spec_verify_ct")
        return Answer(tokens, seconds, verified + 1 if verified else len(tokens))

    def _accepted(self) -> int:
        """Return vLLM's count of accepted draft tokens so far; each saved a step."""
        if self.engine != "vllm":
            return 0
        families = text_string_to_metric_families(self.server.get("/metrics"))
        samples = (sample for family in families if family.name == ACCEPTED for sample in family.samples)
        return round(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def measure(clients: dict[str, Client], prompts: Sequence[Prompt], ends: float) -> Iterator[Prompt]:
    """Send the prompts to both servers, round after round, until `time.monotonic` has reached `ends` and every kind is
    measured; yield the prompt after each. Each round is a tenant of its own, so that it costs as much as the first:
    nothing is cached or drafted from earlier rounds."""
    for client in clients.values():  # warms up numba, thread pools, caches
        for messages in (as_chat(WARM_UP), prompts[0].messages, as_chat(WARM_UP)):
            client.ask(messages, "warm-up", 16)
    kinds = {prompt.kind for prompt in prompts}
    for number in count():
        for i, prompt in enumerate(prompts):
            if time.monotonic() >= ends and not kinds:
                return
            for name in (BASELINE, SSSD) if (number + i) % 2 == 0 else (SSSD, BASELINE):
                prompt.answers[name].append(clients[name].ask(prompt.messages, f"round {number}"))
            kinds.discard(prompt.kind)
            yield prompt


def row(kind: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return one line of the table: medians over whole rounds of the throughput over the prompts asked so far, and of
    the ratio of both servers within a round; the range of the ratio if there are several rounds."""
    prompts = [p for p in prompts if p.answers[BASELINE] and p.answers[SSSD]]
    whole = min(len(answers) for p in prompts for answers in p.answers.values())
    rates = {
        server: [
            sum(len(p.answers[server][i].tokens) for p in prompts) / sum(p.answers[server][i].seconds for p in prompts)
            for i in range(whole)
        ]
        for server in (BASELINE, SSSD)
    }
    ratios = [b / a for a, b in zip(rates[BASELINE], rates[SSSD], strict=True)]
    last = [p.answers[SSSD][whole - 1] for p in prompts]
    found = {"tokens_per_step": sum(len(a.tokens) for a in last) / sum(a.steps for a in last)}
    found |= {"plain_tps": median(rates[BASELINE]), "sssd_tps": median(rates[SSSD]), "ratio": median(ratios)}
    found |= {"ratio_min": min(ratios), "ratio_max": max(ratios)} if whole > 1 else {}
    same = all(len({a.tokens for answers in p.answers.values() for a in answers}) == 1 for p in prompts)
    return {"kind": kind} | {name: round(value, 3) for name, value in found.items()} | {"identical": same}


def rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Return the line of every kind that was measured."""
    kinds = dict.fromkeys(p.kind for p in prompts if p.answers[BASELINE] and p.answers[SSSD])
    return [row(kind, [p for p in prompts if p.kind == kind]) for kind in kinds]
