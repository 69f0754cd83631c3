"""Settings that methods cannot draft with, refused before the engine starts."""

from __future__ import annotations

import copy
import logging
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.hooks import BATCH_HOOKS

logger = logging.getLogger(__name__)

_USAGE = "_freedraft_usage"  # attribute of EngineArgs: vLLM's UsageContext, which its defaults depend on


def note_usage(engine_args: Any, usage_context: Any = None, *args: Any, **kwargs: Any) -> None:
    """Before `EngineArgs.create_engine_config`: keep the usage context for `fitting_length`."""
    setattr(engine_args, _USAGE, usage_context)


def fitting_length(engine_args: Any, model_config: Any, parallel_config: Any, length: int, *, given: bool) -> int:
    """The largest number of draft tokens per request, up to `length`, that the engine's batches hold; logged if it is
    less. given: whether the user has asked for `length`. Raises ValueError of one line: that, or any, does not fit."""
    if missing := check(BATCH_HOOKS):
        logger.warning("freedraft: whether batches hold %d draft tokens is unknown: vLLM lacks %s", length, missing[0])
        return length
    args, usage_context = copy.copy(engine_args), getattr(engine_args, _USAGE, None)
    args._set_default_max_num_seqs_and_batched_tokens_args(usage_context, model_config, parallel_config)
    # vLLM sizes adapters' buffers for drafts of all requests. Without adapters a batch must hold those of one: a prompt
    # with one token left, as cached ones have, gets room for all its drafts, or waits.
    requests, tokens = args.max_num_seqs if args.enable_lora else 1, args.max_num_batched_tokens
    most = min(tokens // requests, args.max_num_scheduled_tokens or tokens) - 1
    if length <= most:
        return length
    batch = f"a batch of {tokens} tokens" + (f" (LoRA: for each of {requests} requests)" if requests > 1 else "")
    if most < 1:
        raise ValueError(f"{batch} holds no drafts: set --max-num-batched-tokens to {requests * 9} or more")
    if given:
        raise ValueError(f"{batch} does not hold {length} draft tokens: set 'num_speculative_tokens' to {most} or less")
    logger.warning(
        "freedraft: up to %d draft tokens per request instead of %d: %s holds no more; "
        "raise --max-num-batched-tokens for more", most, length, batch,
    )  # fmt: skip
    return most


def check_processors(engine_args: Any, *, v2: bool) -> None:
    """Refuse custom logits processors on model runner V1, where vLLM ends the start for them. Raises ValueError of one
    line."""
    if not v2 and getattr(engine_args, "logits_processors", None):
        raise ValueError(
            "custom logits processors are served with drafts by model runner V2 only: use it, or remove "
            "--logits-processors"
        )


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
    """Refuse recurrent layers on model runner V1, where requests without drafts may read stale states. Raises
    ValueError of one line."""
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
