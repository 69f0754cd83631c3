"""The demo's client, its measurement and its figures."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
    """One request, or those of a session, each with all messages before it; and all answers, by server. The answers of
    a session count as one."""

    kind: str
    requests: list[Messages]
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {BASELINE: [], SSSD: []})


def prompts() -> list[Prompt]:
    """Return the prompts of `bench/lib/prompts.json`, their kinds in turns, and after the first of each kind a coding
    agent's session. The model answers each of its user's messages; the answers to those before are written down."""
    of_kind = {kind: [[as_chat(text)] for text in texts] for kind, texts in PROMPTS.items()}
    session: Messages = json.loads(SESSION.read_text(encoding="utf-8"))
    ends = [i for i, message in enumerate(session, 1) if message["role"] == "user"]
    of_kind["agent session"] = [[session[:end] for end in ends]]
    rounds = max(map(len, of_kind.values()))
    return [Prompt(kind, each) for i in range(rounds) for kind, all_of in of_kind.items() for each in all_of[i : i + 1]]


def as_chat(text: str) -> Messages:
    return [{"role": "user", "content": text}]


class Client:
    """Sends greedy requests to one server."""

    def __init__(self, engine: str, server: servers.Server, max_tokens: int) -> None:
        self.engine, self.server, self.max_tokens = engine, server, max_tokens
        self.openai = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)
        self.extra = {"return_token_ids": True} | ({"return_meta_info": True} if engine == "sglang" else {})

    def converse(self, requests: Sequence[Messages], tenant: str) -> Answer:
        answers = [self.ask(messages, tenant) for messages in requests]
        tokens = tuple(chain.from_iterable(answer.tokens for answer in answers))
        return Answer(tokens, sum(answer.seconds for answer in answers), sum(answer.steps for answer in answers))

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


def measure(clients: dict[str, Client], prompts: Sequence[Prompt], repeats: int) -> Iterator[Prompt]:
    """Send every prompt to both servers `repeats` times, in turns; yield the prompt after each. Each repeat is a tenant
    of its own, so that it costs as much as the first: nothing is cached or drafted from earlier repeats."""
    for client in clients.values():  # warms up numba, thread pools, caches
        for messages in (as_chat(WARM_UP), prompts[0].requests[0], as_chat(WARM_UP)):
            client.ask(messages, "warm-up", 32)
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for name in (BASELINE, SSSD) if (repeat + i) % 2 == 0 else (SSSD, BASELINE):
                prompt.answers[name].append(clients[name].converse(prompt.requests, f"repeat {repeat}"))
            yield prompt


def row(kind: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return one line of the table: medians over repeats of the throughput over all prompts, and of the ratio of both
    servers within a repeat."""
    rates = {
        server: [
            sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)
            for answers in zip(*(p.answers[server] for p in prompts), strict=True)
        ]
        for server in (BASELINE, SSSD)
    }
    ratios = [b / a for a, b in zip(rates[BASELINE], rates[SSSD], strict=True)]
    last = [p.answers[SSSD][-1] for p in prompts]
    found = {"plain_tps": median(rates[BASELINE]), "sssd_tps": median(rates[SSSD]), "ratio": median(ratios)}
    found |= {"ratio_min": min(ratios), "ratio_max": max(ratios)}
    found["tokens_per_step"] = sum(len(a.tokens) for a in last) / sum(a.steps for a in last)
    same = all(len({a.tokens for answers in p.answers.values() for a in answers}) == 1 for p in prompts)
    return {"kind": kind} | {name: round(value, 3) for name, value in found.items()} | {"identical": same}
