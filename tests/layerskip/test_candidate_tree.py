"""SWIFT's dynamic verification: the tree is the chain with its best other candidates as siblings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip_plugin.candidate_tree import candidate_tree, candidates_at
from layerskip_plugin.rounds import Round
from layerskip_plugin.skip_set import SkipSet


def test_candidates_by_confidence():
    """The ranges of the paper: (0, .5], (.5, .8], (.8, .95], (.95, 1]."""
    p = np.array([0.01, 0.5, 0.51, 0.79, 0.81, 0.94, 0.96, 1.0], np.float32)
    assert candidates_at(p).tolist() == [10, 10, 5, 5, 3, 3, 1, 1]


def drafts(rng, batch, depth, candidates, vocab=50):
    tokens = rng.permuted(np.tile(np.arange(vocab), (batch, depth, 1)), axis=-1)[:, :, :candidates]
    raw = np.sort(rng.dirichlet(np.ones(vocab) * rng.uniform(0.02, 1.0), (batch, depth)), -1)[:, :, ::-1]
    return tokens.astype(np.int32), raw[:, :, :candidates].astype(np.float32)


def slow(tokens, probabilities, length, siblings_too):
    """Nodes of one tree as (path of tokens -> score): the chain, and all of its siblings."""
    chain, siblings, path, score = {}, {}, (), 1.0
    for j in range(length):
        for r in range(1, min(int(candidates_at(probabilities[j, :1])[0]), tokens.shape[1])):
            if siblings_too and probabilities[j, r] > 0:
                siblings[*path, int(tokens[j, r])] = score * float(probabilities[j, r])
        path, score = (*path, int(tokens[j, 0])), score * float(probabilities[j, 0])
        chain[path] = score
    return chain, siblings


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 10), st.integers(1, 20), st.booleans()
)
def test_equals_the_slow_version(seed, batch, depth, candidates, max_nodes, siblings_too):
    rng = np.random.default_rng(seed)
    tokens, probabilities = drafts(rng, batch, depth, candidates)
    drafted = rng.integers(0, depth + 1, batch).astype(np.int32)
    roots = rng.integers(0, 50, batch).astype(np.int32)
    made = Round([str(b) for b in range(batch)], SkipSet.empty(2), depth, tokens.shape[2])
    made.tokens[:], made.probabilities[:], made.drafted[:] = tokens, probabilities, drafted
    tree = candidate_tree(made, roots, max_nodes, siblings_too)
    tree.check()
    for b in range(batch):
        n = int(tree.counts[b])
        assert 1 <= n <= max_nodes and tree.tokens[b, 0] == roots[b]
        paths, of = {}, {0: ()}
        for i in range(1, n):
            of[i] = (*of[int(tree.parents[b, i])], int(tree.tokens[b, i]))
            paths[of[i]] = float(tree.scores[b, i])
        length = min(int(drafted[b]), max_nodes - 1)
        chain, siblings = slow(tokens[b], probabilities[b], length, siblings_too)
        assert [of[i] for i in range(1, length + 1)] == list(chain), (
            "the chain stands in front: nothing has to be moved"
        )
        assert (tree.parents[b, 1 : length + 1] == np.arange(length)).all() and len(paths) == n - 1
        for path, score in paths.items():
            assert score == pytest.approx((chain | siblings)[path], rel=1e-5)
        # The best siblings while nodes are left; of equal scores any may be taken.
        best = sorted(siblings.values(), reverse=True)[: max_nodes - 1 - length]
        assert sorted(paths.values()) == pytest.approx(sorted([*chain.values(), *best]), rel=1e-5)
