"""A model on the host, read sublayer by sublayer: what a skip set would draft, without an engine.

Every token of a text is drafted as a serving engine's first draft pass would do it: its own hidden state goes through
the kept sublayers, and it attends to the whole model's KV of everything before it and to its own draft KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from layerskip_plugin.skip_set import SkipSet, model_fingerprint

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
ROWS = 2048
"""Rows (sets x tokens) in one pass: bounds memory at about 0.1 GB for a small model."""
HEAD_ROWS = 256


@dataclass(frozen=True)
class Text:
    """A text that the whole model has read.

    Attributes:
        tokens: int64[T].
        keys, values: per layer float32[kv heads, T, head size]; keys are rotated.
        cos, sin: float32[T, head size] of the rotary embedding.
        best: int64[T], the whole model's top-1 next token after each.
        final: float32[T, hidden], the last hidden state, normed.
        kept: int64[K], ascending places whose states are kept.
        states: float32[2L + 1, K, hidden], before each sublayer and behind the last.
    """

    tokens: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    cos: Tensor
    sin: Tensor
    best: Tensor
    final: Tensor
    kept: Tensor
    states: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Sample:
    """Tokens of some texts that skip sets are tried on.

    Attributes:
        texts: texts that were read with these places kept.
        positions: per text, int64[r] ascending places of the tokens.
    """

    texts: list[Text]
    positions: list[Tensor]

    @classmethod
    def spread(
        cls,
        host: HostModel,
        texts: Sequence[Sequence[int]],
        tokens: int,
        first: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Sample:
        """`tokens` places drawn from all texts, from place `first` of each on (0 by default); the model reads them.

        Raises:
            ValueError: the texts are shorter than that.
        """
        starts = list(first) if first is not None else [0] * len(texts)
        places = [(i, p) for i, text in enumerate(texts) for p in range(min(starts[i], len(text) - 1), len(text))]
        if len(places) < tokens:
            raise ValueError(f"{tokens} tokens are wanted, but the texts hold {len(places)}: give more text")
        chosen = np.random.default_rng(seed).choice(len(places), tokens, replace=False)
        by_text: dict[int, list[int]] = {}
        for c in sorted(chosen.tolist()):
            by_text.setdefault(places[c][0], []).append(places[c][1])
        positions = [torch.tensor(p) for p in by_text.values()]
        return cls([host.read(texts[i], p) for i, p in zip(by_text, positions, strict=True)], positions)

    @classmethod
    def newest(cls, host: HostModel, text: Sequence[int], tokens: int) -> Sample:
        """The last tokens of one text."""
        positions = torch.arange(max(0, len(text) - tokens), len(text))
        return cls([host.read(text, positions)], [positions])

    def __len__(self) -> int:
        return sum(len(p) for p in self.positions)

    def gather(self, what: Callable[[Text], Tensor]) -> Tensor:
        """Of each text, what is at its places; concatenated."""
        pairs = zip(self.texts, self.positions, strict=True)
        return torch.cat([what(text)[p.to(text.tokens.device)] for text, p in pairs])

    def states(self, index: int) -> Tensor:
        """float32[N, hidden]: the whole model's hidden states before sublayer `index`."""
        pairs = zip(self.texts, self.positions, strict=True)
        return torch.cat(
            [text.states[index, torch.searchsorted(text.kept, p.to(text.kept.device))] for text, p in pairs]
        )


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
        """The model in a Hugging Face folder, on a device; "auto" is CUDA where there is one.

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
        """Where it computes: "cpu", "cuda:0"."""
        return str(self.embed.weight.device)

    @property
    def sublayers(self) -> int:
        """2L: attention 0, MLP 0, attention 1, ..."""
        return 2 * self.n_layers

    def empty(self) -> SkipSet:
        """The set that skips nothing of this model."""
        return SkipSet.empty(self.n_layers, self.fingerprint)

    def skip(self, sublayers: Sequence[int]) -> SkipSet:
        """The set that skips these sublayers of this model."""
        return SkipSet.of_sublayers(sublayers, self.n_layers, self.fingerprint)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> Text:
        """Read a text with the whole model; `keep`: ascending places whose hidden states are kept for a `Sample`.

        Raises:
            ValueError: an empty text, or one longer than a sliding window of the model.
        """
        window = getattr(self.config, "sliding_window", None)
        if not len(tokens) or (window and len(tokens) > window and getattr(self.config, "use_sliding_window", True)):
            raise ValueError(f"a text must have between 1 and {window or 'any number of'} tokens, not {len(tokens)}")
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.embed.weight.device)
        h = self.embed(ids)
        cos, sin = (x[0] for x in self.rotary(h, torch.arange(len(ids), device=ids.device)[None]))
        keep = torch.zeros(0, dtype=torch.int64) if keep is None else keep
        keep = keep.to(ids.device)
        keys, values, states = [], [], [h[keep]]
        for layer in self.layers:
            q, k, v = self._project(layer, h, cos, sin)
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
        q, k, v = self._project(layer, h, cos, sin)
        mixed, start = torch.empty_like(q), 0
        for text, positions in zip(sample.texts, sample.positions, strict=True):
            rows = slice(start, start + len(positions))
            start = rows.stop
            near_k, near_v = (x[:, rows].flatten(0, 1)[:, None] for x in (k, v))
            past = positions.to(h.device).repeat(len(h))
            done = self._attend(text, index // 2, q[:, rows].flatten(0, 1), past, near_k, near_v)
            mixed[:, rows] = done.unflatten(0, (len(h), -1))
        return h + layer.self_attn.o_proj(mixed.flatten(2))

    @torch.inference_mode()
    def finals(self, sets: Sequence[SkipSet], sample: Sample) -> Tensor:
        """float32[J, N, hidden]: the normed last hidden states of `sample`'s tokens under each set."""
        size = max(1, ROWS // len(sample))
        return torch.cat([self._finals(sets[i : i + size], sample) for i in range(0, len(sets), size)])

    @torch.inference_mode()
    def scores(self, sets: Sequence[SkipSet], sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per set: the share of tokens with the whole model's top-1 choice, and the mean cosine to its last state."""
        best, final = sample.gather(lambda t: t.best), sample.gather(lambda t: t.final)
        agreement, cosine = [], []
        size = max(1, ROWS // len(sample))
        for i in range(0, len(sets), size):
            ours = self._finals(sets[i : i + size], sample)
            agreement.append((self.best(ours) == best).double().mean(1))
            cosine.append(functional.cosine_similarity(ours, final, dim=-1).double().mean(1))
        return torch.cat(agreement).numpy(force=True), torch.cat(cosine).numpy(force=True)

    @torch.inference_mode()
    def chains(
        self, skip: SkipSet, text: Text, first: int, length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Greedy drafts of `length` tokens from every place of a text on, as rounds of an engine would make them.

        A round at place t reads the whole model's KV before t, and its own of the tokens from t on.

        Args:
            skip: what the draft passes skip.
            text: a text that was read.
            first: the first place that a round starts from.
            length: tokens per draft.

        Returns:
            int64[T - first, length] tokens, float32[..., length, 10] largest probabilities, float32[..., length]
            entropies.
        """
        past = torch.arange(first, len(text), device=text.tokens.device)
        token = text.tokens[first:]
        near: list[tuple[Tensor, Tensor] | None] = [None] * self.n_layers
        drafts, tops, entropies = [], [], []
        longest = len(text) + length
        cos, sin = (x[0] for x in self.rotary(text.final[:1], torch.arange(longest, device=past.device)[None]))
        for step in range(length):
            h = self.embed(token)
            for index in range(self.n_layers):
                layer = self.layers[index]
                if index not in skip.attention:
                    q, k, v = self._project(layer, h, cos[past + step], sin[past + step])
                    held = near[index]
                    k, v = k[:, None], v[:, None]
                    if held is not None:
                        k, v = torch.cat([held[0], k], 1), torch.cat([held[1], v], 1)
                    near[index] = k, v
                    h = h + layer.self_attn.o_proj(self._attend(text, index, q, past, k, v).flatten(1))
                if index not in skip.mlp:
                    h = h + layer.mlp(layer.post_attention_layernorm(h))
            token, top, entropy = self._top(self.norm(h))
            drafts.append(token)
            tops.append(top)
            entropies.append(entropy)
        out = torch.stack(drafts, 1), torch.stack(tops, 1), torch.stack(entropies, 1)
        return out[0].numpy(force=True), out[1].numpy(force=True), out[2].numpy(force=True)

    def _top(self, final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        token, top, entropy = [], [], []
        for i in range(0, len(final), HEAD_ROWS):
            log_p = self.head(final[i : i + HEAD_ROWS]).log_softmax(-1)
            values, indices = log_p.topk(10)
            token.append(indices[:, 0])
            top.append(values.exp())
            entropy.append(-(log_p.exp() * log_p).sum(-1))
        return torch.cat(token), torch.cat(top), torch.cat(entropy)

    def _finals(self, sets: Sequence[SkipSet], sample: Sample) -> Tensor:
        bits = torch.tensor([skip.bits for skip in sets])
        # Up to the first sublayer that one of them skips all are the whole model.
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

    def _project(self, layer: Any, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [..., N, heads, head size] for h [..., N, hidden]; q and k rotated."""
        attention, x = layer.self_attn, layer.input_layernorm(h)
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_size)) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin, v

    def _attend(self, text: Text, layer: int, q: Tensor, past: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        """Attention of each row over the whole model's KV before `past` and over its own `near` entries.

        Shapes: q [N, heads, D], past int64[N], near_k and near_v [N, c, kv heads, D]; gives [N, heads, D].
        """
        longest = int(past.max())
        keys, values = text.keys[layer][:, :longest], text.values[layer][:, :longest]
        n, _, kv, size = near_k.shape
        q = q.reshape(n, kv, -1, size) * self.scale
        far = torch.einsum("nkgd,ktd->nkgt", q, keys)
        far.masked_fill_((torch.arange(longest, device=past.device) >= past[:, None])[:, None, None], -torch.inf)
        close = torch.einsum("nkgd,nckd->nkgc", q, near_k)
        weight = torch.cat([far, close], -1).softmax(-1)
        mixed = torch.einsum("nkgt,ktd->nkgd", weight[..., :longest], values)
        mixed += torch.einsum("nkgc,nckd->nkgd", weight[..., longest:], near_v)
        return mixed.reshape(n, -1, size)

    @torch.inference_mode()
    def _check(self) -> None:
        ids = torch.arange(3, 19, device=self.embed.weight.device) % self.embed.weight.shape[0]
        theirs = self.model.model(ids[None], use_cache=False).last_hidden_state[0]
        places = torch.arange(len(ids))
        text = self.read(ids.tolist(), places)
        ours = self._finals([self.empty()], Sample([text], [places]))[0]
        for found in (text.final, ours):
            if not torch.allclose(found, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().mean())):
                raise ValueError(f"{type(self.model).__name__}: its layers compute something else than Llama's do")


def _half_turn(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)
