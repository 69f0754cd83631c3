"""`Room` of an SGLang engine, before it starts."""

from __future__ import annotations

import logging
import math
from typing import Any

from freedraft.cost.default_length import Room
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import weight_bytes

logger = logging.getLogger("freedraft")


def room_of(args: Any) -> Room:
    """Room of a data-parallel replica of an engine with these ServerArgs, whose `max_running_requests` is set. States of
    all requests get a fixed share of what the weights leave: some for each request, and one for each node of a draft.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel

    model = model_config_of(args)
    known: dict[str, Any] = {"requests": args.max_running_requests, "vocab": model.vocab_size}
    if (config := mambaish_config(model)) is None:
        return Room(**known)
    try:
        from sglang.srt.configs.hybrid_arch import hybrid_kda_config

        with get_parallel().override(attn_tp_size=args.tp_size, tp_size=args.tp_size, enable_cp_tp_group_sharing=False):
            params = config.mamba2_cache_params
            one, ring = params.mamba_cache_per_req, 0
            if replays := args.enable_linear_replayssm_spec:
                ring = params.replayssm_ring_bytes_per_req(record_len=args.linear_replayssm_cache_len)
        kept: float = kept_states(args)
        if size := args.max_mamba_cache_size:
            known["requests"] = max(1, min(known["requests"], int(size // kept)))
            kept = size / known["requests"]
        rings = kept if hybrid_kda_config(model) else 1
        nodes = (0, 0) if replays else (one, one)  # of the root, and of each draft token
        state = kept * one + rings * ring + nodes[0]
        return Room(**known, state=state, more=nodes[1], cache=_cache(args, model), slots=True)
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        return Room(**known, few=f"the size of its recurrent states is not known ({reason})")


def kept_states(args: Any) -> int:
    """How many states SGLang 0.5.23 keeps for a request besides those of drafts: of cached prefixes, too."""
    from sglang.srt.arg_groups.model_override_base import mamba_extra_buffer_of
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots

    if args.disable_radix_cache:
        return 1
    lazy, overlap = args.mamba_radix_cache_strategy == "extra_buffer_lazy", not args.disable_overlap_schedule
    return 3 + get_mamba_tracking_slots(extra_buffer=mamba_extra_buffer_of(args), overlap=overlap, lazy=lazy)


def _cache(args: Any, model: Any) -> float:
    """Bytes for states; infinite where the device's memory is not known."""
    from sglang.srt.utils.common import get_device_memory_capacity

    memory, ratio = get_device_memory_capacity(args.device), args.mamba_full_memory_ratio or 0.9
    shape = ModelShape.from_config(model.hf_config.to_dict(), dtype=str(model.dtype))
    left = (memory or math.inf) * 2**20 * (args.mem_fraction_static or 0.9) - weight_bytes(shape, args.tp_size)
    if left <= 0:
        raise ValueError("by an estimate its weights fill the memory")
    return left * ratio / (1 + ratio)


def fitting_nodes(args: Any, most: int, *, trees: bool) -> int:
    """Nodes per request, root included: --speculative-num-draft-tokens if given, else the default, at most `most` draft
    tokens, that fits. Logs the reason, and what a given number takes. trees: whether drafts are trees."""
    room, given = room_of(args), args.speculative_num_draft_tokens
    if given is None:
        length, why = room.default(most, trees=trees)
        logger.info("freedraft: up to %d draft tokens per request by default: %s", length, why)
        return length + 1
    if excess := room.excess(given - 1):
        logger.warning("freedraft: %d draft tokens per request, as set: they take %s", given - 1, excess)
    return int(given)
