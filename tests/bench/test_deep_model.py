"""The synthetic deep model: scales as documented, all else as in the model that it is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.lib.deep_model import SCALED, SKIP_SET, build
from layerskip_plugin.skip_set import SkipSet

LAYERS = 4
OTHERS = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, as it is stored."""
    folder, generator = tmp_path_factory.mktemp("shallow"), torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in (*SCALED, *OTHERS)]
    weights = {name: torch.randn(4, 4, generator=generator) for name in (*names, "model.norm.weight")}
    save_file(weights, folder / "model.safetensors")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "vocab_size": 9}
    (folder / "config.json").write_text(json.dumps(sizes | {"num_hidden_layers": LAYERS, "model_type": "llama"}))
    return folder


def test_every_layer_is_followed_by_a_copy_of_smaller_scale(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path)
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2 * LAYERS
    assert torch.equal(new.pop("model.norm.weight"), old["model.norm.weight"])
    for layer in range(LAYERS):
        for name in (*SCALED, *OTHERS):
            weight = old[f"model.layers.{layer}.{name}"]
            assert torch.equal(new.pop(f"model.layers.{2 * layer}.{name}"), weight)
            copy = new.pop(f"model.layers.{2 * layer + 1}.{name}")
            assert torch.allclose(copy, weight * (0.01 if name in SCALED else 1))
    assert not new
    skipped = SkipSet.load(tmp_path / SKIP_SET)
    assert skipped.attention == skipped.mlp == set(range(1, 2 * LAYERS, 2))
