"""A bug of vLLM's CPU platform that affects our methods, patched when they are registered."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def start_with_numba_loaded() -> None:
    """Let vLLM inspect the modules of a process that has loaded numba.

    To replace its Triton kernels vLLM calls `vars` on every value of every module. For llvmlite's library object the
    result is no dictionary, so no engine starts once numba is loaded, here or in the parent process of a fork.
    """
    import builtins

    from vllm.triton_utils import dispatcher

    def vars_of(value: Any) -> Any:
        attributes = builtins.vars(value)
        return attributes if hasattr(attributes, "keys") else {}

    dispatcher.vars = vars_of  # type: ignore[attr-defined]


def apply_fixes() -> None:
    """Apply the fixes that this vLLM needs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        start_with_numba_loaded()
    except Exception as error:  # a version with another structure
        logger.debug("freedraft: no fix for modules of numba (%s)", error)
