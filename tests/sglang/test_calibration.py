"""Calibration in SGLang, with pages of one token and of several."""

from __future__ import annotations

import pytest

from tests.sglang.test_attention_masks import run_script


@pytest.mark.parametrize("page_size", [1, 16])
def test_calibration_says_what_the_reference_says(demo_model, page_size):
    run_script("calibration_in_engine.py", demo_model, page_size)
