"""The engines' adapters, without an engine: what a finished request wrote, and whose it is, reaches the store."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from freedraft.engines.sglang.source import DraftStep, SourceContext

from freedraft.engines.vllm.tenants import SALT, _from_request
from sssd_plugin.options import SssdOptions
from sssd_plugin.sglang import SssdSource

VOCAB = 200


def source(**options: Any) -> SssdSource:
    context = SourceContext(VOCAB, 8, 4, (1, 8), None, None)
    return SssdSource(context, SssdOptions(policy="fixed", live=True, **options))


def serve(source: SssdSource, name: str, prompt: list[int], output: list[int], key: str | None = None) -> list[int]:
    """Run a request to its end; the tokens drafted behind its prompt."""
    source.begin(name, np.array(prompt, np.int32))
    source.belongs(name, key)
    drafted: list[int] = []
    for number, token in enumerate(output):
        step = DraftStep([name], np.array([token], np.int32), np.array([0, 1]), None)
        tree = source.draft(step, 8)
        if number == 0:
            drafted = tree.tokens[0, 1 : tree.counts[0]].tolist()
    source.finish([name])
    return drafted


@pytest.mark.parametrize("prompts", [False, True])
def test_sglang_learns_from_finished_requests(prompts: bool) -> None:
    one = source(live_prompts=prompts)
    assert serve(one, "a", [1, 2, 3, 150], [10, 11, 12, 13, 14]) == []
    assert serve(one, "b", [5, 6], [10, 11, 12])[:3] == [11, 12, 13]
    seen = serve(one, "c", [9, 1, 2], [3])
    assert (150 in seen) == prompts
    one.close()


def test_sglang_keeps_keys_apart() -> None:
    one = source()
    serve(one, "a", [1, 2], [10, 11, 12, 13], key="x")
    assert serve(one, "b", [3, 4], [10, 11], key="y") == []
    assert serve(one, "c", [3, 4], [10, 11]) == []
    assert serve(one, "d", [3, 4], [10, 11], key="x")[:2] == [11, 12]
    one.close()


def test_a_retracted_request_is_learnt_from_once(tmp_path: Path) -> None:
    one = source(datastore=tmp_path)
    one.begin("a", np.array([1, 2], np.int32))
    step = DraftStep(["a"], np.array([10, 11], np.int32), np.array([0, 2]), None)
    one.draft(step, 8)
    one.begin("a", np.array([1, 2, 10, 11], np.int32))  # prompt, and output so far
    one.draft(DraftStep(["a"], np.array([12], np.int32), np.array([0, 1]), None), 8)
    one.finish(["a", "unknown"])
    one.finish(["a"])
    assert one.live is not None and one.live.stats().inserted == 3
    one.close()
    again = source(datastore=tmp_path)
    assert serve(again, "b", [3], [10, 11])[:2] == [11, 12], "on disk, in a folder that began empty"
    again.close()


def test_vllm_carries_the_salt_of_new_requests() -> None:
    wrapped = _from_request(lambda request, blocks: types.SimpleNamespace(req_id=request.request_id))
    salted = wrapped(types.SimpleNamespace(request_id="a", cache_salt="s"), ([1],))
    plain = wrapped(types.SimpleNamespace(request_id="b", cache_salt=None), ([1],))
    assert getattr(salted, SALT) == "s" and not hasattr(plain, SALT)


def test_of_sglangs_replicas_one_writes(tmp_path: Path) -> None:
    one, other = source(datastore=tmp_path), source(datastore=tmp_path)
    serve(one, "a", [1, 2], [10, 11, 12])
    assert serve(other, "a", [1, 2], [20, 21, 22]) == []
    assert serve(other, "b", [3, 4], [20, 21])[:1] == [21], "the other learns in memory"
    one.close(), other.close()
    again = source(datastore=tmp_path)
    assert serve(again, "c", [5], [20, 21]) == [] and serve(again, "d", [5], [10, 11])[:1] == [11]
    again.close()
