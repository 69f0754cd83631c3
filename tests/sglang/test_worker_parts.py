"""Pieces of the worker that need no engine: CUDA graphs of draft passes that cannot be captured, trees on their way to
other ranks; and against slow, obvious versions rows of `req_to_token` for windowed passes, links of trees and documents
of chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freedraft.draft import DraftBatch
from freedraft.draft_pass import Window
from freedraft.engines.draft_ranks import DraftRanks
from tests.support.random_trees import random_batch


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """SGLang's group of one tensor-parallel rank."""
    from sglang.srt.distributed import parallel_state

    address = f"file://{tmp_path_factory.mktemp('ranks') / 'store'}"
    parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
    yield parallel_state.init_model_parallel_group([[0]], 0, "gloo", use_custom_allreduce=False)
    parallel_state.destroy_distributed_environment()


class Runner:
    """As much of SGLang's ModelRunner, which takes a model and a device, as says that graphs are captured."""

    decode_cuda_graph_runner = object()


def test_a_rank_that_cannot_capture_leaves_no_other_waiting(group, monkeypatch):
    """One of several ends the engine, whose ranks capture together; alone it runs passes eagerly."""
    from freedraft.engines.sglang import draft_model
    from freedraft.guarded_method import EngineMustEnd

    def fail(runner, width):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(draft_model, "capture", fail)
    model = draft_model.PagedDraftModel.__new__(draft_model.PagedDraftModel)
    model.runner, model.ranks, model._model, model.decoder = Runner(), DraftRanks(group), torch.nn.Module(), None
    model._to_capture, model._graphs = {("one",): None}, {("before",): None}
    model.capture()
    assert not model._graphs
    monkeypatch.setattr(group, "world_size", 2)
    monkeypatch.setattr(group, "rank_in_group", 1)
    model.ranks, model._to_capture = DraftRanks(group), {("one",): None}
    with pytest.raises(EngineMustEnd):
        model.capture()


def test_trees_reach_other_ranks_in_shared_memory(group, monkeypatch):
    """By SGLang's message queue, which its groups of several ranks have; no collective makes a rank wait for others."""
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue

    from freedraft.engines.sglang.ranks import Ranks

    monkeypatch.setattr(torch.distributed, "broadcast", None)
    drafted = DraftBatch.empty(3, 5)
    drafted.tokens[:], drafted.counts[:] = np.arange(15).reshape(3, 5), [5, 1, 2]
    monkeypatch.setattr(group, "world_size", 2)
    writer = MessageQueue(1, 1)
    monkeypatch.setattr(group, "mq_broadcaster", writer)
    assert Ranks(group).share_draft(drafted) is drafted
    monkeypatch.setattr(group, "mq_broadcaster", MessageQueue.create_from_handle(writer.export_handle(), 0))
    monkeypatch.setattr(group, "rank_in_group", 1)
    shared = Ranks(group).share_draft(None)
    assert shared.tokens.tolist() == drafted.tokens.tolist() and shared.counts.tolist() == [5, 1, 2]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("attended", [None, 150])
def test_rows_hold_the_slots_that_a_window_leaves(page_size, attended):
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from freedraft.engines.sglang.draft_model import WindowRows

    pool = ReqToTokenPool(5, 300, "cpu", False)
    pool.req_to_token[1:] = torch.randperm(5 * 300).view(5, 300)
    before, window, drafts = pool.req_to_token.clone(), Window(20, 50), 6
    extra = WindowRows(pool, page_size)
    assert set(pool.free_slots).isdisjoint(extra.rows.tolist()) and len(extra.rows) == 5
    requests, roots = torch.tensor([3, 1, 5]), np.array([290, 45, 140])
    left_out = extra.write(requests, roots, window, drafts, attended)
    assert torch.equal(pool.req_to_token[: 5 + 1], before), "rows of requests stay as they are"
    for row, taken, root, out in zip(extra.rows, requests.tolist(), roots.tolist(), left_out.tolist(), strict=False):
        sinks = 0 if attended is not None and root + drafts > attended else window.sinks
        sink_end = -(-sinks // page_size) * page_size
        start = max(sink_end, (root + 1 - window.newest) // page_size * page_size)
        places = (
            [*range(min(sink_end, root + drafts)), *range(start, root + drafts)]
            if start > sink_end
            else [*range(root + drafts)]
        )
        assert len(places) == root + drafts - out
        assert pool.req_to_token[row, : len(places)].tolist() == before[taken, places].tolist()


def test_tree_links():
    from freedraft.engines.sglang.verify import tree_links

    rng = np.random.default_rng(1)
    for _ in range(30):
        tree = random_batch(rng, 3, 9, 50)
        child, sibling = tree_links(tree)
        for b in range(3):
            n = int(tree.counts[b])
            for i in range(9):
                below = [j for j in range(n) if tree.parents[b, j] == i and i < n]
                after = [j for j in range(i + 1, n) if i and tree.parents[b, j] == tree.parents[b, i]]
                assert child[b, i] == (below[0] if below else -1)
                assert sibling[b, i] == (after[0] if after and i < n else -1)
