"""`Room` of an SGLang engine, before it starts."""

import logging
import math
from typing import Any

from freedraft.cost.default_length import SHARE_EXPERTS, Room
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import weight_bytes

logger = logging.getLogger("freedraft")


def room_of(args: Any) -> Room:
    """Room of one replica of an engine with these ServerArgs, whose `max_running_requests` is set. SGLang holds states
    of all requests from the start, in a fixed share of what the weights leave: some of each request for its tokens and
    for cached prefixes, and one for each node of a draft, the root included."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model, groups = model_config_of(args), args.attn_dp_size
    requests, few = max(1, args.max_running_requests // groups), SHARE_EXPERTS if groups > 1 else ""
    if (config := mambaish_config(model)) is None:
        return Room(requests, model.vocab_size, few=few)
    try:
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.utils.common import get_device_memory_capacity

        tracked = {"extra_buffer": 2, "extra_buffer_lazy": 1}.get(args.mamba_radix_cache_strategy, 0)
        kept: float = 1 if args.disable_radix_cache else 3 + tracked
        if size := (args.max_mamba_cache_size or 0) // groups:
            requests = max(1, min(requests, size // int(kept)))
            kept = size / requests
        alone = dict.fromkeys(("attn_cp_size", "moe_ep_size", "moe_dp_size"), 1)
        ranks = dict.fromkeys(("tp_size", "moe_tp_size"), args.tp_size)
        ranks |= {"attn_dp_size": groups, "attn_tp_size": args.tp_size // groups}
        with get_parallel().override(**alone, **ranks, enable_cp_tp_group_sharing=False):
            params = config.mamba2_cache_params
            one = more = params.mamba_cache_per_req
            if args.enable_linear_replayssm_spec:  # inputs instead, from which states are computed again
                one, more = one + params.replayssm_ring_bytes_per_req(record_len=args.linear_replayssm_cache_len), 0
        memory = (get_device_memory_capacity(args.device) or math.inf) * 2**20 * (args.mem_fraction_static or 0.9)
        shape = ModelShape.from_config(model.hf_config.to_dict(), dtype=str(model.dtype))
        share = 1 - 1 / (1 + (args.mamba_full_memory_ratio or 0.9))
        cache = max(0.0, memory - weight_bytes(shape, args.tp_size))
        states = {"state": kept * one + more, "more": more, "cache": cache, "share": share}
        return Room(requests, model.vocab_size, few=few, held=requests + 1, **states)  # one pads a batch
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        return Room(requests, model.vocab_size, few=f"the size of its recurrent states is not known ({reason})")


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
