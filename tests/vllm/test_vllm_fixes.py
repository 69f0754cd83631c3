"""The mended mistake of vLLM: what happens without the fix, and where it is applied."""

from __future__ import annotations

import pytest

from freedraft.engines.vllm import fixes


def test_nothing_is_mended_on_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    applied: list[bool] = []
    monkeypatch.setattr(fixes, "start_with_numba_loaded", lambda: applied.append(True))
    fixes.apply_fixes()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    fixes.apply_fixes()
    assert applied == [True]


def test_without_the_fix_vllm_cannot_replace_kernels_once_numba_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding  # noqa: F401
    from vllm.triton_utils import dispatcher

    monkeypatch.delattr(dispatcher, "vars", raising=False)
    with pytest.raises(AttributeError, match="get"):
        dispatcher._rebind_kernels([])
    fixes.start_with_numba_loaded()
    dispatcher._rebind_kernels([])
