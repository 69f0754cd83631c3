"""bench/forced.py on SGLang: every arm gives the recorded answers, and drafts are accepted."""

from __future__ import annotations

import pytest

from tests.support.forced import forced

SSSD = {"method": "sssd", "num_speculative_tokens": 4, "policy": "fixed", "live": "off"}


@pytest.mark.extended
def test_forced(demo_model, tmp_path):
    found = forced("sglang", tmp_path, demo_model, {"plain": None, "tree": SSSD | {"shape": "tree"}})
    assert found["plain"]["tokens_per_step"] == 1.0 and found["plain"]["accepted"] is None
    assert found["tree"]["tokens_per_step"] > 1.2 and 0 < found["tree"]["accepted"] <= 1
