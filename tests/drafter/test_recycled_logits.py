"""Drafts from recycled logits: bounded in memory, apart by tenant, and refreshed. Equal to the oracle's: see there."""

import numpy as np

from freedraft.draft import DraftBatch
from freedraft.step import TOP_TOKENS, NodeLogits
from sssd_plugin.drafter import Drafter
from tests.support.stores import int32


def one_node(drafter: Drafter, name: str, tokens: list[int], following: int) -> None:
    """The target says that `following` comes behind `tokens`, at a tree of one node."""
    drafter.replace(name, int32(tokens))
    root = DraftBatch.roots(int32([tokens[-1]]))
    top = np.full((1, 1, TOP_TOKENS), -1, np.int32)
    log_probs = np.full((1, 1, TOP_TOKENS), -np.inf, np.float32)
    top[..., 0], log_probs[..., 0] = following, -0.01
    drafter.recycle(NodeLogits([name], root, top, log_probs))


def test_what_is_no_token_is_never_drafted() -> None:
    """Of a model with logits that overflow, or are padded beyond the vocabulary."""
    drafter = Drafter(vocab_size=10, max_nodes=4, recycle_megabytes=1)
    drafter.replace("r", int32([1]))
    top = np.array([[[10, -1, 2**31 - 1, 4, 5, 6, 7, 8]]], np.int32)
    for bad in (np.nan, np.inf, -np.inf):
        drafter.recycle(NodeLogits(["r"], DraftBatch.roots(int32([1])), top, np.full(top.shape, bad, np.float32)))
        batch = drafter.draft(["r"], max_nodes=4)
        assert batch.tokens[0, : batch.counts[0]].max() < 10
        batch.check()


def test_at_its_bound_the_table_evicts_and_never_grows() -> None:
    megabytes = 0.05
    drafter = Drafter(vocab_size=1 << 20, max_nodes=2, recycle_megabytes=megabytes)
    held = drafter._entries
    assert 0 < held.nbytes <= megabytes * 2**20 and len(held) & (len(held) - 1) == 0
    number = 4 * len(held)  # each with an entry for contexts of 1, 2 and 3 tokens
    for i in range(number):
        one_node(drafter, "r", [3 * i + 1, 3 * i + 2, 3 * i + 3], 7)
    assert drafter._entries is held and (held["key"] != 0).mean() > 0.95
    found = []
    for i in range(number):
        drafter.replace("s", int32([0, 3 * i + 3]))
        batch = drafter.draft(["s"], max_nodes=2)
        found.append(batch.counts[0] == 2 and batch.tokens[0, 1] == 7)
    assert not any(found[: number // 2]), "the oldest go first"
    assert np.mean(found[-number // 64 :]) > 0.9
