"""Small models for the tests of layer skip, what they go on with, and how engines with checks are asked.

What is expected comes from transformers, so that no second engine has to start.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from layerskip_plugin.skip_set import SkipSet, model_fingerprint
from tests.sglang.conftest import read_counts

LAYERS, VOCAB = 4, 512
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
# Of the four layers the last two hardly change the stream, so that some drafts without them are accepted.
SETS = {
    "empty": SkipSet.empty(LAYERS),
    "weak": SkipSet(LAYERS, frozenset({2, 3}), frozenset({2, 3})),
    "mixed": SkipSet(LAYERS, frozenset({0, 3}), frozenset({2})),
    "first": SkipSet(LAYERS, frozenset({0, 1}), frozenset({0})),
}


def prompts(lengths=(3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 40, 64)):
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB, length).tolist() for length in lengths]


def make_model(folder: Path, kind: str, vocab_size: int = VOCAB, context: int = 512) -> Path:
    """A random model of this family, its upper half scaled down, and the skip sets beside it."""
    import torch
    import transformers

    torch.manual_seed(11)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers[LAYERS // 2 :]:
            layer.self_attn.o_proj.weight.mul_(0.03)
            layer.mlp.down_proj.weight.mul_(0.03)
    model.save_pretrained(folder)
    for name, skip_set in SETS.items():
        bits = SkipSet.of_bits(skip_set.bits, model_fingerprint(config))
        bits.save(folder / f"{name}.json")
    return folder


def continuations(folder: Path, given: list[list[int]], tokens: int) -> list[list[int]]:
    """What the model itself goes on with, greedily."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in given:
        ids, past, new = torch.tensor([prompt]), None, []
        for _ in range(tokens):
            with torch.no_grad():
                answer = model(ids, past_key_values=past, use_cache=True)
            past, ids = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
            new.append(int(ids))
        out.append(new)
    return out


def options(folder: Path, log: Path, sets: str = "empty weak mixed first", **more: str) -> dict[str, str]:
    return {
        "LAYERSKIP_TEST_LOG": str(log),
        "FREEDRAFT_SKIP_SET": ",".join(str(folder / f"{name}.json") for name in sets.split()),
        **more,
    }


def ids(outputs):
    return [output["output_ids"] for output in outputs]


def ask(engine, given, word, sampling=GREEDY):
    """All at once; `word` stands in their ids, and may name a skip set for each."""
    names = [word.format(i % 4) + f"-{i}" for i in range(len(given))]
    names = [f"{name}-{engine.asked}" for name in names]
    engine.asked += 1
    return engine.generate(input_ids=given, sampling_params=sampling, rid=names)


def logged(engine):
    log = json.loads(engine.log.read_text())
    read_counts(engine.counts)
    assert log["written outside the window"] == 0, "a draft pass wrote into a slot that is not this step's"
    return log
