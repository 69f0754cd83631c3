"""What becomes of draft passes where their CUDA graphs cannot be captured."""

from __future__ import annotations

import pytest
import torch

from freedraft.engines.draft_ranks import DraftRanks


@pytest.fixture
def draft_model():
    pytest.importorskip("sglang")
    from freedraft.engines.sglang import draft_model

    return draft_model


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


def to_capture(draft_model, group, *names):
    model = draft_model.PagedDraftModel.__new__(draft_model.PagedDraftModel)
    model.runner, model.ranks, model._model, model.decoder = Runner(), DraftRanks(group), torch.nn.Module(), None
    model._to_capture, model._graphs = {(name,): None for name in names}, {}
    return model


def test_a_rank_that_cannot_capture_leaves_no_other_waiting(draft_model, group, monkeypatch):
    """One of several ends the engine, whose ranks capture together; alone it runs passes eagerly."""
    from freedraft.guarded_method import EngineMustEnd

    def fail(runner, width):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(draft_model, "capture", fail)
    model = to_capture(draft_model, group, "one")
    model._graphs = {("before",): None}
    model.capture()
    assert not model._graphs
    monkeypatch.setattr(group, "world_size", 2)
    monkeypatch.setattr(group, "rank_in_group", 1)
    model.ranks, model._to_capture = DraftRanks(group), {("one",): None}
    with pytest.raises(EngineMustEnd):
        model.capture()
