"""Recurrent states by a configuration alone: as vLLM's own functions size them, and of the models' published counts."""

from typing import Any

import pytest

from freedraft.cost.model_shape import ModelShape, state_bytes
from freedraft.cost.roofline import weight_bytes
from tests.support import published as models


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (models.QWEN3_NEXT_80B, 80e9), (models.KIMI_LINEAR_48B, 48e9), (models.NEMOTRON3_NANO_30B, 31.6e9),
        (models.QWEN36_27B, 27e9), (models.QWEN3_30B, 30.5e9), (models.QWEN3_235B, 235e9),
    ],
)  # fmt: skip
def test_the_weights_of_published_models(config: dict[str, Any], weights: float) -> None:
    """A recurrent layer counts as one of attention, which may have fewer."""
    assert weight_bytes(ModelShape.from_config(config)) / 2 == pytest.approx(weights, rel=0.1)


def vllm_shapes(config: dict[str, Any], ranks: int) -> tuple[int, Any]:
    """Number of recurrent layers, and shapes of the windows and matrices of one by vLLM."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    config = config | config.get("text_config", {})
    if linear := config.get("linear_attn_config"):
        return len(linear["kda_layers"]), Shapes.kda_state_shape(
            ranks, linear["num_heads"], linear["head_dim"], conv_kernel_size=linear["short_conv_kernel_size"]
        )
    if "linear_num_value_heads" in config:
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        shapes = Shapes.gated_delta_net_state_shape(ranks, *(config[f"linear_{name}"] for name in sizes))
        return config["num_hidden_layers"] * 3 // 4, shapes
    if "conv_L_cache" in config:
        return config["layer_types"].count("conv"), Shapes.short_conv_state_shape(ranks, config["conv_dim"], 3)
    if "mamba_d_state" in config:
        layers = config.get("layer_types", ["mamba"] * config["num_hidden_layers"]).count("mamba")
        heads, groups = config["mamba_n_heads"], config["mamba_n_groups"]
    else:
        layers, heads, groups = config["hybrid_override_pattern"].count("M"), config["mamba_num_heads"], 8
    return layers, Shapes.mamba2_state_shape(ranks, heads * 64, groups, heads, 64, 128, 4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "config",
    [
        models.QWEN3_NEXT_80B, models.QWEN36_27B, models.KIMI_LINEAR_48B, models.NEMOTRON3_NANO_30B,
        models.FALCON_H1, models.GRANITE4, models.LFM2,
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_states_are_as_large_as_vllm_says(config: dict[str, Any], ranks: int) -> None:
    pytest.importorskip("vllm")
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    layers, shapes = vllm_shapes(config, ranks)
    dtypes = (torch.bfloat16, torch.float32)[: len(shapes)]
    one = MambaSpec(shapes=shapes, dtypes=dtypes, block_size=1).page_size_bytes
    assert state_bytes(config, ranks) == layers * one > 0


def test_attention_has_no_state_and_a_missing_size_is_an_error() -> None:
    assert state_bytes(models.QWEN3_30B) == 0
    with pytest.raises(KeyError, match="linear_key_head_dim"):
        state_bytes({name: value for name, value in models.QWEN3_NEXT_80B.items() if name != "linear_key_head_dim"})
    halved = state_bytes(models.QWEN3_NEXT_80B | {"mamba_ssm_dtype": "bfloat16"})
    assert state_bytes(models.QWEN3_NEXT_80B) - halved == 36 * 32 * 128 * 128 * 2
