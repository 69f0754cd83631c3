"""Both drafters in one engine: the same tokens, each request drafted for by the one that pays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import MIXED as PROMPTS
from vllm_cases import metric, parameters, tokens_of
from vllm_engines import engine, failures, runner_of, settle

from freedraft.hybrid import method as hybrid
from freedraft.hybrid.choice import Choice
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
        assert not method._by_model and not len(method.host.drafter) and not len(method.model.selector)


def method_of(llm: Any) -> hybrid.HybridMethod:
    return runner_of(llm).drafter.guarded.method


def generate(llm: Any, prompts: list[str], salt: str | None = None) -> list[list[int]]:
    given: list[Any] = [{"prompt": prompt, "cache_salt": salt} for prompt in prompts] if salt else prompts
    return tokens_of(llm.generate(given, parameters(TOKENS), use_tqdm=False))


@contextmanager
def chosen_by(monkeypatch: pytest.MonkeyPatch, llm: Any, choose: Any) -> Iterator[list[Choice]]:
    """Let `choose` decide which requests get draft passes; gives what was decided."""
    made: list[Choice] = []
    method = method_of(llm)

    def noted(*args: Any, **kwargs: Any) -> Choice:
        made.append(choose(*args, **kwargs))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(hybrid, "choose", noted)
        patch.setattr(method, "_passes_may_pay", lambda batch, max_len: True)
        yield made


@pytest.mark.parametrize("batch", [1, 4])
def test_any_choice_leaves_the_output_alone(llm: Any, plain: list, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coins = np.random.default_rng(batch)

    def any_of(p: Any, kept: Any, order: Any, *rest: Any) -> Choice:
        rows = order[coins.random(len(order)) < 0.5]
        return Choice(rows, int(coins.integers(1, K + 1)), 100.0)

    parts = method_of(llm).host, method_of(llm).model
    before = [metrics_of(part) for part in parts]
    drafted = metric(llm, "vllm:spec_decode_num_draft_tokens")
    with chosen_by(monkeypatch, llm, any_of) as made:
        for start in range(0, len(PROMPTS), batch):
            assert generate(llm, PROMPTS[start : start + batch]) == plain[start : start + batch]
    assert any(len(choice.rows) for choice in made) and not all(len(choice.rows) for choice in made)
    counts = np.array([metrics_of(part) for part in parts]) - before
    # Each drafter counts its own, and no draft token is nobody's.
    assert (counts[:, 0] > 0).all() and (counts[:, 1] > 0).all()
    assert counts[:, 0].sum() <= metric(llm, "vllm:spec_decode_num_draft_tokens") - drafted


def metrics_of(part: Any) -> tuple[float, float]:
    """(drafted, accepted) of one drafter."""
    metrics = part.metrics
    return metrics.drafted._value.get(), metrics.accepted._value.get()
