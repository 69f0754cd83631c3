"""Deep synthetic models on which layer skipping can pay, built from the demo model.

Each layer of the demo model is followed by a copy with `o_proj` and `down_proj` scaled down, which costs as much as any
layer. Skipping all copies drafts with half of the sublayers. Weights, tokenizer and text are real. Three kinds:
- all copies scaled by .01, which hardly changes the text: drafts nearly always predict the same token, as in large
  models (SWIFT, Self-SD: acceptance .98). All sets that skip copies only are alike.
- graded: the scale of each copied sublayer is drawn from .01 to .3, uniformly in its logarithm. Some sublayers matter a
  thousand times as much as others, and searches have something to find.
- by domain: graded, and in `PAIRS` one neuron of the MLP sees whether the text is of a certain domain; if it is, it
  writes the embedding of some token into the stream, which spoils predictions, and a neuron of the copy takes it away.
  Who drafts for that domain must not skip the copy's MLP; for other domains it does as little as any copy.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.prompts import Answered, Prompts, answer, load_tokenizer
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

EQUAL, GRADED = (0.01, 0.01), (0.01, 0.3)  # bounds of the scales
SKIP_SET = "skip_set.json"
PAIRS = range(4, 28, 2)  # layers of the demo model with such neurons, for the domains in turns
READ, LONGEST, ANSWERED = 16, 256, 64  # prompts of each domain to learn from, and tokens of each and of its answer
GAIN, SPOIL = 4.0, (0.3, 1.0)  # input of a neuron in its domain; bounds of what it writes, in norms of the stream
RIDGE = 1e-3
SCALED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
COMPANIONS = ("generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def build(source: Path, target: Path, bounds: tuple[float, float] = EQUAL, seed: int = 0) -> None:
    """Write the deep model of `source` (a folder in the Hugging Face layout) to `target`, with a skip set of all added
    layers: attention and MLP of layers 1, 3, 5, ... Its file holds the scales of their sublayers, in order."""
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    low, high = np.log(bounds).tolist()
    scales = np.exp(np.random.default_rng(seed).uniform(low, high, (layers, len(SCALED))))
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        parts = name.split(".", 3)
        if parts[:2] != ["model", "layers"]:
            weights[name] = tensor
            continue
        layer, rest = int(parts[2]), parts[3]
        weights[f"model.layers.{2 * layer}.{rest}"] = tensor
        scale = float(scales[layer, SCALED.index(rest)]) if rest in SCALED else 1.0
        weights[f"model.layers.{2 * layer + 1}.{rest}"] = (tensor.float() * scale).to(tensor.dtype)
    config["num_hidden_layers"] = 2 * layers
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    added = frozenset(range(1, 2 * layers, 2))
    skip_set = SkipSet(2 * layers, added, added, model_fingerprint(config))
    skip_set.save(target / SKIP_SET, {"made by": "bench/lib/deep_model.py", "scales": scales.round(4).ravel().tolist()})
    # Last, so that a folder with a config is complete.
    (target / "config.json").write_text(json.dumps(config, indent=1))


def least(folder: Path, count: int) -> SkipSet:
    """Return the set of the `count` added sublayers with the smallest scales."""
    about, added = json.loads((folder / SKIP_SET).read_text())["about"], SkipSet.load(folder / SKIP_SET)
    order = np.argsort(about["scales"], kind="stable")[:count]
    return SkipSet.of_sublayers(np.array(added.sublayers)[order].tolist(), added.n_layers, added.model)


def build_domains(source: Path, target: Path, data: Sequence[Path], seed: int = 0) -> None:
    """Write the model that depends on the domain; each file of prompts is one, at least two."""
    demo, tokenizer = HostModel.load(source, dtype="float32"), load_tokenizer(source)
    parts = [answer(demo, tokenizer, Prompts.load(path).texts[:READ], ANSWERED, LONGEST) for path in data]
    build(source, target, GRADED, seed)
    host = HostModel.load(target, dtype="float32")
    add_neurons(host, parts, PAIRS, seed)
    host.model.bfloat16().save_pretrained(target)


def add_neurons(host: HostModel, parts: Sequence[Sequence[Answered]], pairs: Sequence[int], seed: int = 0) -> None:
    """Replace the least used neuron of the MLPs in `pairs`, and of the copies after them. parts: texts by domain."""
    rng, every = np.random.default_rng(seed), [one for part in parts for one in part]
    domain = torch.cat([torch.full((len(one.tokens),), i) for i, part in enumerate(parts) for one in part])
    answered = torch.cat([(torch.arange(len(one.tokens)) >= one.prompt).float() for one in every])
    streams = [host.embed(torch.tensor(one.tokens))[None] for one in every]
    for number in range(host.n_layers // 2):
        layer, copy = host.layers[2 * number : 2 * number + 2]
        if number in pairs:
            own = domain == pairs.index(number) % len(parts)
            after, x = run(host, layer, streams)
            gate = linear(x, GAIN * torch.where(own, 1.0, -1.0), answered + 0.01)
            up = linear(x, torch.ones(len(x)), torch.ones(len(x)))
            token = host.embed.weight[int(rng.integers(len(host.embed.weight)))]
            size = torch.cat(after, 1)[0].norm(dim=1).median()
            spoil = float(np.exp(rng.uniform(*np.log(SPOIL))))
            written = spoil * size / GAIN * token / token.norm()
            used = (silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)).abs().mean(0)
            neuron = int((used * layer.mlp.down_proj.weight.norm(dim=0)).argmin())
            put(layer.mlp, neuron, gate, up, written)
            seen = run(host, copy, run(host, layer, streams)[0])[1]
            weight = answered * torch.where(own, 10.0, 1.0) + 0.05
            put(copy.mlp, neuron, linear(seen, x @ gate, weight), linear(seen, x @ up, weight), -written)
        streams = run(host, copy, run(host, layer, streams)[0])[0]


def run(host: HostModel, layer: Any, streams: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the hidden states of texts, [1, T, hidden] each, after a layer, and the inputs of its MLP, [N, hidden]."""
    inputs: list[Tensor] = []
    hook = layer.mlp.register_forward_pre_hook(lambda module, given: inputs.append(given[0][0]))
    with torch.inference_mode():
        rotated = [host.rotary(h, torch.arange(h.shape[1])[None]) for h in streams]
        after = [layer(h, position_embeddings=r) for h, r in zip(streams, rotated, strict=True)]
    hook.remove()
    return after, torch.cat(inputs)


def linear(x: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Return weights [hidden] of `wanted` [N] as a function of `x` [N, hidden], by ridge regression."""
    moments = x.T @ (x * weight[:, None])
    ridge = RIDGE * moments.diagonal().mean() * torch.eye(len(moments))
    return torch.linalg.solve(moments + ridge, x.T @ (weight * wanted))


def put(mlp: Any, neuron: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
    mlp.gate_proj.weight.data[neuron], mlp.up_proj.weight.data[neuron] = gate, up
    mlp.down_proj.weight.data[:, neuron] = down
