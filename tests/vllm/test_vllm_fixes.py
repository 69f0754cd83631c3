"""Which vLLM gets which fix, and what the fixed functions return. Engines without them: test_vllm_sampling.py."""

from __future__ import annotations

import pytest

from freedraft.engines.vllm.fixes import FIXES, Fix


@pytest.mark.parametrize(
    ("version", "platform", "applies"),
    [
        ("0.26.0", "cpu", True),
        ("0.32.0", "cpu", True),
        ("0.32.0+cpu", "cpu", True),
        ("0.32.0rc1", "cpu", True),
        ("0.32.0", "cuda", False),
        ("0.33.0", "cpu", False),
        ("0.25.1", "cpu", False),
        ("?", "cpu", False),
    ],
)
def test_fixes_apply_where_the_mistakes_are(version: str, platform: str, applies: bool) -> None:
    assert [fix.applies(version, platform) for fix in FIXES] == [applies] * len(FIXES)


def test_every_fix_has_a_reason() -> None:
    assert all(isinstance(fix, Fix) and fix.reason and fix.apply.__doc__ for fix in FIXES)


def test_expanded_parameters() -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    from freedraft.engines.vllm.fixes import expand_per_token_parameters
    from freedraft.engines.vllm.patching import unwrap

    expand_per_token_parameters()
    try:
        temperature = torch.tensor([0.7, 0.0, 1.3, 0.9])
        sums = torch.tensor([2, 5, 5, 6], dtype=torch.int32)
        expanded = rejection_sampler.expand_batch_to_tokens(temperature, sums, 6, replace_from=0, replace_to=1)
        assert torch.equal(expanded, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0, 0.9]))
        top_k = rejection_sampler.expand_batch_to_tokens(torch.tensor([5, 0, 7, 24], dtype=torch.int32), sums, 6)
        assert top_k.tolist() == [5, 5, 0, 0, 0, 24] and top_k.dtype == torch.int32
    finally:
        unwrap(rejection_sampler, "expand_batch_to_tokens")


def test_without_the_fix_vllm_cannot_replace_kernels_once_numba_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding  # noqa: F401
    from vllm.triton_utils import dispatcher

    from freedraft.engines.vllm.fixes import start_with_numba_loaded

    monkeypatch.delattr(dispatcher, "vars", raising=False)
    with pytest.raises(AttributeError, match="get"):
        dispatcher._rebind_kernels([])
    start_with_numba_loaded()
    dispatcher._rebind_kernels([])
