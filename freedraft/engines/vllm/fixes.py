"""A mistake of vLLM's CPU platform that our methods run into, mended when they are registered."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


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


def apply_fixes() -> None:
    """Apply what this vLLM needs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        start_with_numba_loaded()
    except Exception as error:  # a version that is built differently
        logger.debug("freedraft: nothing to mend for modules of numba (%s)", error)
