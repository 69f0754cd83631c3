"""A deep synthetic model on which layer skipping can pay, built from the demo model.

Each layer of the demo model is followed by a copy with `o_proj` and `down_proj` scaled down, which costs as much as any
layer and hardly changes the text. Skipping all copies drafts with half of the sublayers. Weights, tokenizer and text
are real; drafts nearly always predict the same token, as in large models (SWIFT, Self-SD: acceptance .98).
"""

import json
import shutil
from pathlib import Path

from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SCALE = 0.01
SKIP_SET = "skip_set.json"
SCALED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
COMPANIONS = ("generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def build(source: Path, target: Path) -> None:
    """Write the deep model of `source` (a folder in the Hugging Face layout) to `target`, with a skip set of all added
    layers: attention and MLP of layers 1, 3, 5, ..."""
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        parts = name.split(".", 3)
        if parts[:2] != ["model", "layers"]:
            weights[name] = tensor
            continue
        layer, rest = int(parts[2]), parts[3]
        weights[f"model.layers.{2 * layer}.{rest}"] = tensor
        scaled = (tensor.float() * SCALE).to(tensor.dtype) if rest in SCALED else tensor.clone()
        weights[f"model.layers.{2 * layer + 1}.{rest}"] = scaled
    config["num_hidden_layers"] = 2 * layers
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    added = frozenset(range(1, 2 * layers, 2))
    skip_set = SkipSet(2 * layers, added, added, model_fingerprint(config))
    skip_set.save(target / SKIP_SET, {"made by": "bench/lib/deep_model.py"})
    # Last, so that a folder with a config is complete.
    (target / "config.json").write_text(json.dumps(config, indent=1))
