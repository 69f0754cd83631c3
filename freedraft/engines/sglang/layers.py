"""The decoder layers of the model that SGLang runs: which can be left out, and a pass through those that are kept."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce

from freedraft.config import ConfigError
from freedraft.draft_pass import Recipe


class Stage(NamedTuple):
    """A sublayer that runs. norm: before it; sublayer: attention or MLP; is_attention: which of the two; reduce:
    whether what it returns is this tensor-parallel rank's part of a sum, which SGLang's layers leave to the boundary
    behind it."""

    norm: Any
    sublayer: Any
    is_attention: bool
    reduce: bool


Stages = tuple[Stage, ...]

# Modules of SGLang whose layers compute h + attention(norm(h)), then h + mlp(norm(h)), and nothing else.
PLAIN = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def stages_of(decoder: Any, recipe: Recipe) -> Stages:
    """What remains of a decoder without the sublayers that `recipe` skips."""
    kept = []
    for i, layer in enumerate(decoder.layers):
        if i not in recipe.attention:
            attention = layer.self_attn
            kept.append(Stage(layer.input_layernorm, attention, True, not attention.o_proj.reduce_results))
        if i not in recipe.mlp:
            mlp = layer.mlp
            kept.append(Stage(layer.post_attention_layernorm, mlp, False, not mlp.down_proj.reduce_results))
    return tuple(kept)


def run_stages(
    decoder: Any, stages: Stages, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any
) -> torch.Tensor:
    """Hidden states [R, H] of token ids [R] at positions [R] after the kept sublayers and the final norm.

    In the residual stream of a pre-norm model a skipped sublayer is no operation at all. `residual` holds what all
    sublayers before the last one have added up; each norm adds the last one's output to it.
    """
    hidden = decoder.embed_tokens(input_ids)
    residual: torch.Tensor | None = None
    for norm, sublayer, is_attention, reduce in stages:
        if residual is None:
            residual, hidden = hidden, norm(hidden)
        else:
            hidden, residual = norm(hidden, residual)
        if is_attention:
            hidden = sublayer(positions=positions, hidden_states=hidden, forward_batch=batch)
        else:
            hidden = sublayer(hidden)
        if reduce:
            hidden = tensor_model_parallel_all_reduce(hidden)
    return decoder.norm(hidden) if residual is None else decoder.norm(hidden, residual)[0]


def check_structure(model: Any) -> None:
    """Refuse a model that is not a stack of plain pre-norm layers. Told by the code that runs, not by the model's name:
    a family counts as Llama when it runs Llama's code. Raises ConfigError: one line with what is in the way."""
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
