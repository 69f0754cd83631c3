"""Decoder layers of SGLang's models: the supported structure, and the sublayers that a recipe keeps."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce

from freedraft.config import ConfigError
from freedraft.recipe import Recipe

Stage = tuple[Any, Any, bool]  # A sublayer that runs; see `run_kept`
Stages = tuple[Stage, ...]

# Modules of SGLang with layers that compute h + attention(norm(h)), then h + mlp(norm(h)), and nothing else.
PLAIN = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def stages_of(decoder: Any, recipe: Recipe) -> Stages:
    """Return the sublayers of a decoder that `recipe` keeps, in order."""
    kept: list[Stage] = []
    for i, layer in enumerate(decoder.layers):
        if i not in recipe.attention:
            attention = layer.self_attn
            kept.append((layer.input_layernorm, _whole(attention, attention.o_proj), True))
        if i not in recipe.mlp:
            kept.append((layer.post_attention_layernorm, _whole(layer.mlp, layer.mlp.down_proj), False))
    return tuple(kept)


def _whole(sublayer: Any, projection: Any) -> Any:
    """Return a sublayer with its full output on every tensor-parallel rank: some of SGLang's leave the sum over ranks
    to the next layer boundary."""
    if projection.reduce_results:
        return sublayer
    return _Summed(sublayer)


class _Summed(NamedTuple):
    sublayer: Any

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(self.sublayer(*args, **kwargs))


def check_structure(model: Any) -> None:
    """Check that a model is a stack of plain pre-norm layers, by the code that runs instead of the model's name: a
    family counts as Llama if it runs Llama's code. Raises ConfigError: one line with the reason."""
    name = type(model).__name__

    def refuse(why: str) -> None:
        raise ConfigError(
            f"cannot skip layers of {name} ({why}): what runs as Llama, Mistral, Qwen2 or Qwen3 can be drafted with; "
            "use --speculative-algorithm sssd"
        )

    known = []
    for module, prefix in PLAIN.items():
        code = importlib.import_module(f"sglang.srt.models.{module}")
        known.append(
            tuple(getattr(code, f"{prefix}{part}") for part in ("ForCausalLM", "Model", "DecoderLayer", "MLP"))
        )

    def runs(module: Any, part: int) -> bool:
        return any(type(module).forward is kind[part].forward for kind in known)

    if not runs(model, 0) or not runs(getattr(model, "model", None), 1):
        refuse("its forward pass is its own")
    layers = list(model.model.layers)
    if getattr(model, "capture_aux_hidden_states", False):
        refuse("it captures hidden states")
    for layer in layers:
        if not runs(layer, 2):
            refuse(f"its layers are of type {type(layer).__name__}")
        if not runs(layer.mlp, 3):
            refuse(f"its MLPs are of type {type(layer.mlp).__name__}")
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            linear = getattr(norm, "_quant_linear", None)
            if linear is not None and getattr(linear, "input_scale", None) is not None:
                refuse("its norms quantise what they hand on")
