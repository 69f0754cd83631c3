"""One line at an engine's start: what decides how fast it serves with drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freedraft.engines.hooks import is_tested


def start_line(
    method: str, engine: str, version: str, tested: Sequence[str], parts: Sequence[str], ranks: Mapping[str, int],
    lengths: Sequence[str],
) -> str:  # fmt: skip
    """Return the line.

    Args:
        tested: versions that our tests run; parts: what runs, and how; ranks: numbers by kind of parallelism.
        lengths: how many draft tokens there may be.
    """
    untested = "" if is_tested(version, tested) else ", which we do not test"
    several = [f"{size} {kind}-parallel ranks" for kind, size in ranks.items() if size > 1]
    return f"freedraft: method '{method}': " + "; ".join([f"{engine} {version}{untested}", *parts, *several, *lengths])
