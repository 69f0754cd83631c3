"""`freedraft compare` on two real servers: every kind of request is answered as without drafts."""

from __future__ import annotations

import pytest
from vllm_cases import TINY

from tests.support.compared import check_all_kinds
from tests.support.models import save, tiny_model


@pytest.mark.extended
@pytest.mark.parametrize("arm", ["vllm", "vllm-v2"])
def test_every_kind_of_request_is_answered_as_without_drafts(demo_model, tmp_path, arm):
    """By a random model with the demo model's tokenizer."""
    random = tiny_model(seed=7, **TINY | {"vocab_size": 49152, "max_position_embeddings": 512})
    check_all_kinds(arm, save(random, tmp_path / "model", demo_model), tmp_path)
