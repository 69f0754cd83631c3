"""Optional packages, installed with extras of freedraft."""

import importlib


def require(what: str, extra: str, *modules: str) -> None:
    """Import modules of an extra of freedraft, which the feature `what` needs. Raises ValueError, one line with the
    remedy: one is not installed."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            remedy = f"in the clone of freedraft, pip install '.[{extra}]'"
            raise ValueError(f"{what} needs {error.name or module}: {remedy}") from None
