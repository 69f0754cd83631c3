"""`HostModel`: a model in transformers, run sublayer by sublayer, to evaluate skip sets.

Every token of a text is drafted as in an engine's first draft pass: its hidden state goes through the kept sublayers,
and it attends to the whole model's KV of all earlier tokens and to its own draft KV.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from freedraft.cost.profiling import median_seconds
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
ROWS, HEAD_ROWS = 2048, 256  # rows (sets x tokens) per pass, and per call of the head: bounds memory
VERIFIED = (1, 2, 4, 8, 12)  # query tokens per request of timed verifications


@dataclass(frozen=True)
class Text:
    tokens: Tensor  # int64[T]
    best: Tensor  # int64[T], the whole model's top-1 next token after each
    final: Tensor  # float[T, hidden], the last hidden state, normed
    kept: Tensor  # int64[K], positions whose states are kept, on the host
    states: Tensor  # float[2L + 1, K, hidden], before each sublayer and after the last
    keys: list[Tensor]  # per layer float[kv heads, T, head size], rotated
    values: list[Tensor]


@dataclass(frozen=True)
class Sample:
    """N tokens to evaluate skip sets on: the kept positions of some texts."""

    texts: Sequence[Text]

    def __len__(self) -> int:
        return sum(len(text.kept) for text in self.texts)

    def gather(self, field: Callable[[Text], Tensor]) -> Tensor:
        """The rows of `field` at the sample's positions, all texts concatenated."""
        return torch.cat([field(text)[text.kept] for text in self.texts])

    def states(self, index: int) -> Tensor:
        """float[N, hidden]: the whole model's hidden states before sublayer `index`."""
        return torch.cat([text.states[index] for text in self.texts])


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
    def load(cls, folder: Path, device: str = "cpu", dtype: str = "auto") -> Self:
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
        keep = torch.zeros(0, dtype=torch.int64) if keep is None else keep
        states: list[Tensor] = []
        cache: Any = DynamicCache()
        norms = [norm for layer in self.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        hooks = [
            norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0][keep].to(ids.device)))
            for norm in (*norms, self.last_norm)
        ]
        try:
            final = self.model.model(ids[None], past_key_values=cache, use_cache=True).last_hidden_state[0]
        finally:
            for hook in hooks:
                hook.remove()
        keys, values = [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]
        return Text(ids, self.best(final), final, keep, torch.stack(states), keys, values)

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
        return Sample([self.read(texts[i], torch.tensor(positions)) for i, positions in by_text.items()])

    @torch.inference_mode()
    def agreement(self, sets: Sequence[SkipSet], sample: Sample) -> NDArray[np.float64]:
        """float64[J]: the share of tokens on which each set makes the whole model's top-1 choice."""
        best, size = sample.gather(lambda t: t.best), max(1, ROWS // len(sample))
        parts = (self.final_states(sets[i : i + size], sample) for i in range(0, len(sets), size))
        return np.concatenate([(self.best(h) == best).double().mean(1).numpy(force=True) for h in parts])

    @torch.inference_mode()
    def final_states(self, sets: Sequence[SkipSet], sample: Sample) -> Tensor:
        """float[J, N, hidden]: the normed last hidden states of `sample`'s tokens under each set, in one pass."""
        bits = torch.tensor([skip.bits for skip in sets])
        # Before the first skipped sublayer all sets equal the whole model.
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
        """The hidden states after sublayer `index`, for float[J, N, hidden] before it; N tokens of `sample`."""
        layer, home = self.layers[index // 2], h.device
        h = h.to(device_of(layer, h))
        if index % 2:
            return (h + layer.mlp(layer.post_attention_layernorm(h))).to(home)
        positions = torch.cat([text.kept for text in sample.texts]).to(h.device)
        attention, x = layer.self_attn, layer.input_layernorm(h)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (project(x).unflatten(-1, (-1, self.head_size)) for project in projections)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = (angles[0].to(h.device) for angles in self.rotary(h, positions[None]))
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
        mixed, start = torch.empty_like(q), 0
        for text in sample.texts:
            rows = slice(start, start + len(text.kept))
            start = rows.stop
            own = (x[:, rows].flatten(0, 1) for x in (q, k, v))
            attended = self.attend(text, index // 2, text.kept.to(h.device).repeat(len(h)), *own)
            mixed[:, rows] = attended.unflatten(0, (len(h), -1))
        return (h + attention.o_proj(mixed.flatten(2))).to(home)

    def norm(self, h: Tensor) -> Tensor:
        normed: Tensor = self.last_norm(h.to(device_of(self.last_norm, h)))
        return normed

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        """int64[...]: the top-1 token of float[..., hidden] normed hidden states."""
        parts = final.reshape(-1, final.shape[-1]).to(device_of(self.head, final)).split(HEAD_ROWS)
        return torch.cat([self.head(part).argmax(-1) for part in parts]).reshape(final.shape[:-1])

    def attend(self, text: Text, layer: int, past: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of each row over the whole model's KV before `past` and over its own k and v, in float32.

        Shapes: past int64[N], q [N, heads, D], k and v [N, kv heads, D]; gives [N, heads, D].
        """
        max_past = int(past.max())
        keys, values = (x[layer][:, :max_past].float() for x in (text.keys, text.values))
        n, kv, size = k.shape
        q = q.reshape(n, kv, -1, size).float() * self.scale
        far = torch.einsum("nkgd,ktd->nkgt", q, keys)
        far.masked_fill_((torch.arange(max_past, device=past.device) >= past[:, None])[:, None, None], -torch.inf)
        own = torch.einsum("nkgd,nkd->nkg", q, k.float())
        weight = torch.cat([far, own[..., None]], -1).softmax(-1)
        mixed = torch.einsum("nkgt,ktd->nkgd", weight[..., :max_past], values)
        mixed += weight[..., max_past:] * v.float()[:, :, None]
        return mixed.reshape(n, -1, size).to(v.dtype)

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare with the model's own forward: layers named like Llama's may compute something else."""
        ids = torch.arange(3, 19) % self.embed.weight.shape[0]
        self.model(ids[None].to(self.device))  # some quantised weights do not exist before
        text = self.read(ids.tolist(), torch.arange(len(ids)))
        h, sample = text.states[:1], Sample([text])
        for index in range(self.sublayers):
            h = self.sublayer(index, h, sample)
        drafted = self.norm(h)[0].to(text.final.device)
        tolerance = 0.01 if drafted.dtype == torch.float32 else 0.1
        if (drafted - text.final).float().norm() > tolerance * text.final.float().norm():
            raise ValueError(f"{type(self.model).__name__}: its layers compute something else than Llama's do")


def device_of(module: Any, h: Tensor) -> torch.device:
    """The device of a module: of its weights, or of `h` if they are loaded on demand."""
    device: torch.device = next(module.parameters()).device
    return h.device if device.type == "meta" else device


@torch.inference_mode()
def pass_times(model: HostModel, context: int, repeats: int = 7) -> PassTimes:
    """Times at one context length and batch 1; medians over `repeats` rounds of all layers, since weights and KV of a
    few would stay in caches that a whole pass exceeds."""
    text = _random_text(model, context)

    def run_sublayers(kind: int, h: Tensor, sample: Sample) -> None:
        for index in range(kind, model.sublayers, 2):
            model.sublayer(index, h, sample)

    def run_head(h: Tensor) -> None:
        model.best(model.norm(h))

    rows = []  # seconds of all attention sublayers, of all MLP sublayers, and of the head
    for n in VERIFIED:
        sample = Sample([replace(text, kept=torch.full((n,), context - 1))])
        h = torch.randn_like(text.final[None, :n])
        parts = (partial(run_sublayers, 0, h, sample), partial(run_sublayers, 1, h, sample), partial(run_head, h))
        rows.append([median_seconds(part, least=repeats) for part in parts])
    attention, mlp, head = rows[0]
    verify = partial(np.interp, xp=VERIFIED, fp=[sum(row) for row in rows])
    return PassTimes(attention / model.n_layers, mlp / model.n_layers, head, lambda n: float(verify(n)))


def _random_text(model: HostModel, context: int) -> Text:
    ids = torch.zeros(context, dtype=torch.int64, device=model.device)
    final = torch.randn_like(model.embed(ids))
    shape = (int(model.config.num_key_value_heads), context, model.head_size)
    keys, values = (
        [torch.randn(shape, dtype=final.dtype, device=device_of(layer, final)) for layer in model.layers]
        for _ in range(2)
    )
    return Text(ids, ids, final, ids[:0], final[None, :0], keys, values)
