"""Verification by the reference: the right path, and exactly the target's distribution."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields

import numpy as np
import pytest
import torch
from freedraft_kernels import TreeBatch, verify_greedy, verify_sampled
from freedraft_kernels.draws import DRAW_BITS
from freedraft_kernels.verification import verify_with_draws
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import batches, children, on, path_to, random_batch, random_probs
from scipy import stats

from freedraft.draft import DraftBatch

TOP = 2**DRAW_BITS - 1


def walk(drafts: DraftBatch, row: int, targets: np.ndarray) -> tuple[list[int], list[int]]:
    """(accepted nodes, new tokens) of greedy verification, in plain Python."""
    if drafts.counts[row] == 0:
        return [], []
    path = [0]
    while True:
        want = int(targets[row, path[-1]])
        hits = [i for i in children(drafts, row, path[-1]) if drafts.tokens[row, i] == want]
        if not hits:
            return path, [int(drafts.tokens[row, i]) for i in path[1:]] + [want]
        path.append(hits[0])


@settings(max_examples=80, deadline=None)
@given(batches(max_vocab=4))
def test_greedy(case: tuple[DraftBatch, int, int]) -> None:
    drafts, vocab, seed = case
    kind = np.int64 if seed % 2 else np.int32
    targets = np.random.default_rng(seed).integers(0, vocab, drafts.tokens.shape).astype(kind)
    got = verify_greedy(on("cpu", drafts), torch.from_numpy(targets), backend="reference")
    for b in range(drafts.batch_size):
        path, tokens = walk(drafts, b, targets)
        room = drafts.max_nodes
        assert got.accepted[b].tolist() == path + [-1] * (room - len(path))
        assert got.tokens[b].tolist() == tokens + [-1] * (room - len(tokens))
        assert got.lengths[b] == len(path)
        assert got.bonus[b] == (tokens[-1] if tokens else -1)
    assert {t.dtype for t in (got.accepted, got.lengths, got.tokens, got.bonus)} == {torch.int32}


def law(drafts: DraftBatch, probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Probability of every output of `verify_with_draws` for row 0, by integrating it over its draws.

    Each node of the tree is reached by one sequence of decisions: accept its ancestors (draw 0), reject their earlier
    siblings (the highest draw). From there, the draws at which the outcome changes are found by bisection of the
    function itself, all of them side by side in one batch.
    """
    count, vocab = int(drafts.counts[0]), probs.shape[-1]
    reach = {}
    for node in range(count):
        draw = np.full(drafts.max_nodes, TOP)
        draw[path_to(drafts, 0, node)] = 0
        reach[node] = draw
    questions = [(node, -1) for node in range(1, count)] + [(n, t) for n in range(count) for t in range(vocab - 1)]
    if not questions:
        questions = [(0, 0)]

    def run(middle: np.ndarray) -> np.ndarray:
        """Which questions are answered yes: is node accepted, or the bonus token after it at most t, at this draw."""
        rows = len(questions)
        draw = np.stack([reach[drafts.parents[0, n] if t < 0 else n] for n, t in questions])
        for i, (node, token) in enumerate(questions):
            if token < 0:  # its earlier siblings are rejected already: their draws are the highest
                draw[i, node] = middle[i]
            else:
                draw[i, 0] = middle[i]
        batch = repeated(drafts, rows)
        got = verify_with_draws(on("cpu", batch), probs[:1].expand(rows, -1, -1).contiguous(), torch.from_numpy(draw))
        accepted, bonus = got.accepted.numpy(), got.bonus.numpy()
        return np.array([n in accepted[i] if t < 0 else bonus[i] <= t for i, (n, t) in enumerate(questions)])

    low, high = np.zeros(len(questions), np.int64), np.full(len(questions), TOP + 1)  # yes below low, no from high on
    while (high > low).any():
        middle = (low + high) // 2
        yes = run(np.minimum(middle, TOP)) & (middle < TOP + 1)
        low, high = np.where((high > low) & yes, middle + 1, low), np.where((high > low) & ~yes, middle, high)
    share = dict(zip(questions, (low / 2**DRAW_BITS).tolist(), strict=True))

    outcomes: dict[tuple[int, ...], float] = defaultdict(float)
    arrive = {0: 1.0}
    for node in range(count):
        here = arrive.get(node, 0.0)
        for child in children(drafts, 0, node):
            arrive[child] = here * share[(child, -1)]
            here *= 1.0 - share[(child, -1)]
        tokens = tuple(int(drafts.tokens[0, i]) for i in path_to(drafts, 0, node)[1:])
        ends = [share.get((node, t), 1.0) for t in range(vocab - 1)] + [1.0]
        for token, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False)):
            outcomes[(*tokens, token)] += here * (end - start)
    return outcomes


