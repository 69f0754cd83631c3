"""Drops compiled code that is older than its sources.

numba's cache checks only the file of the outermost function, not those of the functions that it calls, so an upgrade in
place would go on running the old code. Importing `freedraft` or a plugin imports this, before any compiled function.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_PACKAGES = tuple(Path(__file__).parents[1] / name for name in ("freedraft", "sssd_plugin", "layerskip_plugin"))


def drop_stale() -> None:
    """Remove numba's index files that are older than any source. A read-only installation is left alone."""
    with contextlib.suppress(OSError):
        sources = [source for package in _PACKAGES for source in package.rglob("*.py")]
        newest = max((source.stat().st_mtime for source in sources), default=0.0)
        for folder in {source.parent for source in sources}:
            for index in (folder / "__pycache__").glob("*.nbi"):
                if index.stat().st_mtime < newest:
                    index.unlink(missing_ok=True)


drop_stale()
