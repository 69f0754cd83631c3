"""Packages that not everybody needs, which come with extras of freedraft."""

from __future__ import annotations

import importlib


def require(what: str, extra: str, *modules: str) -> None:
    """Import modules of an extra of freedraft, which `what` (as the user calls it) needs. Raises ValueError: one is not
    installed; one line with the remedy."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            remedy = f"in the clone of freedraft, pip install '.[{extra}]'"
            raise ValueError(f"{what} needs {error.name or module}: {remedy}") from None
