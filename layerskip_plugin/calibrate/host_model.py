"""`HostModel`: a model in transformers, run sublayer by sublayer: what skip sets would draft, and what passes take.

Every token of a text is drafted as a serving engine's first draft pass would do it: its own hidden state goes through
the kept sublayers, and it attends to the whole model's KV of everything before it and to its own draft KV.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from layerskip_plugin.calibrate.sample import Sample, Text
from layerskip_plugin.knapsack_search import cosine
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
ROWS, HEAD_ROWS = 2048, 256  # rows (sets x tokens) of one pass, and of one of its heads: bounds memory
VERIFIED = (1, 2, 4, 8, 12)  # query tokens per request of the verifications that are timed


class HostModel:
    """A decoder of transformers (Llama, Qwen2, Qwen3, Mistral or built alike), on any device, or spread over several.
    Raises ValueError if it is built differently."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        inner = getattr(model, "model", None)
        parts: list[Any] = [getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
        if any(part is None for part in parts) or getattr(model, "lm_head", None) is None:
            raise ValueError(f"{type(model).__name__}: not a decoder built like Llama; its layers cannot be skipped")
        self.embed, self.layers, self.last_norm, self.rotary = parts
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
        self.head_size, self.scale = int(attention.head_dim), float(attention.scaling)
        self.n_layers = len(self.layers)
        self.sublayers = 2 * self.n_layers  # attention 0, MLP 0, attention 1, ...
        self.fingerprint = model_fingerprint(self.config)
        self.device = str(self.embed.weight.device)
        self._check()

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", dtype: str = "auto") -> HostModel:
        """Load the model in a Hugging Face folder, in the checkpoint's dtype by default; device "auto" takes the GPUs
        where there are some. Raises ValueError for no such model or device, or a model that is built differently."""
        from transformers import AutoModelForCausalLM

        if not (folder / "config.json").is_file():
            raise ValueError(f"model: {folder} holds no config.json; give a Hugging Face model folder")
        if device not in ("auto", "cpu") and not (device.startswith("cuda") and torch.cuda.is_available()):
            raise ValueError(f"device: there is no {device} here; choose cpu")
        placed = {"device_map": device} if importlib.util.find_spec("accelerate") else {}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **placed)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"model: transformers does not load {folder}: {error}") from None
        if not placed:
            model = model.to(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        return cls(model)

    def skip(self, sublayers: Sequence[int]) -> SkipSet:
        return SkipSet.of_sublayers(sublayers, self.n_layers, self.fingerprint)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The greedy answer to each prompt, up to its end of sequence, which is part of it."""
        width, pad = max(map(len, prompts)), 0
        ids = torch.full((len(prompts), width), pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
        out = self.model.generate(ids.to(self.device), attention_mask=mask.to(self.device), **settings)
        stops = self.model.generation_config.eos_token_id
        stops = set(stops if isinstance(stops, list) else [stops])
        answers = out[:, width:].tolist()
        return [new[: next((k + 1 for k, token in enumerate(new) if token in stops), len(new))] for new in answers]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> Text:
        """Read a text with the whole model; `keep`: ascending positions whose hidden states a `Sample` needs. Raises
        ValueError for an empty text, or one that is too long."""
        window = getattr(self.config, "sliding_window", None)
        if not len(tokens) or (window and len(tokens) > window and getattr(self.config, "use_sliding_window", True)):
            raise ValueError(f"a text must have between 1 and {window or 'any number of'} tokens, not {len(tokens)}")
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.device)
        h = self.embed(ids)
        cos, sin = self._rotation(h)
        keep = (torch.zeros(0, dtype=torch.int64) if keep is None else keep).to(ids.device)
        keys, values, states = [], [], [h[keep]]
        for layer in self.layers:
            h = h.to(_device(layer, h))
            q, k, v = (x.transpose(0, 1) for x in self.project(layer, h, cos, sin))
            mixed = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=self.scale, enable_gqa=True
            )[0]
            h = h + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
            states.append(h[keep.to(h.device)].to(ids.device))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            states.append(h[keep.to(h.device)].to(ids.device))
            keys.append(k.contiguous())
            values.append(v.contiguous())
        final = self.norm(h)
        return Text(ids, self.best(final), final, keep, torch.stack(states), keys, values, cos, sin)

    def sample(
        self, texts: Sequence[Sequence[int]], tokens: int, first: Sequence[int] | None = None, seed: int = 0
    ) -> Sample:
        """Draw `tokens` positions from all texts, from `first` of each on (0 by default), and read their texts. Raises
        ValueError if they are shorter than that."""
        starts = list(first) if first is not None else [0] * len(texts)
        places = [(i, p) for i, text in enumerate(texts) for p in range(min(starts[i], len(text) - 1), len(text))]
        if len(places) < tokens:
            raise ValueError(f"{tokens} tokens are wanted, but the texts hold {len(places)}: give more text")
        drawn = np.random.default_rng(seed).choice(len(places), tokens, replace=False)
        by_text: dict[int, list[int]] = {}
        for index in sorted(drawn.tolist()):
            by_text.setdefault(places[index][0], []).append(places[index][1])
        positions = [torch.tensor(p) for p in by_text.values()]
        return Sample([self.read(texts[i], p) for i, p in zip(by_text, positions, strict=True)], positions)

    def newest(self, text: Sequence[int], tokens: int) -> Sample:
        positions = torch.arange(max(0, len(text) - tokens), len(text))
        return Sample([self.read(text, positions)], [positions])

    @torch.inference_mode()
    def scores(self, sets: Sequence[SkipSet], sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per set: the share of tokens with the whole model's top-1 choice, and the mean cosine to its last state."""
        best, final = sample.gather(lambda t: t.best), sample.gather(lambda t: t.final)
        agreement, similarity = [], []
        size = max(1, ROWS // len(sample))
        for i in range(0, len(sets), size):
            drafted = self.final_states(sets[i : i + size], sample)
            agreement.append((self.best(drafted) == best).double().mean(1).numpy(force=True))
            similarity.append(cosine(drafted, final))
        return np.concatenate(agreement), np.concatenate(similarity)

    @torch.inference_mode()
    def final_states(self, sets: Sequence[SkipSet], sample: Sample) -> Tensor:
        """float[J, N, hidden]: the normed last hidden states of `sample`'s tokens under each set, in one pass."""
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

    @torch.inference_mode()
    def sublayer(self, index: int, h: Tensor, sample: Sample) -> Tensor:
        """The hidden states behind sublayer `index`, for float[J, N, hidden] before it; N tokens of `sample`."""
        layer, home = self.layers[index // 2], h.device
        h = h.to(_device(layer, h))
        if index % 2:
            return (h + layer.mlp(layer.post_attention_layernorm(h))).to(home)
        q, k, v = self.project(layer, h, sample.gather(lambda t: t.cos), sample.gather(lambda t: t.sin))
        mixed, start = torch.empty_like(q), 0
        for text, positions in zip(sample.texts, sample.positions, strict=True):
            rows = slice(start, start + len(positions))
            start = rows.stop
            near_k, near_v = (x[:, rows].flatten(0, 1)[:, None] for x in (k, v))
            past = positions.to(h.device).repeat(len(h))
            attended = self.attend(text, index // 2, q[:, rows].flatten(0, 1), past, near_k, near_v)
            mixed[:, rows] = attended.unflatten(0, (len(h), -1))
        return (h + layer.self_attn.o_proj(mixed.flatten(2))).to(home)

    def norm(self, h: Tensor) -> Tensor:
        normed: Tensor = self.last_norm(h.to(_device(self.last_norm, h)))
        return normed

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        """int64[...]: the top-1 token of float[..., hidden] normed hidden states."""
        parts = final.reshape(-1, final.shape[-1]).to(_device(self.head, final)).split(HEAD_ROWS)
        return torch.cat([self.head(part).argmax(-1) for part in parts]).reshape(final.shape[:-1])

    def project(self, layer: Any, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [..., N, heads, head size] for h [..., N, hidden]; q and k rotated."""
        attention, x = layer.self_attn, layer.input_layernorm(h)
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_size)) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = (x[:, None].to(h.device) for x in (cos, sin))
        return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin, v

    def attend(self, text: Text, layer: int, q: Tensor, past: Tensor, near_k: Tensor, near_v: Tensor) -> Tensor:
        """Attention of each row over the whole model's KV before `past` and over its own `near` entries, in float32.

        Shapes: q [N, heads, D], past int64[N], near_k and near_v [N, c, kv heads, D]; gives [N, heads, D].
        """
        max_past = int(past.max())
        keys, values = (x[layer][:, :max_past].float() for x in (text.keys, text.values))
        n, _, kv, size = near_k.shape
        q = q.reshape(n, kv, -1, size).float() * self.scale
        far = torch.einsum("nkgd,ktd->nkgt", q, keys)
        far.masked_fill_((torch.arange(max_past, device=past.device) >= past[:, None])[:, None, None], -torch.inf)
        close = torch.einsum("nkgd,nckd->nkgc", q, near_k.float())
        weight = torch.cat([far, close], -1).softmax(-1)
        mixed = torch.einsum("nkgt,ktd->nkgd", weight[..., :max_past], values)
        mixed += torch.einsum("nkgc,nckd->nkgd", weight[..., max_past:], near_v.float())
        return mixed.reshape(n, -1, size).to(near_v.dtype)

    @torch.inference_mode()
    def pass_times(self, context: int, repeats: int = 7) -> PassTimes:
        """Measure times at one context length and batch 1; medians over `repeats` rounds.

        A round runs through all layers: the weights and KV of a few would stay in a cache that those of a whole pass do
        not fit into. The KV is random: the time does not depend on what is in it.
        """
        text = self.blank(context)
        attention, mlp, head = np.zeros((3, len(VERIFIED)))

        def run_sublayers(kind: int, h: Tensor, sample: Sample) -> None:
            for index in range(kind, self.sublayers, 2):
                self.sublayer(index, h, sample)

        for i, n in enumerate(VERIFIED):
            sample = Sample([text], [torch.full((n,), context - 1)])
            h = torch.randn_like(text.final[None, :n])
            of_kind = (seconds(partial(run_sublayers, kind, h, sample), repeats) for kind in (0, 1))
            attention[i], mlp[i] = (whole / self.n_layers for whole in of_kind)
            head[i] = seconds(partial(lambda h: self.best(self.norm(h)), h), repeats)
        whole = self.n_layers * (attention + mlp) + head
        verify = partial(np.interp, xp=VERIFIED, fp=whole)
        return PassTimes(float(attention[0]), float(mlp[0]), float(head[0]), lambda n: float(verify(n)))

    def blank(self, context: int) -> Text:
        """A text of `context` tokens with random KV and states."""
        ids = torch.zeros(context, dtype=torch.int64, device=self.device)
        final = torch.randn_like(self.embed(ids))
        shape = (int(self.config.num_key_value_heads), context, self.head_size)

        def random_cache() -> list[Tensor]:
            return [torch.randn(shape, dtype=final.dtype, device=_device(layer, final)) for layer in self.layers]

        return Text(ids, ids, final, ids[:0], final[None, :0], random_cache(), random_cache(), *self._rotation(final))

    def _rotation(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float[T, head size], of the first T positions."""
        cos, sin = self.rotary(h, torch.arange(len(h), device=h.device)[None])
        return cos[0].to(h.device), sin[0].to(h.device)

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare with the model's own forward: its layers may have the names of Llama's and compute something else."""
        ids = torch.arange(3, 19, device=self.device) % self.embed.weight.shape[0]
        # A forward pass of the whole model, because some quantised weights are not there before one.
        expected = self.model(ids[None], use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        positions = torch.arange(len(ids))
        text = self.read(ids.tolist(), positions)
        drafted = self.final_states([self.skip([])], Sample([text], [positions]))[0]
        tolerance = 0.01 if expected.dtype == torch.float32 else 0.1
        for states in (text.final, drafted):
            if (states.to(expected.device) - expected).float().norm() > tolerance * expected.float().norm():
                raise ValueError(f"{type(self.model).__name__}: its layers compute something else than Llama's do")


def _device(module: Any, h: Tensor) -> torch.device:
    """Where a module computes: with its weights, or where `h` is if these come only when they are needed."""
    device: torch.device = next(module.parameters()).device
    return h.device if device.type == "meta" else device


def _half_turn(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `work`, after one call that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))
