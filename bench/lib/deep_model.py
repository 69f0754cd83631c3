"""Deep synthetic models on which layer skipping can pay, built from the demo model.

Each layer of the demo model is followed by a copy with `o_proj` and `down_proj` scaled down, which costs as much as any
layer. Skipping all copies drafts with half of the sublayers. Weights, tokenizer and text are real. Two kinds:
- all copies scaled by .01, which hardly changes the text: drafts nearly always predict the same token, as in large
  models (SWIFT, Self-SD: acceptance .98). All sets that skip copies only are alike.
- graded: the scale of each copied sublayer is drawn from .01 to .3, uniformly in its logarithm. Some sublayers matter a
  thousand times as much as others, and searches have something to find.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from layerskip_plugin.skip_set import SkipSet, model_fingerprint

EQUAL, GRADED = (0.01, 0.01), (0.01, 0.3)  # bounds of the scales
SKIP_SET = "skip_set.json"
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
