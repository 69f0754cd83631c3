"""`EngineContext` of a vLLM engine, in its front end and in its workers; and the log line at start."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from freedraft.cost.hardware import CPU
from freedraft.engines import hooks
from freedraft.engines.vllm.hooks import DISTRIBUTIONS, TESTED_VERSIONS
from freedraft.fingerprints import hardware_name, tokenizer_fingerprint
from freedraft.step import EngineContext

ATTRIBUTE = "_freedraft"  # attribute of SpeculativeConfig that holds a `Configured`
ADAPTIVE = "enable_adaptive_verification"
SCHEDULE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class Configured:
    """Our data in a SpeculativeConfig. lengths: draft tokens per request that model runner V2 chooses from while
    serving, or none; graph_mode_given: whether the user has set a CUDA graph mode; shape: of drafts on model runner V2,
    "chain", "tree", or "auto" for trees if attention verifies them in all its steps; head: draft tokens of the drafter
    that n-grams are on top of, 0 for none."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    graph_mode_given: bool = False
    shape: str = "chain"
    head: int = 0


def configured(vllm_config: Any) -> Configured:
    """The `Configured` that `create_speculative_config` attached; name "" if the method is not ours."""
    return getattr(getattr(vllm_config, "speculative_config", None), ATTRIBUTE, Configured())


def context_of_engine(vllm_config: Any, *, v2_lengths: tuple[int, ...] | None = None) -> EngineContext:
    """The context in the drafting rank (tensor-parallel rank 0 of a replica). v2_lengths: in model runner V2, possible
    draft lengths."""
    parallel = vllm_config.parallel_config
    # vLLM sets `data_parallel_rank` to 0 in the independent replicas of dense models.
    replica = getattr(parallel, "data_parallel_index", None) or parallel.data_parallel_rank
    most: int = vllm_config.speculative_config.num_speculative_tokens
    # Replicas that share experts step together, padded to the widest: one length for all.
    together = parallel.data_parallel_size > 1 and getattr(vllm_config.model_config, "is_moe", False)
    lengths, head = (most,) if together else None, configured(vllm_config).head
    below = vllm_config.speculative_config.method if head else ""
    return engine_context(
        vllm_config.model_config,
        most,
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        page_size=vllm_config.cache_config.block_size,
        tensor_parallel=parallel.tensor_parallel_size,
        rank=replica,
        gives_logits=v2_lengths is not None and not head,  # only the device knows which tokens of a head were verified
        lengths=v2_lengths or lengths,
        head=head,
        below=below,
    )


def engine_context(model_config: Any, max_draft_tokens: int, **known: Any) -> EngineContext:
    """The context in the front end, before the engine starts, or in a worker. known: what only the caller knows."""
    device = _device()
    return EngineContext(
        hf_config=model_config.hf_config,
        vocab_size=model_config.get_vocab_size(),
        max_draft_tokens=max_draft_tokens,
        dtype=str(model_config.dtype).removeprefix("torch."),
        device=device,
        hardware=hardware_name() if device == CPU else device,
        tokenizer_fingerprint=partial(_tokenizer_fingerprint, model_config),
        **known,
    )


def _device() -> str | None:
    """The platform's device name, without initialising the device: vLLM's front end may fork later."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return CPU
    try:
        return str(current_platform.get_device_name())
    except NotImplementedError:  # some platforms have no name
        return None


def tokenizer_of(model_config: Any) -> Any:
    """The target's tokenizer, loaded once; None if vLLM was configured to load none."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)


def _tokenizer_fingerprint(model_config: Any) -> str | None:
    tokenizer = tokenizer_of(model_config)
    return None if tokenizer is None else tokenizer_fingerprint(tokenizer)


def start_line(vllm_config: Any, method: str, *, v2: bool) -> str:
    """The start line of an engine, after its model is loaded. v2: whether model runner V2 serves it."""
    parallel, version = vllm_config.parallel_config, hooks.installed_version(DISTRIBUTIONS)
    graphs = vllm_config.compilation_config.cudagraph_mode
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    most = vllm_config.speculative_config.num_speculative_tokens
    lengths = f"up to {most} draft tokens, chosen at each step"
    if v2:
        lengths = f"{most} draft tokens at every batch size"
    if schedule:
        learnt = (", at first", "; then by measured times") if configured(vllm_config).lengths else ("", "")
        by_size = ", ".join(f"{n} from {first} on" for first, _, n in schedule)
        lengths = f"draft tokens by number of requests{learnt[0]}: {by_size}{learnt[1]}"
    if v2 and getattr(vllm_config.speculative_config, ADAPTIVE, False):
        lengths += ", of which the batch's likeliest are verified, as many as pay"
    if head := configured(vllm_config).head:
        name = vllm_config.speculative_config.method
        method, lengths = f"{method}+{name}", f"{head} draft tokens of '{name}', continued by n-grams; {lengths}"
    asked = configured(vllm_config).shape == "tree"
    ranks = {
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "data": parallel.data_parallel_size,
    }
    parts = [
        f"model runner {'V2' if v2 else 'V1'}",
        f"async scheduling {'on' if vllm_config.scheduler_config.async_scheduling else 'off'}",
        f"CUDA graphs {'off' if graphs is None or graphs.name == 'NONE' else graphs.name}",
        f"attention {' and '.join(sorted(backends)) or 'unknown'}",
    ]
    chains = ["drafts are chains: trees need model runner V2"] if asked and not v2 else []
    return hooks.start_line(method, "vLLM", version, TESTED_VERSIONS, parts, ranks, [lengths, *chains])
