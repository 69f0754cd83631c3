"""Answers that are being written: who drafts from them, and until when."""

from typing import Any

import numpy as np
import pytest

from freedraft.step import EngineContext
from sssd_plugin.datastore.records import Erasure
from sssd_plugin.method import SssdMethod
from sssd_plugin.options import SssdOptions
from sssd_plugin.running import EACH, LEADING, LEAST, MOST
from tests.support.steps import make_step
from tests.support.stores import int32

VOCAB, NODES = 1000, 9
RANDOM = np.random.default_rng(0)
PROMPT, ANSWER, OTHER = (RANDOM.choice(VOCAB, size, replace=False).tolist() for size in (40, 2 * LEAST, 60))
X, Y = '["x", ""]', '["y", ""]'


def make(**options: Any) -> SssdMethod:
    context = EngineContext(vocab_size=VOCAB, max_draft_tokens=NODES - 1, widths=(1, NODES))
    return SssdMethod(SssdOptions(**({"policy": "fixed"} | options)), context)


def begin(method: SssdMethod, name: str, prompt: list[int], tenant: str | None = X, **extra: Any) -> None:
    method.begin(name, int32(prompt), tenant, extra)


def write(method: SssdMethod, name: str, prompt: list[int], answer: list[int]) -> None:
    """The request gains all of an answer, some tokens per step."""
    for i in range(0, len(answer), 4):
        method.draft(make_step([name], [answer[i : i + 4]], capacities=NODES - 1, texts=[prompt + answer[: i + 4]]))
    assert method.live is None or method.live.runs.settle()


def drafted(method: SssdMethod, tenant: str | None, prompt: list[int], gained: list[int], **extra: Any) -> list[int]:
    """What a new request is drafted behind these tokens."""
    begin(method, "asks", prompt, tenant, **extra)
    draft = method.draft(make_step(["asks"], [gained], capacities=NODES - 1, texts=[prompt + gained]))
    found = draft.tokens[0, 1 : draft.counts[0]].tolist()
    method._begun.pop("asks")  # not to be learnt from
    method.drafter.finish(["asks"])
    return found


@pytest.fixture
def method():
    made = make()
    yield made
    made.close()


def run_two(method: SssdMethod, tenant: str | None = X) -> None:
    """Of a tenant, one of which writes ANSWER."""
    begin(method, "one", PROMPT, tenant)
    begin(method, "two", OTHER, tenant)
    write(method, "one", PROMPT, ANSWER)


def test_an_answer_is_drafted_from_while_it_is_written(method):
    run_two(method)
    assert drafted(method, X, OTHER, ANSWER[5:8])[:4] == ANSWER[8:12]
    assert drafted(method, X, OTHER[:20] + PROMPT[-LEADING:], ANSWER[:1])[:4] == ANSWER[1:5], "its prompt leads to it"
    assert not {*drafted(method, X, OTHER, PROMPT[:3])} & {*PROMPT[3 : -LEADING - 1]}, "and is not shown"
    assert method.live.stats().documents == 0 == method.live.stats().tokens
    begin(method, "one", PROMPT + ANSWER, X)  # preempted
    write(method, "two", OTHER, OTHER[::-1] * 2)
    assert drafted(method, X, OTHER[:30], ANSWER[5:8])[:4] == ANSWER[8:12]
    method.finish("one", int32(ANSWER))
    assert method.live.stats().documents == 1
    method.finish("two", int32(OTHER[::-1] * 2))
    write(method, "two", OTHER, OTHER)  # a request that ends with the engine's last word on it
    assert drafted(method, X, OTHER[:30], ANSWER[5:8])[:4] == ANSWER[8:12], "learnt"


@pytest.mark.parametrize(
    "options, writes, asks",
    [({}, X, Y), ({}, X, None), ({}, None, X), ({"isolation": "strict"}, None, None), ({"live": "off"}, X, X)],
    ids=str,
)
def test_no_other_tenant_is_drafted_for_from_it(options, writes, asks):
    method = make(**options)
    run_two(method, writes)
    assert drafted(method, asks, OTHER, ANSWER[5:8]) == []
    method.close()


