"""Table 2 and the worked example of arXiv 2411.05894, appendix B; what the models that it leaves out add."""

import json
from pathlib import Path

import numpy as np
import pytest
from known import LLAMA3_8B, profile

from freedraft.config import ConfigError
from freedraft.cost.model_shape import ModelShape, read_config
from freedraft.cost.roofline import Operation, Roofline, operations
from layerskip_plugin.skip_set import SkipSet


def operation(name: str, shape: ModelShape, *sizes: float, **rest: bool) -> Operation:
    (found,) = [row for row in operations(shape, *sizes, **rest) if row.name == name]
    return found


def rows(b: int, s: int, kv: int, p: int) -> dict[str, tuple[float, float, float, float]]:
    found = operations(ModelShape.from_config(LLAMA3_8B), b, s, kv, tensor_parallel=p)
    return {row.name: (row.flops, row.read, row.write, row.flops / (row.read + row.write)) for row in found}


@pytest.mark.parametrize(("b", "s", "kv", "p"), [(1, 1, 100, 1), (8, 22, 1000, 1), (8, 22, 1000, 2), (64, 4, 32000, 8)])
def test_every_row_of_table_2(b: int, s: int, kv: int, p: int) -> None:
    h, g, m, bs = 4096, 4, 14336, b * s
    total = kv + s
    table = {
        # name: FLOPs, read, write, FLOPs:IO, each as printed (K and V write 2 b s h / (g p), as their ratio says; the
        # mask has one byte per element, as the text and the ratio of attention say).
        "Q": (2 * bs * h**2 / p, 2 * (bs * h + h**2 / p), 2 * bs * h / p, 1 / ((p + 1) / h + 1 / bs)),
        "K": (
            2 * bs * h**2 / (g * p), 2 * (bs * h + h**2 / (g * p)), 2 * bs * h / (g * p),
            1 / ((g * p + 1) / h + 1 / bs),
        ),
        "attention": (
            4 * bs * total * h / p, 2 * (b * h / (g * p) * (2 * total + g * s)) + bs * total, 2 * bs * h / p,
            1 / (1 / (g * s) + 1 / total + p / (4 * h)),
        ),
        "Y": (2 * bs * h**2 / p, 2 * (bs * h / p + h**2 / p), 2 * bs * h, 1 / ((p + 1) / h + 1 / bs)),
        "H": (
            4 * bs * h * m / p, 2 * (bs * h + 2 * h * m / p), 2 * bs * m / p, 1 / (1 / (2 * h) + p / (2 * m) + 1 / bs),
        ),
        "Z": (2 * bs * h * m / p, 2 * (bs * m / p + h * m / p), 2 * bs * h, 1 / (1 / h + p / m + 1 / bs)),
    }  # fmt: skip
    table["V"] = table["K"]
    found = rows(b, s, kv, p)
    for name, wanted in table.items():
        assert found[name] == pytest.approx(wanted, rel=1e-12), name
    assert set(found) == {*table, "logits"}


def test_the_weights_of_a_step_are_the_models() -> None:
    """At one token, the bytes read are the parameters of the model: 8.03 billion less the embedding's 0.53."""
    read = sum(row.read * row.count for row in operations(ModelShape.from_config(LLAMA3_8B), 1, 1, 0, mask=False))
    assert read / 2 == pytest.approx(7.5e9, rel=0.01)


MIXTRAL = LLAMA3_8B | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def test_experts_are_read_as_tokens_touch_them() -> None:
    shape, one = ModelShape.from_config(MIXTRAL), 2 * 4096 * 14336
    for tokens, experts, rel in ((1, 2, 0.01), (2, 3.5, 0.01), (64, 8, 0.1)):  # 8 (1 - (3/4)^2) = 3.5 of 8
        row = operation("experts: Z", shape, tokens, 1, 0)
        assert row.read * row.count / 32 == pytest.approx(experts * one, rel=rel)
    flops = {n: sum(r.flops * r.count for r in operations(shape, n, 1, 0)) for n in (1, 64)}
    assert flops[64] == pytest.approx(64 * flops[1], rel=1e-9), "computing does not depend on which experts"


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_latent_attention_reads_one_small_entry_per_token() -> None:
    shape = ModelShape.from_config(DEEPSEEK)
    assert shape.experts is not None and shape.experts.layers == 58
    near, far = (operation("attention", shape, 4, 1, kv, mask=False) for kv in (0, 10_000))
    assert far.read - near.read == pytest.approx(2 * 4 * 10_000 * (512 + 64))
    # 37 billion parameters are active per token (the published figure; it counts neither embedding nor all of MLA).
    read = sum(r.read * r.count for r in operations(shape, 1, 1, 0, mask=False)) / 2
    assert read == pytest.approx(37e9, rel=0.05)


