"""Helpers: replace a function of vLLM once, and arguments for a while; log by vLLM's handlers; fix its CPU platform."""

import builtins
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

MARK = "_freedraft_original"


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` called in place of `owner.name`, with the original and its arguments, unless that has been done
    already in this process."""
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    functools.update_wrapper(replacement, original)
    setattr(replacement, MARK, original)
    setattr(owner, name, replacement)


def before(action: Callable[..., Any]) -> Callable[..., Any]:
    """For `wrap_once`: call `action` with a function's arguments before the function."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


def after(action: Callable[..., Any]) -> Callable[..., Any]:
    """For `wrap_once`: call `action` with a function's result and arguments after the function."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action(result, *args, **kwargs)
        return result

    return wrapper


def unless(condition: Callable[..., bool]) -> Callable[..., Any]:
    """For `wrap_once`: call the function unless `condition` holds for its arguments."""
    return lambda original, *args, **kwargs: None if condition(*args, **kwargs) else original(*args, **kwargs)


@contextmanager
def rewritten(engine_args: Any, config: dict[str, Any] | None) -> Iterator[None]:
    """Context in which EngineArgs has this speculative config; then the user's again: vLLM may create its configuration
    twice."""
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    given = {name: getattr(engine_args, name) for name in names if hasattr(engine_args, name)}
    try:
        for name in given:
            setattr(engine_args, name, config if name == "speculative_config" else None)
        yield
    finally:
        for name, value in given.items():
            setattr(engine_args, name, value)


@functools.cache
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def share_logging() -> None:
    """Give our log lines vLLM's handlers and level: vLLM sets up its own logger only, not the root."""
    ours, theirs = logging.getLogger("freedraft"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def start_with_numba_loaded() -> None:
    """Let vLLM's CPU platform inspect the modules of a process that has loaded numba.

    To replace its Triton kernels vLLM calls `vars` on every value of every module. For llvmlite's library object the
    result is no dictionary, so no engine starts once numba is loaded, here or in the parent process of a fork.
    """
    from vllm.platforms import current_platform

    def vars_of(value: Any) -> Any:
        attributes = builtins.vars(value)
        return attributes if hasattr(attributes, "keys") else {}

    if current_platform.is_cpu():
        try:
            from vllm.triton_utils import dispatcher

            dispatcher.vars = vars_of  # type: ignore[attr-defined]
        except Exception as error:  # a version with another structure
            logger.debug("freedraft: no fix for modules of numba (%s)", error)