def test_all_share_where_nothing_is_kept_apart():
    method = make(isolation="shared")
    run_two(method, X)
    assert drafted(method, Y, OTHER, ANSWER[5:8])[:4] == ANSWER[8:12]
    method.close()


def test_a_request_alone_is_not_shown(method):
    begin(method, "one", PROMPT)
    write(method, "one", PROMPT, ANSWER)
    assert method.live.runs.tenants.keys() == {0}


def test_what_is_erased_or_not_learnt_is_shown_no_longer(method, monkeypatch):
    runs, submitted = method.live.runs, []
    run_two(method)
    method.live.erase(Erasure())
    assert drafted(method, X, OTHER, ANSWER[5:8]) == []
    with monkeypatch.context() as patched:
        patched.setattr(runs, "_submit", lambda task, **_: submitted.append(task))
        write(method, "one", PROMPT + ANSWER, ANSWER)
        assert submitted
    method.live.erase(Erasure())  # while they are being sorted
    for task in submitted:
        task()
    assert drafted(method, X, OTHER, ANSWER[5:8]) == []
    write(method, "one", PROMPT + ANSWER * 2, ANSWER)
    assert drafted(method, X, OTHER, ANSWER[5:8])[:4] == ANSWER[8:12]
    method.finish("one", int32([]))  # nobody knows what its client got
    assert drafted(method, X, OTHER, ANSWER[5:8]) == []


@pytest.mark.parametrize("odd", [VOCAB, -7], ids=["no token", "an image"])
def test_answers_that_are_not_only_text_are_not_shown(method, odd):
    begin(method, "two", OTHER)
    begin(method, "one", PROMPT)
    write(method, "one", PROMPT, [*ANSWER[:99], odd, *ANSWER[100:]])
    assert drafted(method, X, OTHER, ANSWER[5:8]) == []
    assert not method.live.runs._failed


def test_at_most_so_many_tokens_are_shown(method):
    begin(method, "two", OTHER)
    begin(method, "one", PROMPT)
    begin(method, "one", whole := PROMPT + RANDOM.integers(0, VOCAB, 2 * MOST).tolist())  # preempted after that many
    write(method, "one", whole, ANSWER)
    (tenant,) = (tenant for tenant in method.live.runs.tenants.values() if tenant.running)
    assert tenant.running.n == MOST // 2 + LEADING + 2, "separators among them"


def test_tenants_are_shown_and_forgotten_each_by_itself(method):
    """The others are many, and end, while one that has ended otherwise hides its own."""
    for i in range(20):
        for name in "ab":
            begin(method, f"{name}{i}", [*PROMPT, i], f'["{i}", ""]')
    runs, long = method.live.runs, RANDOM.integers(0, VOCAB, 500).tolist()
    for i in range(19):
        write(method, f"a{i}", [*PROMPT, i], long)
    assert sum(tenant.running is not None for tenant in runs.tenants.values()) == 20
    write(method, "a19", [*PROMPT, 19], ANSWER)
    write(method, "b19", [*PROMPT, 19], OTHER[: LEAST + EACH * 40])
    assert drafted(method, '["19", ""]', OTHER, ANSWER[5:8])[:4] == ANSWER[8:12], "however much the others wrote"
    method.finish("a19", int32([]))
    for i in range(19):
        for name in "ab":
            method.finish(f"{name}{i}", int32([]))
    write(method, "b19", [*PROMPT, 19, *OTHER], [*range(600, 600 + 2 * LEAST)])
    assert [tenant for tenant in runs.tenants.values() if tenant.running] == [] and not method._running._shown


def test_an_id_that_comes_again_of_another_tenant_has_nothing_of_the_one_before(method):
    begin(method, "asks", PROMPT, X, prediction=ANSWER)
    assert drafted(method, Y, PROMPT, ANSWER[:5]) == []
    begin(method, "asks", PROMPT, X, prediction=ANSWER)
    begin(method, "asks", PROMPT + ANSWER[:3], X, prediction=ANSWER)  # preempted
    method.finish("asks", int32(ANSWER[:9]))
    assert method.live.stats().inserted == LEADING + 9
