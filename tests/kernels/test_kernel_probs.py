"""Logits to the target's distribution."""

from __future__ import annotations

import pytest
import torch
from freedraft_kernels import target_probs


def by_hand(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    probs = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(probs)), key=lambda t: (-float(probs[t]), t))
    kept = order[:top_k] if top_k >= 1 else order
    mass, result = 0.0, torch.zeros_like(probs)
    for rank, token in enumerate(kept):
        if rank and (mass >= top_p or probs[token] < min_p * probs[order[0]]):
            break
        result[token] = probs[token]
        mass += float(probs[token])
    return result / result.sum()


def test_filters() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 12) * 2
    temperatures, top_ks = torch.tensor([1.0, 0.5, 2.0, 0.7]), torch.tensor([0, 3, 8, 1])
    top_ps, min_ps = torch.tensor([0.8, 0.73, 1.0, 0.5]), torch.tensor([0.0, 0.0, 0.3, 0.1])
    got = target_probs(logits, temperatures, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
    assert got.dtype == torch.float32
    for b in range(4):
        for n in range(3):
            options = temperatures[b].item(), int(top_ks[b]), top_ps[b].item(), min_ps[b].item()
            want = by_hand(logits[b, n], *options)
            assert torch.allclose(got[b, n].double(), want, atol=1e-6), (b, n)


def test_temperature_alone_and_greedy() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0]], [[1.0, 3.0, 2.0]]]).bfloat16()
    got = target_probs(logits, torch.tensor([2.0, 0.0]))
    assert torch.allclose(got[0, 0], torch.softmax(torch.tensor([0.5, 1.5, 1.0]), -1))
    assert got[1, 0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("in_turns", [False, True])
def test_top_p_counts_the_mass_before_top_k_or_after(in_turns: bool) -> None:
    logits = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log()
    options = {"top_ks": torch.tensor([2]), "top_ps": torch.tensor([0.5]), "in_turns": in_turns}
    assert (target_probs(logits, torch.ones(1), **options) > 0).sum() == (1 if in_turns else 2)


def test_filters_in_turns() -> None:
    """As FlashInfer's `top_k_renorm_prob`, `top_p_renorm_prob` and `min_p_sampling_from_probs` one after the other."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(40, 2, 9, generator=generator)
    top_ks = torch.randint(1, 10, (40,), generator=generator)
    top_ps, min_ps = (torch.rand(40, generator=generator) for _ in range(2))
    got = target_probs(logits, torch.ones(40), top_ks=top_ks, top_ps=top_ps, min_ps=min_ps, in_turns=True)
    for b in range(40):
        for node in range(2):
            want = logits[b, node].softmax(-1).double()
            want[want < want.sort(descending=True)[0][top_ks[b] - 1]] = 0
            want /= want.sum()
            order = want.argsort(descending=True)
            want[order[want[order].cumsum(-1) - want[order] >= top_ps[b]]] = 0
            want[want < want.max() * min_ps[b]] = 0
            torch.testing.assert_close(got[b, node].double(), want / want.sum(), atol=1e-5, rtol=1e-5)


def test_masked_tokens_stay_out() -> None:
    logits = torch.tensor([[[0.0, float("-inf"), 1.0]]])
    got = target_probs(logits, torch.ones(1), top_ks=torch.tensor([3]), top_ps=torch.tensor([1.0]))
    assert got[0, 0, 1] == 0 and abs(got.sum().item() - 1) < 1e-6


def test_of_equal_tokens_the_first_are_kept() -> None:
    """bfloat16 makes many logits equal."""
    logits = torch.tensor([[[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]]]).bfloat16()
    for options, kept in [
        ({"top_ks": torch.tensor([2])}, [1, 3]),
        ({"top_ks": torch.tensor([4])}, [0, 1, 3, 5]),
        ({"top_ps": torch.tensor([0.5])}, [1, 3]),
        ({"top_ps": torch.tensor([0.95])}, [0, 1, 2, 3, 5]),
    ]:
        got = target_probs(logits, torch.ones(1), **options)
        assert got[0, 0].nonzero().squeeze(1).tolist() == kept
        assert abs(got.sum().item() - 1) < 1e-6


def test_padding_is_not_filtered() -> None:
    logits, options = torch.randn(2, 3, 50), {"top_ks": torch.tensor([2, 2])}
    got = target_probs(logits, torch.ones(2), counts=torch.tensor([1, 3], dtype=torch.int32), **options)
    assert (got > 0).sum(-1).tolist() == [[2, 50, 50], [2, 2, 2]]
