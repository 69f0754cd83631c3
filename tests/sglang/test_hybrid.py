"""n-grams and layer skip in one engine: the same tokens, whoever drafts for whom."""

from __future__ import annotations

import json

import pytest

from tests.sglang.conftest import GREEDY, ids
from tests.sglang.layerskip_tools import checked_engine, make_model, prompts
from tests.support.models import continuations


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """An engine whose requests get draft passes at random."""
    folder = make_model(tmp_path_factory.mktemp("llama"), "Llama")
    changed = {"FREEDRAFT_POLICY": "auto", "FREEDRAFT_SCORING": "learned"}
    given = {"speculative_algorithm": "hybrid_any", "speculative_num_draft_tokens": 8}
    with checked_engine(folder, "weak mixed", changed, **given) as engine:
        yield engine


@pytest.mark.parametrize("batch", [1, 4])
def test_same_tokens(composed, tmp_path, batch):
    # Prompts that repeat themselves, so that n-grams have something to say.
    given = [(prompt * 8)[:96] for prompt in prompts()]
    model = make_model(tmp_path / "again", "Llama")
    expected = continuations(model, given, GREEDY["max_new_tokens"])
    got = []
    for start in range(0, len(given), batch):
        got += ids(composed.generate(input_ids=given[start : start + batch], sampling_params=GREEDY))
    assert got == expected
    log = json.loads(composed.log.read_text())
    assert log["of the model"] > 50 and log["of n-grams"] > 10
    assert batch == 1 or log["mixed"] > 5
