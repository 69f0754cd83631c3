"""`freedraft compare` on two real servers: every kind of request is answered as without drafts."""

from __future__ import annotations

import pytest

from tests.support.compared import check_all_kinds


@pytest.mark.extended
def test_every_kind_of_request_is_answered_as_without_drafts(tiny, tmp_path):
    """By a random model with the demo model's tokenizer."""
    check_all_kinds("sglang", tiny, tmp_path)
