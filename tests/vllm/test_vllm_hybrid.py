"""Both drafters in one engine: the same tokens, each request drafted for by the one that pays."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_cases import MAX_MODEL_LEN, MIXED, greedily, metric
from vllm_engines import engine, runner_of

from layerskip_plugin.skip_set import SkipSet


@pytest.fixture(scope="module")
def llm(plain_demo, demo_model, demo_fingerprint, tmp_path_factory):
    path = tmp_path_factory.mktemp("sets") / "some.json"
    SkipSet(30, frozenset({7, 12, 20, 29}), frozenset({5, 12, 24}), demo_fingerprint).save(path)
    config = {"method": "hybrid", "num_speculative_tokens": 5, "skip_set": str(path), "hardware": "cpu"}
    with engine(demo_model, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, speculative_config=config) as made:
        yield made


@pytest.mark.parametrize("batch", [1, 4])
def test_any_choice_leaves_the_output_alone(llm, plain_demo, batch, monkeypatch):
    coins, chosen = np.random.default_rng(batch), list[int]()
    method = runner_of(llm).drafter.guarded.method
    paying = method._rows_of_passes

    def any_of(step, draft):
        _, rest = paying(step, draft)
        rows = np.flatnonzero((method.passes.capacities(step) > 0) & (coins.random(step.batch_size) < 0.5))
        chosen.append(len(rows) if method.passes.begin_round(pays=True) else 0)
        return rows[: chosen[-1]], rest

    def counts():
        """[2, 2], what each part has drafted, and of that accepted."""
        metrics = [part.metrics for part in (method.ngrams, method.passes)]
        return np.array([[each.drafted._value.get(), each.accepted._value.get()] for each in metrics])

    monkeypatch.setattr(method, "_rows_of_passes", any_of)
    before, drafted = counts(), metric(llm, "vllm:spec_decode_num_draft_tokens")
    for start in range(0, len(MIXED), batch):
        some = slice(start, start + batch)
        assert greedily(llm, MIXED[some]) == plain_demo["mixed"][some]
    assert 0 < np.count_nonzero(chosen) < len(chosen)
    gained = counts() - before
    # Each drafter counts its own, and no draft token is nobody's.
    assert (gained > 0).all()
    assert gained[:, 0].sum() <= metric(llm, "vllm:spec_decode_num_draft_tokens") - drafted
