"""`ModelShape`: the dimensions of a decoder, read from its Hugging Face configuration; `state_bytes`: the same of its
recurrent states."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from freedraft.config import ConfigError
from freedraft.cost.hardware import DTYPE_BYTES

# Names of a field in different families; the first one present counts.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "n_head_kv", "num_kv_heads")
_MLP = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "experts_per_token")
# Families with two matrices per MLP instead of SwiGLU's three.
_UNGATED = {"gpt2", "gptj", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt", "nemotron"}


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Widths of multi-head latent attention (MLA): all heads share one compressed cache entry per token."""

    kv_rank: int  # of the compressed key/value
    rope_dim: int  # of the key part that carries the position, also shared
    q_rank: int  # of the compressed query; 0 where the query is not compressed
    nope_dim: int  # per head, of the rest of the key
    v_dim: int  # per head, of the value


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in some of the layers."""

    total: int  # experts per layer
    active: int  # experts per token
    intermediate: int  # h_mlp of one expert
    shared: int  # h_mlp of the experts that every token uses, together
    layers: int  # that have experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder; symbols are those of the paper (appendix B)."""

    hidden: int  # h
    layers: int
    heads: int  # n_q
    kv_heads: int  # n_kv
    head_dim: int  # d
    intermediate: int  # h_mlp of a dense layer
    vocab: int  # rows of the output head
    gated: bool = True  # whether the MLP is SwiGLU-like (three matrices) or has two
    weight_bytes: float = 2.0  # per element, as the next two
    activation_bytes: float = 2.0
    kv_bytes: float = 2.0
    dtype: str = "bfloat16"  # of the matrix products, for the hardware's peak
    latent: LatentAttention | None = None  # instead of grouped-query attention
    experts: Experts | None = None
    window: int | None = None  # tokens that attention looks back to in some layers; None for all tokens
    window_layers: float = 1.0  # share of these layers

    def attended(self, context: float) -> float:
        """Tokens of the cache that a layer reads for each request, on average over the layers."""
        if self.window is None:
            return context
        return self.window_layers * min(context, self.window) + (1.0 - self.window_layers) * context

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a model shape needs {name} >= 1, not {getattr(self, name)}")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, dtype: str | None = None, kv_dtype: str | None = None,
        source: str = "the model's configuration",
    ) -> Self:  # fmt: skip
        """The shape that a Hugging Face configuration describes. Raises ConfigError: a field is missing or makes no
        sense.

        Args:
            dtype: the engine's dtype, if it differs from the configuration's.
            kv_dtype: dtype of the KV cache, e.g. "fp8_e4m3"; None or "auto": the same, or the checkpoint's.
        """
        quantised = config.get("quantization_config")
        quantised = quantised if isinstance(quantised, Mapping) else {}
        if isinstance(text := config.get("text_config"), Mapping):
            config = {**config, **text}
        if blocks := config.get("layers_block_type"):  # the number may follow from it
            config = {"num_hidden_layers": len(blocks), **config}
        try:
            hidden, heads, layers = (int(_first(config, names)) for names in (_HIDDEN, _HEADS, _LAYERS))
            name, slides = _dtype(config, dtype), config.get("use_sliding_window")
            size = DTYPE_BYTES[name]
            return cls(
                hidden=hidden,
                layers=sum(kind not in ("moe", "mlp") for kind in layer_kinds(config, layers)),
                heads=heads,
                kv_heads=int(_first(config, _KV_HEADS, heads)),
                head_dim=int(config.get("head_dim") or hidden // max(heads, 1)),
                intermediate=int(_first(config, _MLP, 4 * hidden)),
                vocab=int(config["vocab_size"]),
                gated=str(config.get("model_type", "")) not in _UNGATED | {"nemotron_h"},
                weight_bytes=_weight_bytes(quantised) or size,
                activation_bytes=size,
                kv_bytes=_kv_bytes(kv_dtype, quantised) or size,
                dtype=name,
                latent=_latent(config),
                experts=_experts(config, layers),
                window=None if slides is False else int(config.get("sliding_window") or 0) or None,
                window_layers=_window_layers(config, layers),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{source}: the cost model does not know this architecture ({what})") from None


def read_config(model: Path | str) -> dict[str, Any]:
    """The configuration in a model's folder, or this file. Raises ConfigError: there is none that can be read."""
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; give a model folder") from None
    except ValueError:
        raise ConfigError(f"{path} is not valid JSON: give a model folder with a good config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no model configuration")
    return config


def _dtype(config: Mapping[str, Any], dtype: str | None) -> str:
    name = str(dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype '{name}' is none of {', '.join(DTYPE_BYTES)}")
    return name


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_rank=int(config["kv_lora_rank"]),
        rope_dim=int(config["qk_rope_head_dim"]),
        q_rank=int(config.get("q_lora_rank") or 0),
        nope_dim=int(config["qk_nope_head_dim"]),
        v_dim=int(config["v_head_dim"]),
    )


def _first(config: Mapping[str, Any], names: tuple[str, ...], default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise KeyError(names[0])
    return default


def _weight_bytes(quantised: Mapping[str, Any]) -> float | None:
    """Bytes per weight of the common quantised formats, scales left out."""
    method = str(quantised.get("quant_method", ""))
    if quantised.get("bits"):  # GPTQ, AWQ, AutoRound
        return float(quantised["bits"]) / 8
    if "fp8" in method or quantised.get("load_in_8bit"):
        return 1.0
    if quantised.get("load_in_4bit") or "fp4" in method:
        return 0.5
    for group in (quantised.get("config_groups") or {}).values():  # compressed-tensors
        bits = (group.get("weights") or {}).get("num_bits")
        if bits:
            return float(bits) / 8
    return None


def _kv_bytes(kv_dtype: str | None, quantised: Mapping[str, Any]) -> float | None:
    """Bytes per element of keys and values; None: as everything else."""
    if kv_dtype not in (None, "auto"):
        name = str(kv_dtype).removeprefix("torch.")
        if name.startswith("fp8") or name.startswith("float8") or name.startswith("int8"):
            return 1.0
        return 0.5 if name.startswith("fp4") or name.startswith("int4") else DTYPE_BYTES.get(name)
    bits = (quantised.get("kv_cache_scheme") or {}).get("num_bits")
    return float(bits) / 8 if bits else None


def _window_layers(config: Mapping[str, Any], layers: int) -> float:
    if kinds := config.get("layer_types"):
        return sum("sliding" in str(kind) for kind in kinds) / len(kinds)
    if config.get("use_sliding_window") and config.get("max_window_layers") is not None:  # Qwen2: those above it
        return max(0.0, 1.0 - int(config["max_window_layers"]) / layers)
    return 1.0


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    total = int(_first(config, _EXPERTS, 0) or 0)
    if total <= 1 or config.get("model_type") == "qwen3_5_text":  # dense, though SGLang's configuration has experts
        return None
    intermediate = int(config.get("moe_intermediate_size") or _first(config, _MLP))
    shared = int(_first(config, ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 0))
    shared = shared or int(_first(config, ("n_shared_experts", "num_shared_experts"), 0)) * intermediate
    dense = set(config.get("mlp_only_layers") or ()) | set(range(int(config.get("first_k_dense_replace") or 0)))
    step = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    kinds = layer_kinds(config, layers)
    able = [i for i in range(layers) if "moe" not in kinds or kinds[i] == "moe"]
    sparse = [i for i in able if i not in dense and (i + 1) % step == 0]
    return Experts(total, int(_first(config, _EXPERTS_PER_TOKEN)), intermediate, shared, len(sparse))


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer as configurations name them; without a list "linear_attention" or "full_attention".
    layers: their number."""
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return [str(kind) for kind in kinds]
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        return [{"M": "mamba", "*": "full_attention", "E": "moe"}.get(letter, "mlp") for letter in pattern]
    kda = (config.get("linear_attn_config") or {}).get("kda_layers")  # Kimi-Linear counts from 1
    every = int(config.get("full_attention_interval") or 0)  # Qwen3-Next; Falcon-H1 has both in each layer
    default = "mamba_d_state" in config
    recurrent = [i + 1 in kda if kda else bool((i + 1) % every) if every else default for i in range(layers)]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def state_bytes(config: Mapping[str, Any], ranks: int = 1) -> float:
    """Bytes of one state of a request over all layers of a rank: matrices of Gated DeltaNet, Kimi Delta Attention or
    Mamba2, float32 unless the configuration names another dtype, and last inputs of convolutions, two bytes each; 0
    without recurrent layers.

    Args:
        config: as in config.json; the text decoder may be inside. ranks: tensor-parallel ones.

    Raises KeyError or ValueError: the configuration misses a size.
    """
    config = {**config, **(config.get("text_config") or {})}
    kinds = layer_kinds(config, int(config.get("num_hidden_layers") or 0))
    layers = sum(kind in ("linear_attention", "mamba", "conv") for kind in kinds)
    if not layers:
        return 0.0
    numbers, channels, width = _sizes(config, ranks)
    name = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "float32")
    return layers * (numbers * DTYPE_BYTES[name] + channels * (width - 1) * 2) / ranks


def _sizes(config: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """Of a layer over all ranks: numbers of its matrices, channels and width of its convolution."""
    if linear := config.get("linear_attn_config"):
        heads, head = int(linear["num_heads"]), int(linear["head_dim"])
        return heads * head * head, 3 * heads * head, int(linear["short_conv_kernel_size"])
    if heads := int(config.get("linear_num_value_heads") or 0):
        key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        channels = 2 * int(config["linear_num_key_heads"]) * key + heads * value
        return heads * key * value, channels, int(config["linear_conv_kernel_dim"])
    if width := int(config.get("conv_L_cache") or 0):  # LFM2
        return 0, int(config["hidden_size"]), width
    names = ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"]  # Nemotron-H
    if "mamba_d_state" in config:
        names = ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"]
    heads, head, state, groups, width = (int(config[name]) for name in names)
    groups = groups if groups % ranks == 0 else ranks  # each rank has the whole group of its heads
    return heads * head * state, heads * head + 2 * groups * state, width
