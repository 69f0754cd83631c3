"""What a finished request wrote, and whose it is, reaches the store: the method, without an engine."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freedraft.engines.vllm.tenants import SALT, _from_request
from freedraft.method import EngineContext, Step
from sssd_plugin.method import SssdMethod
from sssd_plugin.options import SssdOptions

VOCAB, NODES = 200, 8


def method(**options: Any) -> SssdMethod:
    context = EngineContext(vocab_size=VOCAB, max_draft_tokens=NODES - 1, widths=(1, NODES))
    return SssdMethod(SssdOptions(policy="fixed", live=True, **options), context)


def draft(method: SssdMethod, name: str, text: list[int], gained: list[int]) -> list[int]:
    """The tokens drafted for a request behind `text`, whose end it has just gained."""
    step = Step(
        request_ids=[name],
        tokens=np.array(gained, np.int32),
        starts=np.zeros(1, np.int64),
        ends=np.array([len(gained)]),
        contexts=np.array([len(text)], np.int32),
        capacities=np.array([NODES - 1], np.int32),
        drafted=np.zeros(1, np.int32),
        widths=np.array([1, NODES], np.int32),
        previous=None,
        history=lambda b: np.array(text, np.int32),
    )
    tree = method.draft(step)
    return tree.tokens[0, 1 : tree.counts[0]].tolist()


def serve(method: SssdMethod, name: str, prompt: list[int], output: list[int], key: str | None = None) -> list[int]:
    """Run a request to its end; the tokens drafted behind its prompt and first token."""
    method.begin(name, np.array(prompt, np.int32), key, {})
    drafted = [draft(method, name, prompt + output[: i + 1], output[i : i + 1]) for i in range(len(output))]
    method.finish(name, np.array(output, np.int32), aborted=False)
    return drafted[0]


@pytest.mark.parametrize("prompts", [False, True])
def test_it_learns_from_finished_requests(prompts: bool) -> None:
    one = method(live_prompts=prompts)
    assert serve(one, "a", [1, 2, 3, 150], [10, 11, 12, 13, 14]) == []
    assert serve(one, "b", [5, 6], [10, 11, 12])[:3] == [11, 12, 13]
    seen = serve(one, "c", [9, 1, 2], [3])
    assert (150 in seen) == prompts
    one.close()


def test_it_keeps_tenants_apart() -> None:
    one = method()
    serve(one, "a", [1, 2], [10, 11, 12, 13], key="x")
    assert serve(one, "b", [3, 4], [10, 11], key="y") == []
    assert serve(one, "c", [3, 4], [10, 11]) == []
    assert serve(one, "d", [3, 4], [10, 11], key="x")[:2] == [11, 12]
    one.close()


def test_a_retracted_request_is_learnt_from_once(tmp_path: Path) -> None:
    one = method(datastore=tmp_path)
    one.begin("a", np.array([1, 2], np.int32), None, {})
    draft(one, "a", [1, 2, 10, 11], [10, 11])
    one.begin("a", np.array([1, 2, 10, 11], np.int32), None, {})  # prompt, and output so far
    draft(one, "a", [1, 2, 10, 11, 12], [12])
    one.finish("a", None, aborted=True)  # the engine does not say what it wrote
    one.finish("unknown", None, aborted=False)
    one.finish("a", None, aborted=False)
    assert one.live is not None and one.live.stats().inserted == 3
    one.close()
    again = method(datastore=tmp_path)
    assert serve(again, "b", [3], [10, 11])[:2] == [11, 12], "on disk, in a folder that began empty"
    again.close()


def test_vllm_carries_the_salt_of_new_requests() -> None:
    wrapped = _from_request(lambda request, blocks: types.SimpleNamespace(req_id=request.request_id))
    salted = wrapped(types.SimpleNamespace(request_id="a", cache_salt="s"), ([1],))
    plain = wrapped(types.SimpleNamespace(request_id="b", cache_salt=None), ([1],))
    assert getattr(salted, SALT) == "s" and not hasattr(plain, SALT)


def test_of_replicas_one_writes(tmp_path: Path) -> None:
    one, other = method(datastore=tmp_path), method(datastore=tmp_path)
    serve(one, "a", [1, 2], [10, 11, 12])
    assert serve(other, "a", [1, 2], [20, 21, 22]) == []
    assert serve(other, "b", [3, 4], [20, 21])[:1] == [21], "the other learns in memory"
    one.close(), other.close()
    again = method(datastore=tmp_path)
    assert serve(again, "c", [5], [20, 21]) == [] and serve(again, "d", [5], [10, 11])[:1] == [11]
    again.close()
