"""What is said at start agrees with `freedraft explain`, and with the arithmetic of the roofline."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from transformers import LlamaConfig, PretrainedConfig

from freedraft.cost.hardware import choose_profile
from freedraft.cost.outlook import outlook, outlook_of_passes
from freedraft.draft_pass import Window
from freedraft.step import EngineContext
from layerskip_plugin.skip_set import SkipSet

LLAMA3_8B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256,
)  # fmt: skip


def paying(name: str, context: int) -> list[int]:
    """Batch sizes at which one or two draft tokens pay by back-of-envelope arithmetic: 7.5 G weights, 128 KiB of KV a
    token."""
    profile = choose_profile(name)
    peak, bandwidth, weights = profile.flops("bfloat16"), profile.bandwidth, 7.5e9

    def seconds(batch: int, tokens: int) -> float:
        linear = max(2 * weights / bandwidth, 2 * weights * batch * tokens / peak)
        return linear + batch * context * 131072 / bandwidth

    best = {
        batch: max(seconds(batch, 1) / seconds(batch, n) * gained for n, gained in ((2, 1.307), (3, 1.425)))
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    }
    return [batch for batch, gain in best.items() if gain > 1.05]


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_it_pays_where_arithmetic_says_so(name: str) -> None:
    context = EngineContext(hf_config=LLAMA3_8B, vocab_size=128256, max_draft_tokens=8, dtype="bfloat16")
    said = outlook(context, choose_profile(name))
    bound = re.search(r"up to (\d+) requests at a time", said)
    most = int(bound[1]) if bound else 256
    assert most / 2 <= paying(name, 1024)[-1] <= most * 2, said
    assert 1.05 <= float(re.findall(r"(\d\.\d) times", said)[0]) <= 1.6 and name in said


def test_draft_passes_take_what_arithmetic_says() -> None:
    """One of a window, which reads all weights and little of the cache; and one without half of the sublayers."""
    context, profile = EngineContext(hf_config=LLAMA3_8B, max_draft_tokens=5), choose_profile("h100")
    whole = SkipSet.empty(32)
    half = SkipSet(32, frozenset(range(16)), frozenset(range(16)))
    weights, cache, head = 2 * 7.5e9, 131072.0, 2 * 4096 * 128256
    for recipes, parts in (
        ((whole, replace(whole, window=Window(16, 496))), lambda n, tokens: weights + n * min(tokens, 512) * cache),
        ((half,), lambda n, tokens: (weights + head + n * tokens * cache) / 2),
    ):
        said = outlook_of_passes(context, profile, recipes)
        shares = [int(share) / 100 for share in re.findall(r"(\d+)%", said)]
        expected = [parts(n, tokens) / (weights + n * tokens * cache) for n, tokens in ((1, 1024), (16, 16384))]
        assert shares == pytest.approx(expected, abs=0.05) and "\n" not in said
    assert "not known" in outlook_of_passes(EngineContext(hf_config=PretrainedConfig()), profile, [whole])
