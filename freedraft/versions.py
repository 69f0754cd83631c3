"""Versions of engines that continuous integration runs."""

from __future__ import annotations

from collections.abc import Sequence


def is_tested(version: str, tested: Sequence[str]) -> bool:
    """Whether a version is one of `tested`, local parts and what follows their last component left out."""
    return any(version.split("+")[0] == each or version.startswith(f"{each}.") for each in tested)
