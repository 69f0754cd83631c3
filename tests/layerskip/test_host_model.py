"""The model read sublayer by sublayer: equal to transformers with its own KV cache and the sublayers cut out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

from layerskip_plugin.calibrate.host_model import HostModel, pass_times
from layerskip_plugin.knapsack_search import cosine
from layerskip_plugin.skip_set import SkipSet
from tests.support.models import VOCAB_SIZE, rough_model

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")


@contextmanager
def cut(model: Any, skip: SkipSet) -> Iterator[None]:
    """transformers' own forward, with the output of skipped sublayers zeroed."""

    def nothing(module: Any, args: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    layers = model.model.layers
    hooks = [layers[i].self_attn.register_forward_hook(nothing) for i in skip.attention]
    hooks += [layers[i].mlp.register_forward_hook(nothing) for i in skip.mlp]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def drafted(model: Any, tokens: list[int], skip: SkipSet) -> torch.Tensor:
    """The last state of a draft pass behind `tokens` as an engine makes it: whole-model KV but for the last token."""
    cache = DynamicCache()
    if len(tokens) > 1:
        model(torch.tensor([tokens[:-1]]), past_key_values=cache, use_cache=True)
    with cut(model, skip):
        last = model.model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
    return last.last_hidden_state[0, 0]


def random_sets(host: HostModel, count: int, seed: int) -> list[SkipSet]:
    rng = np.random.default_rng(seed)
    return [host.skip(np.flatnonzero(rng.random(host.sublayers) < 0.4)) for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def host(request: pytest.FixtureRequest) -> HostModel:
    return HostModel(rough_model(request.param))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (9, 1, 17)]


def test_drafted_states_are_those_of_the_engine_way(host: HostModel, texts: list[list[int]]) -> None:
    sample = host.sample(texts, 12, seed=1)
    sets = [host.skip([]), *random_sets(host, 6, 2)]
    prefixes = [text.tokens[: p + 1].tolist() for text in sample.texts for p in text.kept.tolist()]
    for skip, states in zip(sets, host.final_states(sets, sample), strict=True):
        expected = torch.stack([drafted(host.model, prefix, skip) for prefix in prefixes])
        assert torch.allclose(states, expected, atol=2e-4), skip


def test_agreement_is_the_share_of_equal_choices(
    host: HostModel, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several passes."""
    sample = host.sample(texts, 20, seed=3)
    sets = [host.skip([]), *random_sets(host, 5, 4)]
    agreement, best = host.agreement(sets, sample), sample.gather(lambda t: t.best)
    assert agreement[0] == 1
    for j, states in enumerate(host.final_states(sets, sample)):
        assert agreement[j] == float((host.head(states).argmax(-1) == best).double().mean())
    monkeypatch.setattr("layerskip_plugin.calibrate.host_model.ROWS", 40)
    assert np.array_equal(agreement, host.agreement(sets, sample))


def scores_of(host: HostModel, texts: list[list[int]]) -> np.ndarray:
    """float64[2, J]: agreement, and the cosine to the whole model's last state."""
    sets, sample = [host.skip([]), *random_sets(host, 4, 7)], host.sample(texts, 20, seed=3)
    final = sample.gather(lambda t: t.final)
    return np.array([host.agreement(sets, sample), cosine(host.final_states(sets, sample), final)])


def test_bf16_stays_bf16_and_shards_are_joined(tmp_path: Path, texts: list[list[int]]) -> None:
    rough_model().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    host = HostModel.load(tmp_path, "auto")
    assert {p.dtype for p in host.model.parameters()} == {torch.bfloat16}
    expected = scores_of(HostModel.load(tmp_path, dtype="float32"), texts)
    found = scores_of(host, texts)
    assert found[:, 0] == pytest.approx(1, abs=1e-3) and found[1] == pytest.approx(expected[1], abs=0.02)
    times = pass_times(host, 16, repeats=1)
    assert min(times.attention, times.mlp, times.head) > 0


def test_a_model_that_is_spread_computes_the_same(tmp_path: Path, texts: list[list[int]]) -> None:
    """Of one layer the weights are on disk until they are needed."""
    rough_model().save_pretrained(tmp_path)
    spread = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    spread |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=spread, offload_folder=tmp_path / "disk")
    assert next(model.model.layers[1].parameters()).device.type == "meta"
    assert scores_of(HostModel(model), texts) == pytest.approx(scores_of(HostModel(rough_model()), texts), abs=1e-5)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """Also layers with the names of Llama's, but with a scaled residual, and what transformers does not load."""
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32))
    normed, scaled = rough_model(), rough_model()
    normed.model.layers[1].post_feedforward_layernorm = torch.nn.Identity()
    scaled.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: (out[0] * 0.5, *out[1:]))
    for model, says in (
        (gpt2, "not a decoder built like Llama"),
        (normed, "post_feedforward_layernorm"),
        (scaled, "compute something else"),
    ):
        with pytest.raises(ValueError, match=says):
            HostModel(model)
    scaled.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model: transformers does not load .*safetensors"):
        HostModel.load(tmp_path)


def test_too_little_text_and_too_long_text() -> None:
    host = HostModel(rough_model("Mistral"))
    host.config.sliding_window = 8
    with pytest.raises(ValueError, match="between 1 and 8 tokens, not 9"):
        host.read(list(range(9)))
    with pytest.raises(ValueError, match="give more text"):
        host.sample([[1, 2, 3]], 4)
