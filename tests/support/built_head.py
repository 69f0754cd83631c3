"""A tiny model, and an EAGLE head for it that is built, not trained.

EAGLE's head sees a token's embedding and the model's hidden state one token before; its first layer has no input norm.
Here its `fc` takes the embedding alone, embeddings are of unit mean square, so that the norm would change nothing, and
its layer is the model's first one. So it is right as far as the model's weakened second layer changes nothing: with a
factor of .1, .3 and .6 on greedy text .83, .74 and .55 of its first tokens are, .57, .43 and .21 of three.
"""

import json
from pathlib import Path
from typing import Any

from tests.support.models import save, tiny_model, weaken

SGLANG = "LlamaForCausalLMEagle"


def save_model_and_head(
    folder: Path, factor: float, *, architecture: str = "LlamaForCausalLM", **shape: Any
) -> tuple[Path, Path]:
    """The folders of a random Llama of two layers, and of its head, which SGLang has as an architecture of its own."""
    import torch
    from safetensors.torch import save_file

    model = tiny_model("Llama", **{"seed": 11, "num_hidden_layers": 2} | shape)
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.pow(2).mean(1, keepdim=True).sqrt()
    weaken(model, [1], factor)
    saved, head = save(model, folder / "model"), folder / "head"
    config, layer = json.loads((saved / "config.json").read_text()), model.model.layers[0]
    weights = {
        f"layers.0.{name}": weight.detach().clone()
        for name, weight in layer.named_parameters()
        if not name.startswith("input_layernorm")
    }
    size = config["hidden_size"]
    weights["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    if architecture == SGLANG:
        weights["fc.bias"] = torch.zeros(size)
    head.mkdir()
    save_file(weights, head / "model.safetensors")
    (head / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "architectures": [architecture]}))
    return saved, head


