"""Tokens drawn without seeds and filters: those of SGLang's sampler for the same noise."""

from __future__ import annotations

import pytest
import torch

ROWS, VOCAB = 300, 1000


@pytest.fixture
def logits():
    made = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    made[:, ::7] = float("-inf")  # of a grammar
    return made


def test_draws_are_those_of_sglangs_sampler(logits):
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    from freedraft.engines.sglang.verify import drawn

    temperatures, before = torch.linspace(0.2, 2, ROWS)[:, None], logits.clone()
    torch.manual_seed(1)
    tokens = drawn(logits, temperatures)
    torch.manual_seed(1)
    expected = sampling_from_probs_torch(torch.softmax(logits / temperatures, -1))
    assert (tokens == expected).float().mean() > 0.99, "rounding may swap two tokens"
    assert torch.equal(logits, before) and len(set(tokens.tolist())) > 100


def test_parts_are_drawn_one_by_one(logits, monkeypatch):
    """So that noise for a large batch takes no more memory than SGLang was told of."""
    from freedraft.engines.sglang import verify

    monkeypatch.setattr(verify, "MAX_PROBABILITIES", 7 * VOCAB)
    tokens = verify.drawn(logits, torch.ones(ROWS, 1))
    assert tokens.shape == (ROWS,) and torch.isfinite(logits.gather(1, tokens[:, None])).all()
    cold = verify.drawn(logits, torch.full((ROWS, 1), 1e-3))
    assert torch.equal(cold, logits.argmax(-1))


def test_filters_are_left_to_sglang():
    """A greedy request beside sampled ones is one with top_k 1."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from freedraft.engines.sglang.verify import filters

    def batch(**needs):
        of_one = dict.fromkeys(("temperatures", "top_ps", "top_ks", "min_ps"), torch.ones(1))
        asked = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), False)
        return SamplingBatchInfo(**of_one, is_all_greedy=False, is_any_greedy=False, vocab_size=VOCAB, **asked | needs)

    assert not filters(batch())
    for name in ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"):
        assert filters(batch(**{name: True}))
