"""One line at start: what decides how fast this engine serves with drafts."""

from __future__ import annotations

from typing import Any

from freedraft.engines.start_line import start_line as put_together
from freedraft.engines.vllm.configured import configured
from freedraft.engines.vllm.hooks import TESTED_VERSIONS, vllm_version


def start_line(vllm_config: Any, method: str, *, v2: bool) -> str:
    """Say it of an engine whose model is loaded. v2: whether model runner V2 serves it."""
    parallel, version = vllm_config.parallel_config, vllm_version()
    graphs = vllm_config.compilation_config.cudagraph_mode
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    most = vllm_config.speculative_config.num_speculative_tokens
    lengths = f"up to {most} draft tokens, chosen at each step"
    if v2:
        lengths = f"{most} draft tokens at every batch size"
    if schedule:
        learnt = ", learnt while serving; at first" if configured(vllm_config).lengths else ":"
        by_size = ", ".join(f"{n} from {first} on" for first, _, n in schedule)
        lengths = f"draft tokens by batch size{learnt} {by_size}"
    asked = configured(vllm_config).options.get("shape") == "tree"
    ranks = {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "data": parallel.data_parallel_size,
    }
    parts = [
        f"model runner {'V2' if v2 else 'V1'}",
        f"async scheduling {'on' if vllm_config.scheduler_config.async_scheduling else 'off'}",
        f"CUDA graphs {'NONE' if graphs is None else graphs.name}",
        f"attention {' and '.join(sorted(backends)) or 'unknown'}",
    ]
    chains = ["drafts are chains: trees need model runner V2"] if asked and not v2 else []
    return put_together(method, "vLLM", version, TESTED_VERSIONS, parts, ranks, [lengths, *chains])
