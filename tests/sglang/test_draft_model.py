"""What draft passes ask of a device, what their CUDA graphs take of it, and rows of `req_to_token` for windowed ones:
without a device."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from freedraft.draft_pass import Window
from freedraft.engines.draft_ranks import DraftRanks
from tests.sglang.test_drafting import NODES, decoding_batch, request, scheduler_configuration

META = torch.device("meta")  # which stands for a device
__all__ = ["scheduler_configuration"]


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


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """SGLang's group of one tensor-parallel rank."""
    from sglang.srt.distributed import parallel_state

    address = f"file://{tmp_path_factory.mktemp('ranks') / 'store'}"
    parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
    yield parallel_state.init_model_parallel_group([[0]], 0, "gloo", use_custom_allreduce=False)
    parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize("window, copies", [(None, 1), (Window(4, 8), 3)], ids=["whole", "window"])
def test_a_round_sends_to_the_device_once(draft_model, group, monkeypatch, window, copies):
    """Its tokens, where they belong and where they stand; through a window what it leaves out, and its table, too."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from freedraft.engines import on_device
    from freedraft.engines.sglang.accepted import AcceptedTokens

    def unpinned(values, device):  # there is no device to pin memory for
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    def no_slots(**_):  # SGLang's kernel, which there is no device for
        return torch.zeros(3 * 4, dtype=torch.int64, device=META)

    for module in (on_device, draft_model):
        monkeypatch.setattr(module, "on_device", unpinned, raising=False)
    monkeypatch.setattr(draft_model, "assign_extend_cache_locs_func", no_slots)
    monkeypatch.setattr(draft_model.ForwardBatch, "init_new", lambda part, *_, **__: part)
    requests = [request(name, [1] * length) for name, length in (("a", 30), ("b", 40), ("c", 50))]
    batch = decoding_batch({each: [2] for each in requests}, AcceptedTokens(256, NODES, "cpu"))
    batch.seq_lens, batch.req_pool_indices = batch.seq_lens.to(META), batch.req_pool_indices.to(META)
    batch.sampling_info.temperatures = batch.sampling_info.temperatures.to(META)
    lengths = []

    class Model(draft_model.PagedDraftModel):
        def __init__(self):
            self.ranks, self.runner, self.attended, self._graphs = DraftRanks(group), None, None, {}
            pool = ReqToTokenPool(size=4, max_context_len=64, device=META, enable_memory_saver=False)
            self.window_rows = draft_model.WindowRows(pool, 1)

        def run(self, stages, part):
            lengths.append(part.seq_lens_cpu.tolist())
            return torch.zeros(2, 16, device=META)

    draft_pass = draft_model.DraftPass((), window, 1, False, 1)
    round_ = draft_model.PagedRound(Model(), batch, draft_pass, 4)
    with Transfers() as transfers:
        found = round_.launch(np.array([2, 0]), np.array([7, 8], np.int32), 1, count=3)
    assert found.shape == (3, 2, 2)
    whole = np.array([52, 32]) - (0 if window is None else np.array([39, 19]))
    assert lengths == [(whole + i).tolist() for i in range(3)]
    assert transfers.number == copies


class Runner:
    """As much of SGLang's ModelRunner, which takes a model and a device, as says that graphs are captured."""

    decode_cuda_graph_runner = object()


def to_capture(draft_model, group, *names):
    model = draft_model.PagedDraftModel.__new__(draft_model.PagedDraftModel)
    model.runner, model.ranks, model._model, model.decoder = Runner(), DraftRanks(group), torch.nn.Module(), None
    model._to_capture, model._graphs = {(name,): None for name in names}, {}
    return model


def test_the_log_says_what_graphs_of_draft_passes_take(draft_model, group, monkeypatch, caplog):
    free = iter([5 * 2**30, 4 * 2**30])
    monkeypatch.setattr(draft_model, "free_bytes", lambda: next(free), raising=False)
    monkeypatch.setattr(draft_model, "capture", lambda runner, width: (runner, width))
    model = to_capture(draft_model, group, "one", "two")
    with caplog.at_level(logging.INFO):
        model.capture()
    assert "CUDA graphs of 2 draft passes take 1024 MiB" in caplog.text and "4.00 GiB are free" in caplog.text


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
