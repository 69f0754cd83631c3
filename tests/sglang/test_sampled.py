"""Through the real engine: sampled requests have exactly the target's distribution, whatever trees are drafted."""

from __future__ import annotations

import collections
import math

import pytest

from tests.sglang.conftest import make_tiny, sglang_engine

VOCAB, TOKENS, SAMPLES = 6, 3, 3000
PROMPT = [1, 3, 5, 4]


def exact(folder, temperature, top_k, top_p):
    """Probability of every continuation of TOKENS tokens, by enumeration with the model itself."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    paths = {(): 1.0}
    for _ in range(TOKENS):
        prefixes = list(paths)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + list(p) for p in prefixes])).logits[:, -1]
        probs = torch.softmax(logits.double() / temperature, -1)
        grown = {}
        for prefix, row in zip(prefixes, probs, strict=True):
            ranked = sorted(range(VOCAB), key=lambda t: -row[t])
            kept, mass = [], 0.0
            for rank, token in enumerate(ranked):
                if rank < top_k and mass < top_p:
                    kept.append(token)
                mass += float(row[token])
            total = sum(float(row[t]) for t in kept)
            for token in kept:
                grown[(*prefix, token)] = paths[prefix] * float(row[token]) / total
        paths = grown
    return paths


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("six"), vocab_size=VOCAB, tokenizer=None)


@pytest.fixture(scope="module")
def engine(model):
    with sglang_engine(
        model,
        speculative_algorithm="wild",
        speculative_num_draft_tokens=12,
        skip_tokenizer_init=True,
        max_running_requests=64,
        max_total_tokens=16384,
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, VOCAB, 1.0), (2.5, 4, 1.0), (1.5, VOCAB, 0.8)], ids=["plain", "top-k", "top-p"]
)
def test_distribution(model, engine, temperature, top_k, top_p):
    from scipy.stats import chi2

    options = {
        "temperature": temperature,
        "top_k": top_k if top_k < VOCAB else -1,
        "top_p": top_p,
        "max_new_tokens": TOKENS,
        "ignore_eos": True,
    }
    outputs = engine.generate(input_ids=[PROMPT] * SAMPLES, sampling_params=options)
    counts = collections.Counter(tuple(output["output_ids"]) for output in outputs)
    expected = exact(model, temperature, top_k, top_p)
    assert math.isclose(sum(expected.values()), 1.0, rel_tol=1e-9)
    assert set(counts) <= set(expected), "a token was sampled that has probability 0"
    # Continuations that are expected fewer than 5 times count as one.
    rare = [path for path, p in expected.items() if p * SAMPLES < 5]
    bins = [(p * SAMPLES, counts[path]) for path, p in expected.items() if p * SAMPLES >= 5]
    if rare:
        bins.append((SAMPLES * sum(expected[p] for p in rare), sum(counts[p] for p in rare)))
    statistic = sum((seen - due) ** 2 / due for due, seen in bins if due > 0)
    limit = chi2.isf(1e-4, len(bins) - 1)
    assert len(bins) > 10, "too few outcomes to tell distributions apart"
    assert statistic < limit, f"chi-square {statistic:.1f} over {len(bins)} outcomes, limit {limit:.1f}"


def test_drafts_were_accepted(engine):
    options = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    outputs = engine.generate(input_ids=[PROMPT] * 16, sampling_params=options)
    assert sum(o["meta_info"]["spec_accept_length"] for o in outputs) / 16 > 1.2
