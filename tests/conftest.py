"""Fixtures of all tests. What they share besides lies in `tests/support`."""

from pathlib import Path

import pytest

from tests.support.models import DEMO_MODEL

pytest.register_assert_rewrite("tests.support.conformance")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    if not (DEMO_MODEL / "config.json").is_file():
        pytest.skip(f"no demo model at {DEMO_MODEL}: make model, or set FREEDRAFT_TEST_MODEL")
    return DEMO_MODEL
