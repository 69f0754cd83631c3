"""Settings that methods cannot draft with, refused before the engine starts."""

from __future__ import annotations

import copy
import logging
from typing import Any

logger = logging.getLogger(__name__)

USAGE = "_freedraft_usage"  # attribute of EngineArgs: vLLM's UsageContext, which its defaults depend on


def fitting_length(engine_args: Any, model_config: Any, parallel_config: Any, length: int, *, given: bool) -> int:
    """The largest number of draft tokens per request, up to `length`, that the engine's batches hold; logged if it is
    less. given: whether the user has asked for `length`. Raises ValueError of one line: that, or any, does not fit."""
    args = copy.copy(engine_args)
    args._set_default_max_num_seqs_and_batched_tokens_args(getattr(args, USAGE, None), model_config, parallel_config)
    # vLLM sizes adapters' buffers for drafts of all requests. Without adapters a batch must hold those of one: a prompt
    # with one token left, as cached ones have, gets room for all its drafts, or waits.
    requests, tokens = args.max_num_seqs if args.enable_lora else 1, args.max_num_batched_tokens
    most = min(tokens // requests, args.max_num_scheduled_tokens or tokens) - 1
    batch = f"--max-num-batched-tokens {tokens}" + (f" for {requests} requests with LoRA" if requests > 1 else "")
    if length > most and (given or most < 1):
        remedy = f"'num_speculative_tokens' to {most} or less" if most > 0 else f"{requests * (1 + length)} or more"
        raise ValueError(f"{batch} does not hold {length} draft tokens: set {remedy}")
    if length > most:
        logger.warning("freedraft: up to %d draft tokens per request: %s does not hold %d", most, batch, length)
    return min(length, most)


def check_ranks(engine_args: Any) -> None:
    """Refuse ranks that no method drafts on. Raises ValueError of one line."""
    if (stages := getattr(engine_args, "pipeline_parallel_size", 1) or 1) > 1:
        # vLLM fetches drafts by a blocking call per batch, so that the stages of a pipeline would wait for one another.
        raise ValueError(
            f"drafts on the host would stop the pipeline at every step: set --pipeline-parallel-size 1, not {stages}"
        )
    ranks = getattr(engine_args, "tensor_parallel_size", 1) or 1
    if ranks > 1 and getattr(engine_args, "distributed_executor_backend", None) == "external_launcher":
        # Each rank has a scheduler of its own, and the first one alone drafts.
        raise ValueError(
            f"cannot draft for {ranks} ranks with a scheduler each: use another --distributed-executor-backend than "
            "external_launcher, or one rank"
        )


def check_states(model_config: Any, *, v2: bool) -> None:
    """Refuse what model runner V1 does not serve: custom logits processors, and recurrent layers, where requests
    without drafts may read stale states. Raises ValueError of one line."""
    if not v2 and model_config.logits_processors:
        raise ValueError("--logits-processors go with drafts on model runner V2 only: use it, or leave them out")
    if not v2 and (model_config.is_hybrid or model_config.is_attention_free):
        raise ValueError(
            f"recurrent layers of {', '.join(model_config.architectures)} are served by model runner V2 of vLLM 0.32 "
            "and later only: use it, or serve without speculation"
        )


def check_engine(engine_args: Any) -> None:
    """Refuse engine settings that draft passes do not support. Raises ValueError of one line."""
    if (ranks := getattr(engine_args, "decode_context_parallel_size", 1) or 1) > 1:
        raise ValueError(
            f"cannot draft with KV split over several ranks: set --decode-context-parallel-size 1, not {ranks}"
        )
    for name in ("kv_transfer_config", "kv_offloading_size"):
        if getattr(engine_args, name, None) is not None:
            raise ValueError(
                f"cannot draft with KV transfer, which may move pages during a draft: remove --{name.replace('_', '-')}"
            )
    backend = getattr(engine_args, "offload_backend", "auto")
    if backend == "prefetch" or (backend == "auto" and getattr(engine_args, "offload_group_size", 0)):
        raise ValueError(
            "cannot draft with weights that are fetched layer by layer: remove --offload-group-size and "
            "--offload-backend prefetch (--cpu-offload-gb works)"
        )
    if getattr(engine_args, "enable_lora", False):
        raise ValueError(
            "cannot draft with LoRA adapters, which are set up for the target's tokens only: remove --enable-lora, "
            "or use method 'sssd'"
        )


def check_model(model_config: Any) -> None:
    """Refuse models without support for skipped layers, by their configuration. Raises ValueError of one line."""
    from freedraft.engines.vllm.kept_layers import ARCHITECTURES

    names = list(getattr(model_config.hf_config, "architectures", None) or ())
    if not any(name in ARCHITECTURES for name in names):
        raise ValueError(
            f"layers of {', '.join(names) or 'this model'} cannot be skipped: "
            f"supported are {', '.join(ARCHITECTURES)} (method 'sssd' works with any model)"
        )
    if model_config.uses_mrope:
        raise ValueError("layers of a model with multimodal rotary positions cannot be skipped (use method 'sssd')")
