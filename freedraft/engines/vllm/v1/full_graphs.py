"""Full CUDA graphs in vLLM's model runner V1 for steps with different draft lengths per request.

By default (FULL_AND_PIECEWISE) full graphs serve only steps in which every request has 1 + K tokens, which is rare; all
others run piecewise. If the attention backend can be captured for any batch, mode FULL has full graphs for them, too.
"""

from __future__ import annotations

from typing import Any

from freedraft.engines.vllm.patching import before, wrap_once

_PREFERRED = "_freedraft_full_graphs"


def prefer_full_graphs(compilation_config: Any) -> None:
    """Set mode FULL in vLLM's CompilationConfig once the attention backends are known, if they allow it."""
    wrap_once(type(compilation_config), "resolve_cudagraph_mode_and_sizes", before(_prefer))
    setattr(compilation_config, _PREFERRED, True)


def _prefer(config: Any, min_cg_support: Any, *args: Any, **kwargs: Any) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    preferred = getattr(config, _PREFERRED, False) and min_cg_support == AttentionCGSupport.ALWAYS
    if preferred and config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
        config.cudagraph_mode = CUDAGraphMode.FULL
