"""What draft passes ask of a device, and what their CUDA graphs take of it, without one."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from freedraft.draft_model import Window


@pytest.fixture
def draft_model():
    pytest.importorskip("sglang")
    from freedraft.engines.sglang import draft_model

    return draft_model


class Transfers(TorchDispatchMode):
    """Counts copies from the host to the device, for which the meta device stands."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        to = (kwargs or {}).get("device")
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].device.type == "cpu" and to is not None:
            self.number += torch.device(to).type == "meta"
        return func(*args, **(kwargs or {}))


def one_rank():
    from freedraft.engines.draft_ranks import DraftRanks

    return DraftRanks(SimpleNamespace(world_size=1, rank_in_group=0))


@pytest.mark.parametrize("window, copies", [(None, 1), (Window(4, 8), 3)], ids=["whole", "window"])
def test_a_round_sends_to_the_device_once(draft_model, monkeypatch, window, copies):
    """Its tokens, where they belong and where they stand; through a window what it leaves out, and its table, too."""
    from freedraft.engines import on_device
    from freedraft.engines.sglang import window_rows

    def unpinned(values, device):  # there is no device to pin memory for
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    for module in (on_device, draft_model, window_rows):
        monkeypatch.setattr(module, "on_device", unpinned, raising=False)
    monkeypatch.setattr(draft_model.ForwardBatch, "init_new", lambda part, *_, **__: part)
    meta = torch.device("meta")
    batch = SimpleNamespace(
        reqs=["a", "b", "c"],
        seq_lens=torch.zeros(3, dtype=torch.int64, device=meta),
        seq_lens_cpu=torch.tensor([30, 40, 50]),
        req_pool_indices=torch.zeros(3, dtype=torch.int64, device=meta),
        orig_seq_lens=None,
        sampling_info=SimpleNamespace(logit_bias=None, is_all_greedy=True),
    )
    lengths = []

    class Model(draft_model.PagedDraftModel):
        def __init__(self):
            self.ranks, self.runner, self.attended, self._graphs = one_rank(), None, None, {}
            self.window_rows = window_rows.WindowRows.__new__(window_rows.WindowRows)
            pool = SimpleNamespace(req_to_token=torch.zeros(9, 64, dtype=torch.int32, device=meta))
            self.window_rows._pool, self.window_rows._page_size = pool, 1
            self.window_rows.rows = torch.zeros(4, dtype=torch.int64, device=meta)

        def run(self, stages, part):
            lengths.append(part.seq_lens_cpu.tolist())
            return torch.zeros(2, 16, device=meta)

    round_ = draft_model.PagedRound.__new__(draft_model.PagedRound)
    round_._model, round_._batch, round_._max_draft_len, round_._read = Model(), batch, 4, None
    round_.slots = torch.zeros(3, 4, dtype=torch.int64, device=meta)
    draft_pass = draft_model.DraftPass((), window, 1, False, 1)
    with Transfers() as transfers:
        found = round_.launch(draft_pass, np.array([2, 0]), np.array([7, 8], np.int32), 1, count=3)
    assert found.outputs.shape == (3, 2, 2)
    whole = np.array([52, 32]) - (0 if window is None else np.array([39, 19]))
    assert lengths == [(whole + i).tolist() for i in range(3)]
    assert transfers.number == copies


def test_the_log_says_what_graphs_of_draft_passes_take(draft_model, monkeypatch, caplog):
    free = iter([5 * 2**30, 4 * 2**30])
    monkeypatch.setattr(draft_model, "free_bytes", lambda: next(free), raising=False)
    monkeypatch.setattr(draft_model, "capture", lambda runner, width: (runner, width))
    model = draft_model.PagedDraftModel.__new__(draft_model.PagedDraftModel)
    model.runner, model.ranks = SimpleNamespace(decode_cuda_graph_runner=object()), one_rank()
    model._model, model.decoder = SimpleNamespace(), None
    model._to_capture, model._graphs = {("one",): None, ("two",): None}, {}
    with caplog.at_level(logging.INFO):
        model.capture()
    assert "CUDA graphs of 2 draft passes take 1024 MiB" in caplog.text and "4.00 GiB are free" in caplog.text


def test_a_rank_that_cannot_capture_leaves_no_other_waiting(draft_model, monkeypatch):
    """One of several ends the engine, whose ranks capture together; alone it runs passes eagerly."""
    from freedraft.engines.draft_ranks import DraftRanks
    from freedraft.guarded_method import EngineMustEnd

    def fail(runner, width):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(draft_model, "capture", fail)
    model = draft_model.PagedDraftModel.__new__(draft_model.PagedDraftModel)
    model.runner, model._model, model.decoder = (
        SimpleNamespace(decode_cuda_graph_runner=object()),
        SimpleNamespace(),
        None,
    )
    model._to_capture, model._graphs = {("one",): None}, {("before",): None}
    model.ranks = one_rank()
    model.capture()
    assert not model._graphs
    model.ranks = DraftRanks(SimpleNamespace(world_size=2, rank_in_group=1))
    with pytest.raises(EngineMustEnd):
        model.capture()
