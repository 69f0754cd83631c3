"""The roofline of a decoding step: arXiv 2411.05894, appendix B, Table 2, and the same for MLA and MoE."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.config import ConfigError
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.draft_model import Recipe
from freedraft.step import EngineContext

Number = float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of Table 2, on one of p tensor-parallel ranks; for several s_q at once, arrays of one shape."""

    name: str
    flops: Number
    read: Number  # bytes
    write: Number  # bytes
    count: Number  # runs per forward pass

    def seconds(self, peak_flops: float, bandwidth: float) -> Number:
        """Time of all its runs: the slower of computing and moving."""
        return self.count * np.maximum(self.flops / peak_flops, (self.read + self.write) / bandwidth)


def product(name: str, shape: ModelShape, n: Number, rows: float, columns: float, count: Number) -> Operation:
    """A matrix product of n query tokens: X [n, rows] times W [rows, columns], both local to the rank."""
    a, w = shape.activation_bytes, shape.weight_bytes
    return Operation(name, 2 * n * rows * columns, a * n * rows + w * rows * columns, a * n * columns, count)


def operations(
    shape: ModelShape, batch: Number, s_q: Number, s_kv: float, *, tensor_parallel: int = 1, mask: bool = True,
    attention: float = 1.0, mlp: float = 1.0,
) -> list[Operation]:  # fmt: skip
    """The rows of Table 2 for a batch of b requests with s_q query tokens each, over contexts of s_kv tokens.

    The head is added to the paper's rows, since small models spend much of a step there. MLA is taken as engines run
    it while decoding, with the up-projections absorbed: every head attends to the compressed cache itself. Of E experts
    with k per token, n query tokens are expected to touch E (1 - (1 - k/E)^n), and all of those are read.

    Args:
        tensor_parallel: p. mask: whether a mask of one byte per element is read, as for trees.
        attention, mlp: shares of these sublayers that run; a draft pass skips the others.
    """
    b, p = batch, tensor_parallel
    n = b * s_q
    h = shape.hidden
    attend = _latent if shape.latent else _attention
    rows = attend(shape, b, s_q, s_kv, p, mask, shape.layers * attention)
    experts = shape.experts
    sparse = experts.layers * mlp if experts else 0
    dense = shape.layers * mlp - sparse
    if dense:
        rows += _mlp("", shape, n, shape.intermediate / p, dense)
    if experts and sparse:
        touched = experts.total * (1 - (1 - experts.active / experts.total) ** n)
        per_expert = n * experts.active / touched
        rows += [product("router", shape, n, h, experts.total, sparse)]
        rows += _mlp("experts: ", shape, per_expert, experts.intermediate / p, sparse * touched)
        if experts.shared:
            rows += _mlp("shared expert: ", shape, n, experts.shared / p, sparse)
    rows.append(product("logits", shape, n, h, shape.vocab / p, 1))
    return rows


def _attention(
    shape: ModelShape, b: Number, s_q: Number, s_kv: float, p: int, mask: bool, layers: float
) -> list[Operation]:
    n, h = b * s_q, shape.hidden
    q, kv = shape.heads * shape.head_dim / p, max(shape.kv_heads / p, 1) * shape.head_dim
    total = shape.attended(s_kv) + s_q
    read = shape.kv_bytes * b * 2 * total * kv + shape.activation_bytes * n * q + (n * total if mask else 0)
    return [
        product("Q", shape, n, h, q, layers),
        product("K", shape, n, h, kv, layers),
        product("V", shape, n, h, kv, layers),
        Operation("attention", 4 * n * total * q, read, shape.activation_bytes * n * q, layers),
        product("Y", shape, n, q, h, layers),
    ]


