"""Verification: the right path, and exactly the target's distribution."""

import itertools
import math
from collections import defaultdict
from dataclasses import fields
from fractions import Fraction

import numpy as np
import torch
from freedraft_kernels import TreeBatch, verify, verify_rows
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from implementations import DEVICE, EXAMPLES, by_each, runs_triton

from freedraft.draft import DraftBatch
from tests.support.random_trees import batches, children, on, random_batch


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


@by_each
@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(batches(max_nodes=20, max_vocab=4))
def test_greedy(backend: str, device: str, case: tuple[DraftBatch, int, int]) -> None:
    drafts, vocab, seed = case
    kind = np.int64 if seed % 2 else np.int32
    targets = np.random.default_rng(seed).integers(0, vocab, drafts.tokens.shape).astype(kind)
    got = verify(on(device, drafts), torch.from_numpy(targets).to(device), backend=backend)
    for b in range(drafts.batch_size):
        path, tokens = walk(drafts, b, targets)
        room = drafts.max_nodes
        assert got.accepted[b].tolist() == path + [-1] * (room - len(path))
        assert got.tokens[b].tolist() == tokens + [-1] * (room - len(tokens))
        assert got.lengths[b] == len(path)
    assert {t.dtype for t in (got.accepted, got.lengths, got.tokens)} == {torch.int32}


@runs_triton
@settings(max_examples=EXAMPLES, deadline=None)
@given(batches(max_nodes=20, max_vocab=4), st.booleans())
def test_rows_by_triton(case: tuple[DraftBatch, int, int], chains: bool) -> None:
    """Of trees somewhere among the step's tokens, and of chains: as in batches, whatever number of rows each has."""
    drafts, vocab, seed = case
    rng, (batch, nodes) = np.random.default_rng(seed), drafts.tokens.shape
    if chains:
        drafts.parents[:] = np.arange(-1, nodes - 1)
    targets = torch.from_numpy(rng.integers(0, vocab, (batch, nodes)))
    rows = drafts.counts if chains else np.minimum(drafts.counts + rng.integers(0, 3, batch), nodes)
    taken = np.arange(nodes) < rows[:, None]
    assume(taken.any())
    places = torch.from_numpy(rng.permutation(2 * taken.sum() + 1)[: taken.sum()])
    parents, slots = (torch.full((2 * len(places) + 1,), -7, dtype=kind) for kind in (torch.int32, torch.int64))
    parents[places] = torch.from_numpy(drafts.parents[taken])
    slots[places] = torch.arange(len(places)) + 5
    counts, tokens = torch.from_numpy(drafts.counts), torch.from_numpy(drafts.tokens[taken])
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32))
    trees = None if chains else tuple(part.to(DEVICE) for part in (parents, slots, places, counts))
    given = (part.to(DEVICE) for part in (tokens, targets[torch.from_numpy(taken)], starts))
    got, of_nodes = verify_rows(*given, nodes, trees)
    expected = verify(on("cpu", drafts), targets, backend="reference")
    for name in ("accepted", "lengths", "tokens"):
        assert getattr(got, name).tolist() == getattr(expected, name).tolist(), name
    assert got.tokens.dtype == torch.int64
    if trees is not None:
        at = np.where(np.arange(nodes) < drafts.counts[:, None], np.cumsum(taken).reshape(batch, nodes) + 4, 0)
        assert of_nodes.tolist() == at.tolist()


Rows = list[list[Fraction]]
"""The target's distribution after each node."""


def random_rows(rng: np.random.Generator, nodes: int, vocab: int) -> Rows:
    """Flat and peaked ones, zeros among them; a row in four is one-hot, as with temperature 0."""
    rows = []
    for _ in range(nodes):
        weights = [int(w) for w in rng.choice([0, 1, 3, 50], vocab) * (rng.random() > 0.25)]
        weights[int(rng.integers(vocab))] += 1
        rows.append([Fraction(w, sum(weights)) for w in weights])
    return rows


def target_law(drafts: DraftBatch, rows: Rows) -> dict[tuple[int, ...], Fraction]:
    """Probability of every output of plain sampling from the target until it leaves the tree."""
    outcomes: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)

    def go(node: int, tokens: tuple[int, ...], chance: Fraction) -> None:
        next_nodes = {int(drafts.tokens[0, i]): i for i in children(drafts, 0, node)}
        for token, p in enumerate(rows[node]):
            if p and token in next_nodes:
                go(next_nodes[token], (*tokens, token), chance * p)
            elif p:
                outcomes[(*tokens, token)] += chance * p

    go(0, (), Fraction(1))
    return outcomes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 8), (3, 6), (4, 5), (6, 4)]), st.booleans())
def test_drawn_targets_give_exactly_the_targets_distribution(seed: int, size: tuple[int, int], chain: bool) -> None:
    """Over all targets that the nodes may draw, each with its probability: no node's draw depends on another's."""
    rng, (vocab, nodes) = np.random.default_rng(seed), size
    drafts = random_batch(rng, 1, nodes, vocab, [nodes])
    if chain:
        drafts.parents[0], drafts.depths[0] = np.arange(-1, nodes - 1), np.arange(nodes)
        drafts.tokens[0] = rng.integers(0, vocab, nodes)
        drafts.counts[0] = nodes
    count = int(drafts.counts[0])
    rows = random_rows(rng, count, vocab)
    drawn = np.array(list(itertools.product(range(vocab), repeat=count)))
    targets = np.pad(drawn, ((0, 0), (0, nodes - count)), constant_values=-7)
    got = verify(on("cpu", repeated(drafts, len(drawn))), torch.from_numpy(targets), backend="reference")
    outputs: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    arrived: dict[int, Fraction] = defaultdict(Fraction)
    for draws, tokens, path, length in zip(drawn, got.tokens, got.accepted, got.lengths.tolist(), strict=True):
        chance = math.prod((row[token] for row, token in zip(rows, draws, strict=True)), start=Fraction(1))
        if chance:
            outputs[tuple(tokens[:length].tolist())] += chance
            for node in path[:length].tolist():
                arrived[node] += chance
    assert outputs == target_law(drafts, rows)
    for node in range(1, count):
        parent, token = int(drafts.parents[0, node]), int(drafts.tokens[0, node])
        assert arrived[node] == arrived[parent] * rows[parent][token], "accepted with another probability"


def repeated(drafts: DraftBatch, times: int) -> DraftBatch:
    """Row 0, `times` times."""
    arrays = [getattr(drafts, field.name) for field in fields(drafts)]
    return DraftBatch(*(np.repeat(a[:1], times, 0) for a in arrays))


def test_large_token_ids_and_tokens_outside_the_vocabulary() -> None:
    last = 152_063
    tokens = torch.tensor([[5, last, last + 1, 2**31 - 1]] * 2, dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 0]] * 2, dtype=torch.int32)
    tree = TreeBatch(tokens, parents, parents + 1, torch.full((2,), 4, dtype=torch.int32))
    got = verify(tree, torch.tensor([[last, last - 1, 0, 0], [last - 1, 0, 0, 0]]), backend="reference")
    assert got.tokens.tolist() == [[last, last - 1, -1, -1], [last - 1, -1, -1, -1]]
    assert got.accepted.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
