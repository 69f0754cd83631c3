"""Functions that replace a function of vLLM once, and that make our log lines appear among vLLM's."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

MARK = "_freedraft_original"


def wrap_once(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)`, unless that has been done already in this process."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, MARK, original)
    setattr(owner, name, replacement)


def with_kv_cache(prepare: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `wrap_once` of a model runner's `initialize_kv_cache`: call `prepare(runner)` when its KV cache is there, not
    in profiling runs."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if not signature.bind(self, *args, **kwargs).arguments.get("is_profiling", False):
                prepare(self)
            return result

        return initialize_kv_cache

    return make


def unwrap(owner: Any, name: str) -> None:
    """Put the original of `wrap_once` back, if there is one."""
    original = getattr(getattr(owner, name), MARK, None)
    if original is not None:
        setattr(owner, name, original)


def share_logging() -> None:
    """Give our log lines vLLM's handlers and level: vLLM sets up its own logger only, not the root."""
    ours, theirs = logging.getLogger("freedraft"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
