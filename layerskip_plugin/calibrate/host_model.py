"""`HostModel`: a model in transformers, run sublayer by sublayer: what a skip set would draft, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from layerskip_plugin.calibrate.model import CalibrationModel
from layerskip_plugin.calibrate.pass_times import PassTimes, measure
from layerskip_plugin.calibrate.sample import HostText, Sample
from layerskip_plugin.skip_set import model_fingerprint

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
HEAD_ROWS = 256


class HostModel(CalibrationModel):
    """A transformers decoder (Llama, Qwen2, Qwen3, Mistral or built alike) in float32, the reference of the engines.

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
        self.embed, self.layers, self.last_norm, self.rotary = parts
        self.device = str(self.embed.weight.device)
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

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        width, pad = max(map(len, prompts)), 0
        ids = torch.full((len(prompts), width), pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
        )
        stops = self.model.generation_config.eos_token_id
        stops = set(stops if isinstance(stops, list) else [stops])
        answers = out[:, width:].tolist()
        return [new[: next((k + 1 for k, token in enumerate(new) if token in stops), len(new))] for new in answers]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> HostText:
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
        return HostText(ids, self.best(final), final, keep, torch.stack(states), keys, values, cos, sin)

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        rows = final.reshape(-1, final.shape[-1])
        parts = [self.head(rows[i : i + HEAD_ROWS]).argmax(-1) for i in range(0, len(rows), HEAD_ROWS)]
        return torch.cat(parts).reshape(final.shape[:-1])

    @torch.inference_mode()
    def sublayer(self, index: int, h: Tensor, sample: Sample) -> Tensor:
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

    def norm(self, h: Tensor) -> Tensor:
        normed: Tensor = self.last_norm(h)
        return normed

    def pass_times(self, context: int) -> PassTimes:
        return measure(self, context)

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

    def attend(self, text: HostText, layer: int, q: Tensor, past: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
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
