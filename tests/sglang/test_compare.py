"""`freedraft compare` on two real servers: every kind of request is answered as without drafts."""

from __future__ import annotations

import pytest

from tests.support.compared import byte_model, check_kinds


@pytest.mark.extended
def test_every_kind_of_request_is_answered_as_without_drafts(demo_model, tmp_path):
    """By a random model whose tokens are bytes."""
    check_kinds("sglang", byte_model(tmp_path / "model", demo_model), tmp_path)
