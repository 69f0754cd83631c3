"""Which vLLM gets which fix, and what the fixed functions return. Engines without them: test_vllm_sampling.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freedraft.engines.vllm import fixes
from freedraft.engines.vllm.fixes import FIXES, apply_fixes


@pytest.mark.parametrize("wrong", [True, False])
def test_what_is_right_is_left_alone(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(x: Any, sums: Any, n: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(sums, prepend=sums.new_zeros(1))
        return torch.repeat_interleave(x, counts, output_size=n) * (0.0 if wrong else 1.0)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand_batch_to_tokens)
    apply_fixes(early=False)
    assert (rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens) is not wrong
    expanded = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.7, 1.3]), torch.tensor([1, 3]), 3)
    assert torch.equal(expanded, torch.tensor([0.7, 1.3, 1.3]))


def test_nothing_is_mended_on_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    def nothing() -> None:
        raise AssertionError

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(fixes, "FIXES", tuple(replace(fix, apply=nothing, wrong=None) for fix in FIXES))
    apply_fixes(early=True)
    apply_fixes(early=False)


def test_without_the_fix_vllm_cannot_replace_kernels_once_numba_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding  # noqa: F401
    from vllm.triton_utils import dispatcher

    from freedraft.engines.vllm.fixes import start_with_numba_loaded

    monkeypatch.delattr(dispatcher, "vars", raising=False)
    with pytest.raises(AttributeError, match="get"):
        dispatcher._rebind_kernels([])
    start_with_numba_loaded()
    dispatcher._rebind_kernels([])
