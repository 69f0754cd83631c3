"""Settings that methods cannot draft with, refused before the engine starts."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from freedraft.engines.vllm.context import ADAPTIVE
from freedraft.engines.vllm.room import USAGE, room_of

logger = logging.getLogger(__name__)


def fitting_length(
    engine_args: Any, model_config: Any, parallel_config: Any, length: int, *, given: bool, trees: bool,
    adaptive: bool = False,
) -> int:  # fmt: skip
    """The number of draft tokens per request: `length` if it is given, else the default, at most `length`, that fits.
    Logs it and the reason. trees: whether drafts are trees; adaptive: whether vLLM schedules all of them, but verifies
    fewer. Raises ValueError of one line: that, or any, does not fit the engine's batches."""
    args = copy.copy(engine_args)
    args._set_default_max_num_seqs_and_batched_tokens_args(getattr(args, USAGE, None), model_config, parallel_config)
    space = replace(room_of(args, model_config), held=engine_args.max_num_seqs or 0)
    if not given:
        length, why = space.default(length, trees=trees)
    # vLLM sizes adapters' buffers for drafts of all requests. Without adapters a batch must hold those of one: a prompt
    # with one token left, as cached ones have, gets room for all its drafts, or waits.
    requests, tokens = args.max_num_seqs if args.enable_lora else 1, args.max_num_batched_tokens
    if adaptive and not given:  # else requests that are scheduled leave no room for others
        requests = max(requests, min(args.max_num_seqs, tokens // 2))
    most = min(tokens // requests, args.max_num_scheduled_tokens or tokens) - 1
    all_of_them = f" for {requests} requests{' with LoRA' * bool(args.enable_lora)}" if requests > 1 else ""
    batch = f"--max-num-batched-tokens {tokens}{all_of_them}"
    if length > most and (given or most < 1):
        remedy = f"'num_speculative_tokens' to {most} or less" if most > 0 else f"{requests * (1 + length)} or more"
        raise ValueError(f"{batch} does not hold {length} draft tokens: set {remedy}")
    if given:
        if excess := space.excess(length):
            logger.warning("freedraft: %d draft tokens per request, as set: they take %s", length, excess)
        return length
    if length > most:
        length, why = most, f"{batch} does not hold {length}"
    logger.info("freedraft: up to %d draft tokens per request by default: %s", length, why)
    return length


def check_ranks(engine_args: Any, *, v2: bool, layers: bool) -> None:
    """Refuse ranks that a method does not draft on. layers: whether it runs some of the model's, or a head behind them.
    Raises ValueError of one line."""
    stages = getattr(engine_args, "pipeline_parallel_size", 1) or 1
    asynchronous = v2 and getattr(engine_args, "async_scheduling", None) is not False
    if stages > 1 and (layers or not asynchronous):
        # Otherwise vLLM fetches drafts by a blocking call per batch, also those of steps that it has scheduled.
        why = "in a pipeline n-grams alone are drafted, by model runner V2 with async scheduling"
        raise ValueError(f"{why}: set --pipeline-parallel-size 1, not {stages}")
    ranks = getattr(engine_args, "tensor_parallel_size", 1) or 1
    if ranks > 1 and getattr(engine_args, "distributed_executor_backend", None) == "external_launcher":
        # Each rank has a scheduler of its own, and the first one alone drafts.
        raise ValueError(
            f"cannot draft for {ranks} ranks with a scheduler each: use another --distributed-executor-backend than "
            "external_launcher, or one rank"
        )


def check_verification(engine_args: Any, config: Mapping[str, Any], shape: str) -> None:
    """Refuse what has never run on this platform, and adaptive verification whose choice vLLM must know on the host.
    config: for vLLM's SpeculativeConfig; shape: of drafts. Raises ValueError of one line."""
    adaptive, platform = config.get(ADAPTIVE), unseen_platform()
    if adaptive and getattr(engine_args, "enable_batch_sharded_sampling", False):
        raise ValueError(f"'{ADAPTIVE}' does not go with --enable-batch-sharded-sampling: leave one of them out")
    if platform and (adaptive or shape == "tree"):
        said = f"'{ADAPTIVE}'" if adaptive else "'shape' 'tree'"
        raise ValueError(f"{said} has not been tried on {platform}: leave it out")


def unseen_platform() -> str:
    """Name of this platform, if trees and adaptive verification have never run on it; else ""."""
    from vllm.platforms import current_platform

    return "ROCm" if current_platform.is_rocm() else "XPU" if current_platform.is_xpu() else ""


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