def target_law(drafts: DraftBatch, probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """What plain sampling from the target says until it leaves the tree."""
    outcomes: dict[tuple[int, ...], float] = defaultdict(float)

    def go(node: int, tokens: tuple[int, ...], chance: float) -> None:
        row = probs[0, node].double()
        row = row / row.sum()
        next_nodes = {int(drafts.tokens[0, i]): i for i in children(drafts, 0, node)}
        for token, p in enumerate(row.tolist()):
            if token in next_nodes:
                go(next_nodes[token], (*tokens, token), chance * p)
            else:
                outcomes[(*tokens, token)] += chance * p

    go(0, (), 1.0)
    return outcomes


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 8))
def test_sampled_has_exactly_the_targets_distribution(seed: int, vocab: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    drafts = random_batch(rng, 1, nodes, vocab, [nodes])
    probs = random_probs(rng, 1, nodes, vocab)
    ours, wanted = law(drafts, probs), target_law(drafts, probs)
    assert math.isclose(sum(ours.values()), 1.0, abs_tol=1e-9)
    distance = 0.5 * sum(abs(ours.get(k, 0.0) - wanted.get(k, 0.0)) for k in {*ours, *wanted})
    assert distance < 1e-6, distance


def test_enumeration_sees_a_biased_procedure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring device works: acceptance a third too easy, as with a threshold of 0.75, shows."""
    from freedraft_kernels import verification

    drafts, probs = random_batch(np.random.default_rng(5), 1, 5, 4, [5]), torch.full((1, 5, 4), 0.25)
    exact = verification.scale
    monkeypatch.setattr(verification, "scale", lambda draw, total: exact(draw, total) * 3 // 4)
    ours, wanted = law(drafts, probs), target_law(drafts, probs)
    assert 0.5 * sum(abs(ours.get(k, 0.0) - wanted.get(k, 0.0)) for k in {*ours, *wanted}) > 0.01


def repeated(drafts: DraftBatch, times: int) -> DraftBatch:
    """Row 0, `times` times."""
    arrays = [getattr(drafts, field.name) for field in fields(drafts)]
    return DraftBatch(*(np.repeat(a[:1], times, 0) for a in arrays))


def chi_square(drafts: DraftBatch, probs: torch.Tensor, samples: int, backend: str, device: str = "cpu") -> float:
    """p-value of `samples` seeds of row 0 against the target."""
    batch = repeated(drafts, samples)
    seeds = torch.arange(samples, device=device) * 0x9E3779B97F4A7C15 % 2**63
    positions = torch.full((samples,), 37, device=device)
    rows = probs[:1].expand(samples, -1, -1).contiguous().to(device)
    got = verify_sampled(on(device, batch), rows, seeds, positions, backend=backend)  # type: ignore[arg-type]
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    for tokens, length in zip(got.tokens.tolist(), got.lengths.tolist(), strict=True):
        seen[tuple(tokens[:length])] += 1
    wanted = target_law(drafts, probs)
    assert set(seen) <= {k for k, p in wanted.items() if p > 0}
    common = [k for k, p in wanted.items() if p * samples >= 5]
    observed = np.array([seen[k] for k in common] + [samples - sum(seen[k] for k in common)])
    expected = np.array([wanted[k] * samples for k in common])
    expected = np.append(expected, samples - expected.sum())
    if expected[-1] < 5:  # too rare to be a cell of its own
        observed[-2:-1] += observed[-1:]
        expected[-2:-1] += expected[-1:]
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("seed", range(4))
def test_sampled_passes_a_chi_square(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafts = random_batch(rng, 1, 7, 5, [7])
    probs = torch.softmax(torch.from_numpy(rng.normal(size=(1, 7, 5))), -1).float()
    assert chi_square(drafts, probs, 40_000, "reference") > 1e-4


def test_one_hot_rows_are_verified_greedily() -> None:
    rng = np.random.default_rng(11)
    drafts = random_batch(rng, 64, 10, 3)
    targets = torch.from_numpy(rng.integers(0, 3, (64, 10)))
    probs = torch.nn.functional.one_hot(targets, 3).float()
    seeds = torch.from_numpy(rng.integers(0, 2**62, 64))
    tree = on("cpu", drafts)
    sampled = verify_sampled(tree, probs, seeds, torch.arange(64), backend="reference")
    greedy = verify_greedy(tree, targets, backend="reference")
    for field in ("accepted", "lengths", "tokens", "bonus"):
        assert torch.equal(getattr(sampled, field), getattr(greedy, field)), field


def test_sampled_depends_on_the_request_alone() -> None:
    rng = np.random.default_rng(12)
    drafts, probs = random_batch(rng, 6, 8, 5), random_probs(rng, 6, 8, 5)
    seeds, positions = torch.arange(6) * 7919, torch.arange(6) + 100
    whole = verify_sampled(on("cpu", drafts), probs, seeds, positions, backend="reference")
    order = [4, 1, 3]
    rows = DraftBatch(*(getattr(drafts, field.name)[order] for field in fields(drafts)))
    part = verify_sampled(on("cpu", rows), probs[order], seeds[order], positions[order], backend="reference")
    assert torch.equal(part.tokens, whole.tokens[order])


def test_large_token_ids_and_tokens_outside_the_vocabulary() -> None:
    vocab = 152_064
    tokens = torch.tensor([[5, vocab - 1, vocab, 2**31 - 1]] * 50, dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 0]] * 50, dtype=torch.int32)
    depths = torch.tensor([[0, 1, 1, 1]] * 50, dtype=torch.int32)
    tree = TreeBatch(tokens, parents, depths, torch.full((50,), 4, dtype=torch.int32))
    row = torch.zeros(vocab)
    row[vocab - 1] = row[0] = row[vocab - 2] = 1 / 3
    probs = row.expand(50, 4, vocab).contiguous()
    got = verify_sampled(tree, probs, torch.arange(50), torch.zeros(50, dtype=torch.int64), backend="reference")
    assert set(got.tokens[:, 0].tolist()) == {0, vocab - 2, vocab - 1}
    assert set(got.lengths.tolist()) == {1, 2} and not {2, 3} & set(got.accepted.flatten().tolist())


def test_rows_that_are_no_distribution_give_a_token_of_the_vocabulary() -> None:
    rng = np.random.default_rng(13)
    tree = on("cpu", random_batch(rng, 5, 4, 6, [4] * 5))
    probs = torch.zeros(5, 4, 6)
    probs[1] = float("nan")
    probs[2] = -1.0
    probs[3] = float("inf")
    probs[4, :, 2] = 1.0 + 1e-6
    got = verify_sampled(tree, probs, torch.arange(5), torch.arange(5), backend="reference")
    assert ((got.bonus >= 0) & (got.bonus < 6)).all()
    assert got.bonus[4] == 2


def test_bad_input() -> None:
    tree = on("cpu", random_batch(np.random.default_rng(0), 2, 4, 9))
    targets, seeds = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    probs = torch.ones(2, 4, 9) / 9
    with pytest.raises(ValueError, match=r"targets has shape \[2, 3\], expected \[2, 4\]"):
        verify_greedy(tree, targets[:, :3])
    with pytest.raises(ValueError, match="targets is torch"):
        verify_greedy(tree, targets.float())
    with pytest.raises(ValueError, match=r"probs is \[8, 9\]"):
        verify_sampled(tree, probs.view(8, 9), seeds, seeds)
    with pytest.raises(ValueError, match=r"probs has shape \[1, 4, 9\]"):
        verify_sampled(tree, probs[:1], seeds, seeds)
    with pytest.raises(ValueError, match=r"probs is torch\.bfloat16, expected torch\.float32"):
        verify_sampled(tree, probs.bfloat16(), seeds, seeds)
    with pytest.raises(ValueError, match="probs is not contiguous"):
        verify_sampled(tree, torch.ones(2, 9, 4).transpose(1, 2), seeds, seeds)
    with pytest.raises(ValueError, match=r"seeds is torch\.int32"):
        verify_sampled(tree, probs, seeds.int(), seeds)
    with pytest.raises(ValueError, match=r"positions has shape \[1\]"):
        verify_sampled(tree, probs, seeds, seeds[:1])
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        verify_greedy(on("cpu", random_batch(np.random.default_rng(0), 1, 1, 9)), targets[:1, :1], backend="triton")
