"""`freedraft compare` on two real servers: every kind of request is answered as without drafts."""

from __future__ import annotations

import pytest

from tests.support.compared import TESTED, byte_model, check_kinds, patterns


@pytest.mark.extended
def test_every_kind_of_request_is_answered_as_without_drafts(demo_model, tmp_path):
    """By a random model whose tokens are bytes."""
    check_kinds("vllm", byte_model(tmp_path / "model", demo_model), tmp_path)


@pytest.mark.extended
def test_kinds_that_take_another_path_on_model_runner_v2(demo_model, tmp_path):
    check_kinds("vllm-v2", byte_model(tmp_path / "model", demo_model, layers=1), tmp_path, patterns(TESTED))
