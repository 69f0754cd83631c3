"""Both drafters in one engine: the same tokens, each request drafted for by the one that pays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import MIXED as PROMPTS
from vllm_cases import metric, parameters, tokens_of
from vllm_engines import engine, failures, runner_of, settle

from layerskip_plugin.skip_set import SkipSet

TOKENS = 32
K = 5


@pytest.fixture(scope="module")
def skip_set(demo_fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "some.json"
    SkipSet(30, frozenset({7, 12, 20, 29}), frozenset({5, 12, 24}), demo_fingerprint).save(path)
    return path


@pytest.fixture(scope="module")
def config(skip_set: Path) -> dict[str, Any]:
    return {"method": "freedraft", "num_speculative_tokens": K, "skip_set": str(skip_set), "hardware": "cpu"}


@pytest.fixture(scope="module")
def plain(plain_demo: dict[str, list[list[int]]]) -> list[list[int]]:
    return [tokens[:TOKENS] for tokens in plain_demo["mixed"]]


@pytest.fixture(scope="module")
def llm(plain: list, demo_model: Path, config: dict[str, Any]) -> Iterator[Any]:
    with engine(demo_model, max_model_len=512, max_num_seqs=8, speculative_config=config) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_failed_or_leaked(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        made = request.getfixturevalue("llm")
        settle(made)
        proposer = runner_of(made).drafter
        method = proposer.guarded.method
        assert not failures(proposer) and not proposer.guarded.running
        assert not method._by_model and not len(method.host.drafter) and not method.model.selection.requests


def generate(llm: Any, prompts: list[str]) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, parameters(TOKENS), use_tqdm=False))


@pytest.mark.parametrize("batch", [1, 4])
def test_any_choice_leaves_the_output_alone(llm: Any, plain: list, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coins, chosen = np.random.default_rng(batch), list[int]()
    method = runner_of(llm).drafter.guarded.method
    paying = method._rows_of_passes

    def any_of(step: Any, draft: Any) -> Any:
        _, rest = paying(step, draft)
        rows = np.flatnonzero((method.model.capacities(step) > 0) & (coins.random(step.batch_size) < 0.5))
        chosen.append(len(rows) if method.model.begin_round(pays=True) else 0)
        return rows[: chosen[-1]], rest

    monkeypatch.setattr(method, "_rows_of_passes", any_of)
    parts = method.host, method.model
    before = [metrics_of(part) for part in parts]
    drafted = metric(llm, "vllm:spec_decode_num_draft_tokens")
    for start in range(0, len(PROMPTS), batch):
        assert generate(llm, PROMPTS[start : start + batch]) == plain[start : start + batch]
    assert 0 < np.count_nonzero(chosen) < len(chosen)
    counts = np.array([metrics_of(part) for part in parts]) - before
    # Each drafter counts its own, and no draft token is nobody's.
    assert (counts[:, 0] > 0).all() and (counts[:, 1] > 0).all()
    assert counts[:, 0].sum() <= metric(llm, "vllm:spec_decode_num_draft_tokens") - drafted


def metrics_of(part: Any) -> tuple[float, float]:
    """(drafted, accepted) of one drafter."""
    metrics = part.metrics
    return metrics.drafted._value.get(), metrics.accepted._value.get()
