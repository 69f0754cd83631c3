"""The synthetic deep models: scales as documented, all else as in the model that they are made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.lib.deep_model import EQUAL, GRADED, SCALED, SKIP_SET, add_neurons, build, least
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.prompts import Answered
from layerskip_plugin.skip_set import SkipSet

LAYERS = 40
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


@pytest.mark.parametrize("bounds", [EQUAL, GRADED])
def test_every_layer_is_followed_by_a_copy_of_smaller_scale(
    source: Path, tmp_path: Path, bounds: tuple[float, float]
) -> None:
    build(source, tmp_path, bounds)
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2 * LAYERS
    assert torch.equal(new.pop("model.norm.weight"), old["model.norm.weight"])
    scales = []
    for layer in range(LAYERS):
        for name in (*SCALED, *OTHERS):
            weight = old[f"model.layers.{layer}.{name}"]
            assert torch.equal(new.pop(f"model.layers.{2 * layer}.{name}"), weight)
            ratio = new.pop(f"model.layers.{2 * layer + 1}.{name}") / weight
            assert torch.allclose(ratio, ratio[0, 0]), "one scale for all of a matrix"
            scales += [float(ratio[0, 0])] if name in SCALED else []
            assert name in SCALED or ratio[0, 0] == 1
    assert not new
    low, high = bounds
    assert min(scales) >= 0.999 * low and max(scales) <= 1.001 * high
    about, skipped = json.loads((tmp_path / SKIP_SET).read_text())["about"], SkipSet.load(tmp_path / SKIP_SET)
    assert about["scales"] == pytest.approx(scales, abs=1e-4)
    assert skipped.attention == skipped.mlp == set(range(1, 2 * LAYERS, 2))
    if low < high:  # as many below the middle of the logarithms as above
        share = np.mean(np.log(scales) < np.log([low, high]).mean())
        assert share == pytest.approx(0.5, abs=3 * 0.5 / np.sqrt(len(scales)))
        order = [int(i) for i in np.argsort(scales)[:5]]
        assert sorted(least(tmp_path, 5).sublayers) == sorted(skipped.sublayers[i] for i in order)


def test_a_copy_with_a_neuron_matters_in_its_domain_only() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    host = HostModel(LlamaForCausalLM(LlamaConfig(vocab_size=40, num_hidden_layers=8, **sizes)))
    for copy in host.layers[1::2]:
        copy.self_attn.o_proj.weight.mul_(0.01)
        copy.mlp.down_proj.weight.mul_(0.01)
    rng = np.random.default_rng(0)
    parts = [[Answered(rng.integers(low, low + 20, 50).tolist(), 8) for _ in range(12)] for low in (0, 20)]
    before = [host.read(part[0].tokens).final for part in parts]
    add_neurons(host, parts, (1, 2))
    for one in (0, 1):
        sample = host.sample([parts[one][0].tokens], 40, [8])
        whole, skipped = host.final_states([host.skip([]), host.skip([4 * (1 + one) + 3])], sample)
        _, elsewhere = host.final_states([host.skip([]), host.skip([4 * (2 - one) + 3])], sample)
        states = (before[one][sample.texts[0].kept], elsewhere, skipped)
        same, other, own = (torch.nn.functional.cosine_similarity(whole, each).mean() for each in states)
        assert same > 0.97, "the neurons cancel"
        assert other > 0.97
        assert 1 - own > 5 * (1 - other)
