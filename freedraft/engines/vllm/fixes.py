"""Mistakes of vLLM's CPU platform that speculative decoding runs into, mended where they are found (see `FIXES`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freedraft.engines.vllm.patching import wrap_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fix:
    """A mended mistake. early: applied in every process when our methods are registered, not only where one of them
    drafts; wrong: whether this vLLM has the bug; None if the patch is a no-op without it."""

    early: bool
    reason: str
    apply: Callable[[], None]
    wrong: Callable[[], bool] | None = None


def per_token_parameters_are_wrong() -> bool:
    """See `expand_per_token_parameters`."""
    import torch
    from vllm.v1.sample import rejection_sampler

    values = torch.tensor([0.7, 1.3])
    expanded = rejection_sampler.expand_batch_to_tokens(values, torch.tensor([1, 3], dtype=torch.int32), 3)
    return not torch.equal(expanded, values[[0, 1, 1]])


def expand_per_token_parameters() -> None:
    """Write temperature, top-p and top-k of each draft token in plain torch.

    The CPU implementation converts output and input to int64 *copies*: the output stays uninitialised memory (and a
    temperature of 0.7 would become 0), so sampled requests are verified against garbage.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def expand_batch_to_tokens(
            x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
        ) -> torch.Tensor:
            """x [batch] repeated to [num_tokens] by the counts whose running sum is `cu_num_tokens` [batch]."""
            counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
            values = torch.where(x == replace_from, replace_to, x) if replace_from != replace_to else x
            return torch.repeat_interleave(values.to(x.dtype), counts, output_size=num_tokens)

        return expand_batch_to_tokens

    wrap_once(rejection_sampler, "expand_batch_to_tokens", make)


def allow_steps_without_drafts() -> None:
    """Return early when no request of the batch has a draft.

    vLLM then asks for the largest top-k of an empty tensor, which raises on the CPU and ends the engine.
    """
    from vllm.v1.sample import rejection_sampler

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_sampling_constraints(logits: Any, *args: Any, **kwargs: Any) -> Any:
            return logits if logits.shape[0] == 0 else original(logits, *args, **kwargs)

        return apply_sampling_constraints

    wrap_once(rejection_sampler, "apply_sampling_constraints", make)


def start_with_numba_loaded() -> None:
    """Let vLLM look through the modules of a process that has loaded numba.

    To replace its Triton kernels vLLM asks every value of every module for its `vars`. That of llvmlite's library
    object is no dictionary, so no engine starts once numba is loaded, here or in the process that this was forked from.
    """
    import builtins

    from vllm.triton_utils import dispatcher

    def vars_of(value: Any) -> Any:
        attributes = builtins.vars(value)
        return attributes if hasattr(attributes, "keys") else {}

    dispatcher.vars = vars_of  # type: ignore[attr-defined]


FIXES = (
    Fix(True, "no engine starts once numba is loaded", start_with_numba_loaded),
    Fix(
        False,
        "sampling parameters of draft tokens are uninitialised memory",
        expand_per_token_parameters,
        per_token_parameters_are_wrong,
    ),
    Fix(False, "a sampled step without drafts ends the engine", allow_steps_without_drafts),
)


def apply_fixes(*, early: bool) -> None:
    """Apply what this vLLM needs now."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for fix in FIXES:
        if fix.early == early:
            try:
                if fix.wrong is None or fix.wrong():
                    fix.apply()
            except Exception as error:  # a version that is built differently
                logger.debug("freedraft: nothing to mend for '%s' (%s)", fix.reason, error)
