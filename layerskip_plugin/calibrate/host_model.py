"""A model on the host, run sublayer by sublayer: it shows without an engine what a skip set would draft.

Every token of a text is drafted as a serving engine's first draft pass would do it: its own hidden state goes through
the kept sublayers, and it attends to the whole model's KV of everything before it and to its own draft KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from layerskip_plugin.calibrate.sample import Sample, Text
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
ROWS = 2048
"""Rows (sets x tokens) in one pass: bounds memory at about 0.1 GB for a small model."""
HEAD_ROWS = 256


class HostModel:
    """A transformers decoder (Llama, Qwen2, Qwen3, Mistral or built alike) in float32.

    Args:
        model: a causal language model of transformers, on the CPU or any other device.

    Raises:
        ValueError: it is built differently.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        inner = getattr(model, "model", None)
        parts: list[Any] = [getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
        if any(part is None for part in parts) or getattr(model, "lm_head", None) is None:
            raise ValueError(f"{type(model).__name__}: not a decoder built like Llama; its layers cannot be skipped")
        self.embed, self.layers, self.norm, self.rotary = parts
        self.head = model.lm_head
        for layer in self.layers:
            wrong = {name for name, _ in layer.named_children()} ^ LAYER_PARTS
            wrong |= {name for name, _ in layer.self_attn.named_children()} - ATTENTION_PARTS
            if wrong:
                raise ValueError(
                    f"{type(model).__name__}: its layers are not built like Llama's ({', '.join(sorted(wrong))}); "
                    "they cannot be skipped"
                )
        attention = self.layers[0].self_attn
        self.head_size = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.n_layers = len(self.layers)
        self.fingerprint = model_fingerprint(self.config)
        self._check()

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> HostModel:
        """Load the model in a Hugging Face folder to a device; "auto" is CUDA where there is one.

        Raises:
            ValueError: no such model or device, or a model that is built differently.
        """
        from transformers import AutoModelForCausalLM

        if not (folder / "config.json").is_file():
            raise ValueError(f"model: {folder} holds no config.json; give a Hugging Face model folder")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
            raise ValueError(f"device: there is no {device} here; choose cpu")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        return cls(model.to(device))

    @property
    def device(self) -> str:
        """The device of the weights: "cpu", "cuda:0"."""
        return str(self.embed.weight.device)

    @property
    def sublayers(self) -> int:
        """Number of sublayers, 2L: attention 0, MLP 0, attention 1, ..."""
        return 2 * self.n_layers

    def empty(self) -> SkipSet:
        """The set that skips nothing of this model."""
        return SkipSet.empty(self.n_layers, self.fingerprint)

    def skip(self, sublayers: Sequence[int]) -> SkipSet:
        """The set that skips these sublayers of this model."""
        return SkipSet.of_sublayers(sublayers, self.n_layers, self.fingerprint)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> Text:
        """Read a text with the whole model; `keep`: ascending positions whose hidden states a `Sample` needs.

        Raises:
            ValueError: an empty text, or one longer than a sliding window of the model.
        """
        window = getattr(self.config, "sliding_window", None)
        if not len(tokens) or (window and len(tokens) > window and getattr(self.config, "use_sliding_window", True)):
            raise ValueError(f"a text must have between 1 and {window or 'any number of'} tokens, not {len(tokens)}")
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.embed.weight.device)
        h = self.embed(ids)
        cos, sin = (x[0] for x in self.rotary(h, torch.arange(len(ids), device=ids.device)[None]))
        keep = (torch.zeros(0, dtype=torch.int64) if keep is None else keep).to(ids.device)
        keys, values, states = [], [], [h[keep]]
        for layer in self.layers:
            q, k, v = self.project(layer, h, cos, sin)
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            mixed = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=self.scale, enable_gqa=True
            )[0]
            h = h + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
            states.append(h[keep])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            states.append(h[keep])
            keys.append(k.contiguous())
            values.append(v.contiguous())
        final = self.norm(h)
        return Text(ids, keys, values, cos, sin, self.best(final), final, keep, torch.stack(states))

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        """int64[...]: the top-1 token of float32[..., hidden] normed hidden states."""
        rows = final.reshape(-1, final.shape[-1])
        parts = [self.head(rows[i : i + HEAD_ROWS]).argmax(-1) for i in range(0, len(rows), HEAD_ROWS)]
        return torch.cat(parts).reshape(final.shape[:-1])

    @torch.inference_mode()
    def sublayer(self, index: int, h: Tensor, sample: Sample) -> Tensor:
        """The hidden states behind sublayer `index`, for float32[J, N, hidden] before it; N tokens of `sample`."""
        layer = self.layers[index // 2]
        if index % 2:
            return h + layer.mlp(layer.post_attention_layernorm(h))
        cos, sin = sample.gather(lambda t: t.cos), sample.gather(lambda t: t.sin)
        q, k, v = self.project(layer, h, cos, sin)
        mixed, start = torch.empty_like(q), 0
        for text, positions in zip(sample.texts, sample.positions, strict=True):
            rows = slice(start, start + len(positions))
            start = rows.stop
            near_k, near_v = (x[:, rows].flatten(0, 1)[:, None] for x in (k, v))
            past = positions.to(h.device).repeat(len(h))
            attended = self.attend(text, index // 2, q[:, rows].flatten(0, 1), past, near_k, near_v)
            mixed[:, rows] = attended.unflatten(0, (len(h), -1))
        return h + layer.self_attn.o_proj(mixed.flatten(2))

    @torch.inference_mode()
    def scores(self, sets: Sequence[SkipSet], sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per set: the share of tokens with the whole model's top-1 choice, and the mean cosine to its last state."""
        best, final = sample.gather(lambda t: t.best), sample.gather(lambda t: t.final)
        agreement, cosine = [], []
        size = max(1, ROWS // len(sample))
        for i in range(0, len(sets), size):
            drafted = self.final_states(sets[i : i + size], sample)
            agreement.append((self.best(drafted) == best).double().mean(1))
            cosine.append(functional.cosine_similarity(drafted, final, dim=-1).double().mean(1))
        return torch.cat(agreement).numpy(force=True), torch.cat(cosine).numpy(force=True)

    @torch.inference_mode()
    def final_states(self, sets: Sequence[SkipSet], sample: Sample) -> Tensor:
        """float32[J, N, hidden]: the normed last hidden states of `sample`'s tokens under each set, in one pass."""
        bits = torch.tensor([skip.bits for skip in sets])
        # Up to the first sublayer that one of them skips, all are the whole model.
        skipped = bits.any(0).nonzero()
        start = int(skipped[0]) if len(skipped) else self.sublayers
        h = sample.states(start)[None].repeat(len(sets), 1, 1)
        for index in range(start, self.sublayers):
            keep = (~bits[:, index]).nonzero()[:, 0]
            if len(keep) == len(sets):
                h = self.sublayer(index, h, sample)
            elif len(keep):
                h[keep] = self.sublayer(index, h[keep], sample)
        return self.norm(h)

    def project(self, layer: Any, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [..., N, heads, head size] for h [..., N, hidden]; q and k rotated."""
        attention, x = layer.self_attn, layer.input_layernorm(h)
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_size)) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin, v

    def attend(self, text: Text, layer: int, q: Tensor, past: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        """Attention of each row over the whole model's KV before `past` and over its own `near` entries.

        Shapes: q [N, heads, D], past int64[N], near_k and near_v [N, c, kv heads, D]; gives [N, heads, D].
        """
        max_past = int(past.max())
        keys, values = text.keys[layer][:, :max_past], text.values[layer][:, :max_past]
        n, _, kv, size = near_k.shape
        q = q.reshape(n, kv, -1, size) * self.scale
        far = torch.einsum("nkgd,ktd->nkgt", q, keys)
        far.masked_fill_((torch.arange(max_past, device=past.device) >= past[:, None])[:, None, None], -torch.inf)
        close = torch.einsum("nkgd,nckd->nkgc", q, near_k)
        weight = torch.cat([far, close], -1).softmax(-1)
        mixed = torch.einsum("nkgt,ktd->nkgd", weight[..., :max_past], values)
        mixed += torch.einsum("nkgc,nckd->nkgd", weight[..., max_past:], near_v)
        return mixed.reshape(n, -1, size)

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare with the model's own forward: its layers may have the names of Llama's and compute something else."""
        ids = torch.arange(3, 19, device=self.embed.weight.device) % self.embed.weight.shape[0]
        expected = self.model.model(ids[None], use_cache=False).last_hidden_state[0]
        positions = torch.arange(len(ids))
        text = self.read(ids.tolist(), positions)
        drafted = self.final_states([self.empty()], Sample([text], [positions]))[0]
        for states in (text.final, drafted):
            if not torch.allclose(states, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().mean())):
                raise ValueError(f"{type(self.model).__name__}: its layers compute something else than Llama's do")


def _half_turn(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)