def _latent(
    shape: ModelShape, b: Number, s_q: Number, s_kv: float, p: int, mask: bool, layers: float
) -> list[Operation]:
    latent = shape.latent
    assert latent is not None
    n, h, heads = b * s_q, shape.hidden, shape.heads / p
    total, entry = s_kv + s_q, latent.kv_rank + latent.rope_dim
    q = heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        rows = [
            product("Q down", shape, n, h, latent.q_rank, layers),
            product("Q up", shape, n, latent.q_rank, q, layers),
        ]
    else:
        rows = [product("Q", shape, n, h, q, layers)]
    read = shape.kv_bytes * b * total * entry + shape.activation_bytes * n * heads * entry
    read += n * total if mask else 0
    attended = shape.activation_bytes * n * heads * latent.kv_rank
    return [
        *rows,
        product("KV down", shape, n, h, entry, layers),
        product("K absorbed", shape, n, latent.nope_dim, latent.kv_rank, layers * heads),
        Operation("attention", 2 * n * total * heads * (entry + latent.kv_rank), read, attended, layers),
        product("V absorbed", shape, n, latent.kv_rank, latent.v_dim, layers * heads),
        product("Y", shape, n, heads * latent.v_dim, h, layers),
    ]


def _mlp(name: str, shape: ModelShape, n: Number, width: float, count: Number) -> list[Operation]:
    """H = SwiGLU(Y W1) and Z = H W2; W1 holds both input projections; only the product of their
    results is written."""
    h, a, w = shape.hidden, shape.activation_bytes, shape.weight_bytes
    inputs = 2 if shape.gated else 1
    up = Operation(f"{name}H", 2 * inputs * n * h * width, a * n * h + inputs * w * h * width, a * n * width, count)
    return [up, product(f"{name}Z", shape, n, width, h, count)]


def weight_bytes(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Bytes of the weights of a rank: what a step of many tokens reads besides activations, and the embedding."""
    bare = replace(shape, activation_bytes=0.0, kv_bytes=0.0)
    rows = operations(bare, 1e6, 1, 0.0, tensor_parallel=tensor_parallel, mask=False)
    embedding = shape.vocab * shape.hidden * shape.activation_bytes / tensor_parallel
    return embedding + float(sum(row.count * row.read for row in rows))


@dataclass(frozen=True, slots=True)
class Roofline:
    """Predicted step times of one model on one kind of hardware."""

    shape: ModelShape
    profile: HardwareProfile
    tensor_parallel: int = 1  # number of ranks; their communication is left out, as in the paper
    mask: bool = False  # whether attention reads a tree mask

    def seconds(self, batch: int, query_tokens: Number, context: float) -> Number:
        """Time of one forward pass over b >= 1 requests. query_tokens: over the whole batch, b * s_q, of which requests
        have equal shares; context: tokens in the cache per request, s_kv."""
        return self._seconds(batch, query_tokens / batch, context, mask=self.mask)

    def pass_seconds(self, recipe: Recipe, batch: Number, context: float) -> Number:
        """Time of one draft pass: one token per request through the sublayers that `recipe` keeps, and the head."""
        layers, window = recipe.n_layers, recipe.window
        context = context if window is None else min(context, window.tokens)
        attention, mlp = 1 - len(recipe.attention) / layers, 1 - len(recipe.mlp) / layers
        return self._seconds(batch, 1, context, mask=False, attention=attention, mlp=mlp)

    def _seconds(self, batch: Number, s_q: Number, s_kv: float, **rest: Any) -> Number:
        peak = self.profile.flops(self.shape.dtype)
        rows = operations(self.shape, batch, s_q, s_kv, tensor_parallel=self.tensor_parallel, **rest)
        return sum((row.seconds(peak, self.profile.bandwidth) for row in rows), start=np.float64(0.0))


def roofline_of(context: EngineContext, profile: HardwareProfile) -> Roofline:
    """The roofline of an engine's model. Raises ConfigError: its configuration cannot be read."""
    if context.hf_config is None:
        raise ConfigError("the model's configuration is not known")
    shape = ModelShape.from_config(context.hf_config.to_dict(), dtype=context.dtype, kv_dtype=context.kv_dtype)
    return Roofline(shape, profile, context.tensor_parallel, mask=context.widths is not None)


def knee_of(context: EngineContext, profile: HardwareProfile) -> int | None:
    """Query tokens per step at the ridge for the engine's weights; None if its model is unknown."""
    if context.hf_config is None or profile.knee is not None:
        return None
    try:
        return profile.ridge_of(roofline_of(context, profile).shape.weight_bytes)
    except ConfigError:
        return None
