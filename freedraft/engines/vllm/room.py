"""`Room` of a vLLM engine, before it starts."""

import copy
from functools import partial
from typing import Any

from freedraft.cost.default_length import SHARE_EXPERTS, Room
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import weight_bytes

USAGE = "_freedraft_usage"  # attribute of EngineArgs: vLLM's UsageContext, which its defaults depend on


def room_of(args: Any, model_config: Any, memory: float | None = None) -> Room:
    """Room of an engine with these EngineArgs, whose `max_num_seqs` is set. memory: bytes of a device; None: of one of
    this machine."""
    known: dict[str, Any] = {"requests": args.max_num_seqs, "vocab": model_config.get_vocab_size()}
    if args.data_parallel_size > 1 and model_config.is_moe:
        known |= {"one_length": True, "few": SHARE_EXPERTS}
    if not (model_config.is_hybrid or model_config.is_attention_free):
        return Room(**known)
    try:
        from vllm.model_executor.models.registry import _run_in_subprocess

        # The model's class knows. Its import may initialise the GPU, which vLLM's front end must not.
        plain = copy.copy(args)
        plain.speculative_config = plain.spec_method = plain.spec_model = plain.spec_tokens = None
        state, more = _run_in_subprocess(partial(states_of, plain))
        cache = args.kv_cache_memory_bytes or _cache_bytes(args, model_config, memory)
        return Room(**known, state=state, more=more, cache=cache)
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        return Room(**known | {"few": f"the size of its recurrent states is not known ({reason})"})


def _cache_bytes(args: Any, model_config: Any, memory: float | None) -> float:
    from vllm.platforms import current_platform

    memory = memory or current_platform.get_device_total_memory()
    shape = ModelShape.from_config(model_config.hf_config.to_dict(), dtype=str(model_config.dtype))
    left = memory * args.gpu_memory_utilization - weight_bytes(shape, args.tensor_parallel_size)
    if left <= 0:
        raise ValueError("by an estimate its weights fill the memory")
    return left


def states_of(args: Any) -> tuple[int, int]:
    """`Room.state` and `Room.more` of an engine with these EngineArgs, by vLLM's own functions."""
    from vllm.v1.kv_cache_interface import MambaSpec

    config = args.create_engine_config(getattr(args, USAGE, None))
    model, cache = config.model_config, config.cache_config
    model_class, _ = model.registry.resolve_model_cls(model.architecture, model_config=model)
    shapes = model_class.get_mamba_state_shape_from_config(config)
    dtypes = model_class.get_mamba_state_dtype_from_config(config)

    def size(drafts: int) -> int:
        spec = MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1, num_speculative_blocks=drafts)
        return int(spec.max_memory_usage_bytes(config))

    parallel, kinds = config.parallel_config, ("linear_attention", "mamba")
    layers = sum(model.get_num_layers_by_block_type(parallel, kind) for kind in kinds) or model.get_num_layers(parallel)
    return layers * size(0), 0 if cache.use_replayssm else layers * (size(1) - size(0))
