"""`EngineContext` of an SGLang server, in its front end and in its schedulers; the log line at start."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from freedraft.engines import hooks
from freedraft.engines.sglang.guards import verify_backend, widths_for
from freedraft.engines.sglang.hooks import DISTRIBUTIONS, TESTED_VERSIONS
from freedraft.fingerprints import hardware_name, tokenizer_fingerprint
from freedraft.step import EngineContext


def published_config(args: Any) -> Any:
    """Return the model's published config; SGLang rounds sizes in its own copy to what its ranks can share."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision)


def context_at_start(args: Any) -> EngineContext:
    """Build the context in the front-end process, from ServerArgs with this plugin's defaults applied."""
    config = published_config(args)
    nodes = args.speculative_num_draft_tokens
    return EngineContext(
        hf_config=config,
        vocab_size=getattr(config.get_text_config(), "vocab_size", None),
        max_draft_tokens=nodes - 1,
        widths=widths_for(verify_backend(args) or "", nodes),
        kv_dtype=str(args.kv_cache_dtype),
        page_size=args.page_size,
        tensor_parallel=args.tp_size,
    )


def context_of_worker(target_worker: Any, widths: tuple[int, ...]) -> EngineContext:
    """Build the context in a scheduler; each data-parallel replica has its own."""
    from sglang.srt.runtime_context import get_parallel

    replica = get_parallel().dp_rank or 0
    runner, tokenizer = target_worker.model_runner, target_worker.tokenizer
    return EngineContext(
        hf_config=published_config(runner.server_args), vocab_size=runner.model_config.vocab_size,
        max_draft_tokens=widths[-1] - 1, widths=widths,
        dtype=str(runner.model_config.dtype).removeprefix("torch."), kv_dtype=str(runner.kv_cache_dtype),
        page_size=runner.page_size, tensor_parallel=runner.server_args.tp_size, rank=replica, gives_logits=True,
        hardware=hardware_name(str(runner.device)),
        tokenizer_fingerprint=partial(tokenizer_fingerprint, tokenizer) if tokenizer else lambda: None,
    )  # fmt: skip


def start_line(runner: Any, method: str, backend: str, widths: Sequence[int], *, trees: bool) -> str:
    """Return the start line of a server with captured CUDA graphs. runner: SGLang's ModelRunner; backend: attention
    backend of verification; widths: supported numbers of nodes per request, root included."""
    args, version = runner.server_args, hooks.installed_version(DISTRIBUTIONS)
    parts = [
        f"overlap scheduling {'off' if args.disable_overlap_schedule else 'on'}",
        f"CUDA graphs {'off' if runner.decode_cuda_graph_runner is None else 'on'}",
        f"attention {backend}",
    ]
    ranks = {"tensor": args.tp_size, "pipeline": args.pp_size, "data": args.dp_size}
    lengths = f"{'trees' if trees else 'chains'} of up to {widths[-1] - 1} draft tokens, {len(widths)} sizes"
    return hooks.start_line(method, "SGLang", version, TESTED_VERSIONS, parts, ranks, [lengths])