def save_model_and_eagle3(folder: Path, factor: float, *, first: int = 0, **shape: Any) -> tuple[Path, Path]:
    """The folders of a random Llama of two layers, and of an EAGLE-3 head, whose layer sees a token's embedding and, as
    its stream, what `fc` makes of two of the model's hidden states one token before: little here. To the stream, in
    which the head has no embedding, the model's first layer adds so much that this does not matter. first: number of
    the states before the first layer; SGLang has -1."""
    import torch
    from safetensors.torch import save_file

    model = tiny_model("Llama", **{"seed": 11, "num_hidden_layers": 2} | shape)
    weaken(model, [0], 12.0)
    weaken(model, [1], factor)
    saved, head = save(model, folder / "model"), folder / "head"
    config, layer = json.loads((saved / "config.json").read_text()), model.model.layers[0]
    size = config["hidden_size"]
    weights = {f"midlayer.{name}": weight.detach().clone() for name, weight in layer.named_parameters()}
    for name in ("q", "k", "v"):
        own = weights[f"midlayer.self_attn.{name}_proj.weight"]
        weights[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat((own, 0.02 * torch.randn_like(own)), 1)
    weights |= {"fc.weight": 0.002 * torch.randn(size, 2 * size), "midlayer.hidden_norm.weight": torch.ones(size)}
    weights |= {"norm.weight": model.model.norm.weight.detach().clone()}
    weights |= {"lm_head.weight": model.lm_head.weight.detach().clone()}
    head.mkdir()
    save_file(weights, head / "model.safetensors")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
    }
    own |= {"norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [first, first + 1]}}
    (head / "config.json").write_text(json.dumps(config | own))
    return saved, head


def save_qwen3_next_with_mtp(folder: Path, factor: float, **shape: Any) -> Path:
    """A random Qwen3-Next of a layer with attention and a weakened recurrent one, whose multi-token prediction layer is
    the one with attention again. SGLang takes every second layer for that one."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.support.model_classes import RECURRENT, SHAPE

    given = SHAPE | RECURRENT["Qwen3Next"] | {"layer_types": ["full_attention", "linear_attention"]} | shape
    given |= {"pad_token_id": None}  # whose embedding would be of zeros
    model = tiny_model("Qwen3Next", **{"seed": 11, "num_hidden_layers": 2} | given)
    embeddings = model.model.embed_tokens.weight.data
    embeddings /= embeddings.pow(2).mean(1, keepdim=True).sqrt()
    full = given["layer_types"].index("full_attention")
    for name, weight in model.model.layers.named_parameters():
        if not name.startswith(f"{full}.") and ("out_proj" in name or "down_proj" in name):
            weight.data *= factor
    (file,) = save(model, folder).glob("*.safetensors")
    weights, size = load_file(file), model.config.hidden_size
    own = f"model.layers.{full}."
    again = {name: weight.clone() for name, weight in weights.items() if name.startswith(own)}
    weights |= {name.replace(own, "mtp.layers.0."): weight for name, weight in again.items()}
    weights["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    weights |= {f"mtp.pre_fc_norm_{of}.weight": torch.zeros(size) for of in ("hidden", "embedding")}
    weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def save_glm_with_mtp(folder: Path, factor: float, *, size: int = 64, inner: int = 96, vocab_size: int = 24) -> Path:
    """A random GLM4-MoE of a dense layer and a weakened one of experts, whose multi-token prediction layer (the third)
    is the first one again: its experts add nothing, and its shared expert is the first layer's MLP."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(3)
    heads, width, experts, weights = 2, 32, 4, {}

    def put(prefix: str, scale: float, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            own = scale if name.startswith(("o_", "down_")) else 1.0
            weights[f"{prefix}{name}.weight"] = 0.3 * own * torch.randn(*shape)

    def put_mlp(prefix: str, scale: float) -> None:
        put(prefix, scale, gate_proj=(inner, size), up_proj=(inner, size), down_proj=(size, inner))

    def put_experts(layer: int, scale: float) -> None:
        put(f"model.layers.{layer}.mlp.", scale, gate=(experts, size))
        weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
        for j in range(experts):
            put_mlp(f"model.layers.{layer}.mlp.experts.{j}.", scale)

    for layer, scale in enumerate((1.0, factor)):
        prefix = f"model.layers.{layer}."
        shapes = {"q_proj": (heads * width, size), "k_proj": (width, size), "v_proj": (width, size)}
        put(f"{prefix}self_attn.", scale, **shapes, o_proj=(size, heads * width))
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(size)
    put_mlp("model.layers.0.mlp.", 1.0)
    put_experts(1, factor)
    put_mlp("model.layers.1.mlp.shared_experts.", factor)
    put_experts(2, 0.0)
    for name, weight in [*weights.items()]:
        if name.startswith("model.layers.0."):
            name = name.replace("layers.0.mlp.", "layers.2.mlp.shared_experts.").replace("layers.0.", "layers.2.")
            weights[name] = weight
    embeddings = torch.randn(vocab_size, size)
    embeddings /= embeddings.pow(2).mean(1, keepdim=True).sqrt()
    put("", 1.0, lm_head=(vocab_size, size))
    ones = torch.ones(size)
    weights |= {"model.embed_tokens.weight": embeddings, "model.norm.weight": ones}
    own = {"enorm": ones, "hnorm": ones, "eh_proj": torch.cat((torch.eye(size), torch.zeros(size, size)), 1)}
    own |= {"shared_head.norm": ones, "shared_head.head": weights["lm_head.weight"], "embed_tokens": embeddings}
    weights |= {f"model.layers.2.{name}.weight": weight for name, weight in own.items()}
    folder.mkdir(exist_ok=True)
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")
    config = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "dtype": "float32"}
    config |= {"hidden_size": size, "intermediate_size": inner, "moe_intermediate_size": inner, "head_dim": width}
    config |= {"n_routed_experts": experts, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "vocab_size": vocab_size, "bos_token_id": 0}
    config |= {"num_attention_heads": heads, "num_key_value_heads": 1, "eos_token_id": 1}
    config |= {"max_position_embeddings": 256}
    config |= {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_on_top(kind: str, folder: Path, factor: float, **shape: Any) -> tuple[Path, dict[str, Any]]:
    """A model of this shape with a head, and vLLM's speculative configuration of n-grams on top of it. kind: eagle,
    eagle3, or mtp, whose GLM4-MoE takes the vocabulary alone."""
    method: dict[str, Any] = {"method": f"sssd+{kind}", "num_speculative_tokens": 3, "policy": "fixed"}
    if kind == "mtp":
        return save_glm_with_mtp(folder / "model", factor, vocab_size=shape["vocab_size"]), method
    make = {"eagle": save_model_and_head, "eagle3": save_model_and_eagle3}[kind]
    model, head = make(folder, factor, **shape)
    return model, method | {"model": str(head)}