def test_shapes_of_other_families() -> None:
    gpt2 = ModelShape.from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    )
    assert (gpt2.hidden, gpt2.kv_heads, gpt2.intermediate, gpt2.gated) == (768, 12, 3072, False)
    qwen3 = ModelShape.from_config(LLAMA3_8B | {"head_dim": 256})
    assert operation("Q", qwen3, 1, 1, 0).flops == 2 * 4096 * 32 * 256
    awq = ModelShape.from_config(LLAMA3_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert awq.weight_bytes == 0.5 and awq.activation_bytes == 2
    nested = ModelShape.from_config({"model_type": "vlm", "text_config": LLAMA3_8B})
    assert nested.layers == 32
    moe = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
           "shared_expert_intermediate_size": 5632, "mlp_only_layers": [0, 1]}  # fmt: skip
    experts = ModelShape.from_config(LLAMA3_8B | moe).experts
    assert experts is not None and (experts.layers, experts.shared, experts.active) == (30, 5632, 4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (None, "give a model folder"),
        ("{", "not valid JSON"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "many"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_attention_heads": 0}, "heads >= 1"),
        ({"num_hidden_layers": -3}, "layers"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, change: dict | str | None, word: str) -> None:
    if change is not None:
        content = change if isinstance(change, str) else json.dumps(LLAMA3_8B | change)
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as error:
        ModelShape.from_config(read_config(tmp_path))
    assert word in str(error.value) and "\n" not in str(error.value)


def test_a_draft_pass_reads_what_it_keeps() -> None:
    """Half of the layers and the head: the time of half of the model's own rows, and of all of the logits."""
    shape = ModelShape.from_config(LLAMA3_8B)
    roofline = Roofline(shape, profile())
    half = SkipSet(shape.layers, frozenset(range(0, shape.layers, 2)), frozenset(range(1, shape.layers, 2)))
    logits = operation("logits", shape, 1, 1, 100, mask=False)
    head = float(logits.seconds(profile().flops(shape.dtype), profile().bandwidth))
    whole = float(roofline.pass_seconds(SkipSet.empty(shape.layers), 1, 100))
    assert whole == pytest.approx(float(roofline.seconds(1, 1, 100)))
    assert float(roofline.pass_seconds(half, 1, 100)) == pytest.approx((whole - head) / 2 + head)
    batches = np.array([1.0, 4.0, 64.0])
    assert np.allclose(
        roofline.pass_seconds(half, batches, 100), [roofline.pass_seconds(half, b, 100) for b in batches]
    )


@pytest.mark.parametrize(
    ("change", "kv_dtype", "share"),
    [
        ({}, "bfloat16", 1.0),
        ({}, "fp8_e4m3", 0.5),
        ({}, "float8_e4m3fn", 0.5),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "auto", 0.5),
        ({"sliding_window": 4096}, None, 0.04096),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, 1.0),
        ({"sliding_window": None}, None, 1.0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 24}, None, 0.25 * 0.04096 + 0.75),
        ({"sliding_window": 1024, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, None, 0.25768),
    ],
)
def test_what_attention_reads_of_a_long_context(change: dict[str, object], kv_dtype: str | None, share: float) -> None:
    """Of fewer bytes, or of a window of the model's own."""

    def read(config: dict[str, object], dtype: str | None) -> float:
        return operation("attention", ModelShape.from_config(config, kv_dtype=dtype), 8, 1, 100_000, mask=False).read

    assert read(LLAMA3_8B | change, kv_dtype) == pytest.approx(share * read(LLAMA3_8B, None), rel=2e-3)
