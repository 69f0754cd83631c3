"""A faster interpreter of Triton's kernels, and a record of what was launched. Each kind is compiled once."""

import functools
from typing import Any

import pytest
import torch

Kind = tuple[str, tuple[tuple[str, Any], ...]]


def interpret_quickly() -> None:
    """Else the interpreter replaces the whole language at each launch and at each call within a kernel."""
    from triton.runtime import interpreter

    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda self: None


def record_launches(patch: pytest.MonkeyPatch, run: bool) -> set[Kind]:
    """Those of our kernels from now on, which run or do not.

    A kernel is compiled for its compile-time arguments, for numbers that are 1 or divisible by 16, unless it says not
    to, and for addresses that are divisible by 16.
    """
    from triton.runtime.interpreter import InterpretedFunction

    launched, original = set[Kind](), InterpretedFunction.run

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("freedraft_kernels"):
            given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
            kinds = ((name, _kind(self, name, value)) for name, value in sorted(given.items()) if name != "grid")
            launched.add((self.fn.__name__, tuple(kinds)))
        return original(self, *args, **kwargs) if run else None

    patch.setattr(InterpretedFunction, "run", record)
    return launched


def _kind(function: Any, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        anywhere = name in (function.kwargs.get("do_not_specialize_on_alignment") or ())
        return str(value.dtype), anywhere or value.data_ptr() % 16 == 0
    if value is None or name not in function.arg_names or "constexpr" in str(function.fn.__annotations__.get(name)):
        return value
    if name in (function.kwargs.get("do_not_specialize") or ()):
        return None
    return value == 1, value % 16 == 0
