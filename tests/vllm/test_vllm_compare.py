"""`freedraft compare` on two real servers: every kind of request is answered as without drafts. And bench/forced.py:
every arm gives the recorded answers, and drafts are accepted."""

from pathlib import Path

import pytest

from tests.support.compared import TESTED, byte_model, check_kinds, patterns
from tests.support.forced import forced

SSSD = {"method": "sssd", "num_speculative_tokens": 3, "policy": "fixed", "live": "off"}


@pytest.mark.extended
def test_every_kind_of_request_is_answered_as_without_drafts(demo_model, tmp_path):
    """By a random model whose tokens are bytes."""
    check_kinds("vllm", byte_model(tmp_path / "model", demo_model), tmp_path)


@pytest.mark.extended
def test_kinds_that_take_another_path_on_model_runner_v2(demo_model, tmp_path):
    check_kinds("vllm-v2", byte_model(tmp_path / "model", demo_model, layers=1), tmp_path, patterns(TESTED))


@pytest.mark.extended
def test_forced_on_model_runner_v1(demo_model, tmp_path):
    found = forced("vllm", tmp_path, demo_model, {"plain": None, "chain": SSSD | {"shape": "chain"}})
    assert found["plain"]["tokens_per_step"] == 1.0 and found["plain"]["accepted"] is None
    assert found["chain"]["tokens_per_step"] > 1.2 and 0 < found["chain"]["accepted"] <= 1


@pytest.mark.extended
@pytest.mark.rare
def test_forced_heads_on_model_runner_v2(demo_model, tmp_path):
    """The head's tokens are accepted with given probabilities. N-grams copy the prompt behind them."""
    pytest.importorskip("triton")
    arms = {"head": {"method": "eagle"}, "both": {"method": "sssd+eagle", "policy": "fixed"}}
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(Path(__file__).parent / "v2_interpreted")}
    head, both = forced("vllm", tmp_path, demo_model, arms, **environment).values()
    assert 2 < head["tokens_per_step"] < 4 and head["tokens_per_step"] < both["tokens_per_step"]
