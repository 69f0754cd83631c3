"""Random draft trees, and the plain Python that says what is right about them."""

import numpy as np
from freedraft_kernels import TreeBatch
from hypothesis import strategies as st

from freedraft.draft import DraftBatch

JUNK = np.array([-(2**31), -7, -1, 0, 1, 3, 10**6, 2**31 - 1], np.int32)


def random_batch(
    rng: np.random.Generator, batch: int, nodes: int, vocab: int, counts: list[int] | None = None, chain: bool = False
) -> DraftBatch:
    """Trees of every shape between chain and star, or chains; entries beyond the counts are junk."""
    drafts = DraftBatch.empty(batch, nodes)
    for array in (drafts.tokens, drafts.parents, drafts.depths):
        array[...] = rng.choice(JUNK, array.shape)
    for b in range(batch):
        count = int(rng.integers(0, nodes + 1)) if counts is None else counts[b]
        reach = 1 if chain else int(rng.integers(1, nodes + 1))
        used: list[set[int]] = []
        node = 0
        while node < count:
            parent = -1 if node == 0 else int(rng.integers(max(0, node - reach), node))
            token = int(rng.integers(vocab))
            if parent >= 0:
                free = [t for t in range(vocab) if t not in used[parent]] if vocab <= 64 else [token]
                if not free:
                    count = node
                    break
                token = int(rng.choice(free)) if vocab <= 64 else token
                if token in used[parent]:
                    continue
                used[parent].add(token)
            used.append(set())
            drafts.tokens[b, node], drafts.parents[b, node] = token, parent
            drafts.depths[b, node] = 0 if parent < 0 else drafts.depths[b, parent] + 1
            drafts.scores[b, node] = 1.0 if parent < 0 else 0.5 * drafts.scores[b, parent]
            node += 1
        drafts.counts[b] = count
    drafts.check()
    return drafts


@st.composite
def batches(
    draw: st.DrawFn, max_batch: int = 5, max_nodes: int = 12, max_vocab: int = 9
) -> tuple[DraftBatch, int, int]:
    """(trees, of no request even; vocabulary size; seed for whatever else the test makes up)."""
    seed = draw(st.integers(0, 2**32 - 1))
    vocab = draw(st.integers(2, max_vocab))
    shape = draw(st.integers(0, max_batch)), draw(st.integers(1, max_nodes))
    return random_batch(np.random.default_rng(seed), *shape, vocab), vocab, seed


def on(device: str, drafts: DraftBatch) -> TreeBatch:
    return TreeBatch.from_numpy(drafts.tokens, drafts.parents, drafts.depths, drafts.counts, device)


def path_to(drafts: DraftBatch, row: int, node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    path = [node]
    while path[-1] > 0:
        path.append(int(drafts.parents[row, path[-1]]))
    return path[::-1]


def children(drafts: DraftBatch, row: int, node: int) -> list[int]:
    return [i for i in range(1, int(drafts.counts[row])) if drafts.parents[row, i] == node]
