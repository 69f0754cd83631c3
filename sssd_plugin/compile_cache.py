"""Drops compiled code that is older than its sources.

numba's cache checks only the file of the outermost function, not those of the functions that it calls, so an upgrade in
place would go on running the old code. Imported before the first compiled function.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_FOLDERS = (Path(__file__).parent, Path(__file__).parent / "datastore")


def drop_stale() -> None:
    """Remove numba's index files of this package if any source is newer. A read-only installation is left alone."""
    with contextlib.suppress(OSError):
        newest = max(source.stat().st_mtime for folder in _FOLDERS for source in folder.glob("*.py"))
        for folder in _FOLDERS:
            for index in (folder / "__pycache__").glob("*.nbi"):
                if index.stat().st_mtime < newest:
                    index.unlink(missing_ok=True)


drop_stale()
