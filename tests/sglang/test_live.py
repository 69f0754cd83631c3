"""Learning while serving: what a tenant's request said is drafted from in that tenant's next one, and nowhere else."""

from __future__ import annotations

import time

import pytest

from tests.sglang.conftest import HAVE_SGLANG, read_counts, sglang_engine


def ask(engine, prompt, **keys):
    """Tokens and mean accepted length of one request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    request = GenerateReqInput(text=prompt, sampling_params=sampling, **keys)
    answer = engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))
    return answer["output_ids"], answer["meta_info"]["spec_accept_length"]


@pytest.mark.parametrize("overlap", [True, False])
def test_learns_for_its_tenant(tiny, tmp_path, overlap):
    from sssd_plugin.datastore.live.segments import SegmentLog

    store, counts = tmp_path / "store", tmp_path / "counts.json"
    env = {"FREEDRAFT_LIVE": "true", "FREEDRAFT_DATASTORE": str(store)}
    options = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 8, "disable_radix_cache": True}
    with sglang_engine(tiny, counts, env, disable_overlap_schedule=not overlap, **options) as engine:
        prompt = "one two three four"
        answer, first = ask(engine, prompt, extra_key="a")
        same, second = ask(engine, prompt, extra_key="a")
        assert same == answer and second > first + 0.5
        others = [{"extra_key": "b"}, {"cache_salt": "c"}, {"extra_key": "a", "cache_salt": "c"}, {}]
        for keys in others:
            assert ask(engine, prompt, **keys) == (answer, first), keys
        assert ask(engine, prompt, cache_salt="c") == (answer, second)
        time.sleep(1.0)
    # SGLang kills its processes at the end.
    log = SegmentLog.open(store, vocab_size=49152, max_tokens=1 << 20, writer=False)
    records = log.take_recovered()
    assert [record.tokens.tolist() for record in records] == [answer] * 7, "each answer, whole"
    assert len({record.tenant for record in records}) == 5
    read_counts(counts)


@pytest.mark.skipif(not HAVE_SGLANG, reason="sglang is not installed")
def test_a_rebuilt_request_keeps_its_tenant():
    """One that was swept while it waited, and runs again."""
    import types
    from weakref import WeakValueDictionary

    import numpy as np
    import torch

    from freedraft.engines.sglang.requests import RequestTokens
    from freedraft.engines.sglang.worker import TreeVerifyWorker

    class Request:
        rid, extra_key, cache_salt = "r", "a", "s"
        origin_input_ids = origin_input_ids_unpadded = (1, 2)
        output_ids = (3, 4, 5)
        finished_len = 2

        def finished(self):
            return False

    told = []
    source = types.SimpleNamespace(
        begin=lambda rid, tokens: told.append(("begin", rid, tokens.tolist())),
        belongs=lambda rid, tenant: told.append(("belongs", rid, tenant)),
        ended=lambda rid, tokens: told.append(("ended", rid, tokens.tolist())),
        finish=lambda rids: told.append(("finish", *rids)),
    )
    worker = TreeVerifyWorker.__new__(TreeVerifyWorker)
    worker._source, worker._requests, worker._known = source, RequestTokens(), WeakValueDictionary()
    worker._draft_failed = worker._decoded_last = False
    worker.max_nodes, worker.model_runner = 2, types.SimpleNamespace(max_running_requests=4)
    request = Request()
    batch = types.SimpleNamespace(reqs=[request], seq_lens_cpu=torch.tensor([4]))
    worker._step(batch, np.array([[5, 0]], np.int32), np.array([1], np.int32))
    worker.note_request_finished(rid="r", natural_stop=True)
    assert told == [("begin", "r", [1, 2, 3, 4]), ("belongs", "r", "a\ns"), ("ended", "r", [1, 2, 3, 4]),
                    ("finish", "r")]  # fmt: skip
