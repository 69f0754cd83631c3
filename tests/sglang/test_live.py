"""Learning while serving: what a tenant's request said is drafted from in that tenant's next one, and nowhere else."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from freedraft.tenants import tenant_key
from tests.sglang.conftest import read_counts, sglang_engine


def ask(engine, prompt, **keys):
    """Tokens and mean accepted length of one request."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    request = GenerateReqInput(text=prompt, sampling_params=sampling, **keys)
    answer = engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))
    return answer["output_ids"], answer["meta_info"]["spec_accept_length"]


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_learns_for_its_tenant(tiny, tmp_path, overlap):
    from sssd_plugin.datastore.live.folder import LiveManifest
    from sssd_plugin.datastore.live.log import Log
    from sssd_plugin.datastore.live.maintenance import forget

    store, counts = tmp_path / "store", tmp_path / "counts.json"
    env = {"FREEDRAFT_LIVE": "store", "FREEDRAFT_DATASTORE": str(store)}
    options = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 8, "disable_radix_cache": True}
    with sglang_engine(tiny, counts, env, disable_overlap_schedule=not overlap, **options) as engine:
        prompt = "one two three four"
        answer, first = ask(engine, prompt, extra_key="a")
        lead = engine.tokenizer_manager.tokenizer.encode(prompt)[-8:]
        same, second = ask(engine, prompt, extra_key="a")
        assert same == answer and second > first + 0.5
        others = [{"extra_key": "b"}, {"cache_salt": "c"}, {"extra_key": "a", "cache_salt": "c"}, {}]
        for keys in others:
            assert ask(engine, prompt, **keys) == (answer, first), keys
        assert ask(engine, prompt) == (answer, second), "of those without a key"
        assert ask(engine, prompt, cache_salt="c") == (answer, second)
        gone = forget(store, [str(tenant_key("c"))])
        assert gone.documents >= 1 and not gone.alone
        time.sleep(1.0)
        assert ask(engine, prompt, cache_salt="c") == (answer, first), "forgotten while serving"
        assert ask(engine, prompt, extra_key="a") == (answer, second)
        time.sleep(1.0)
    # SGLang kills its processes at the end.
    log = Log.open(store, LiveManifest(vocab_size=49152, isolation="strict"), 1 << 20)
    records = log.load()
    log.close()
    learnt = [record.tokens.tolist() for record in records]
    assert learnt == [[*lead, *answer]] * len(learnt), "each answer, whole, behind the end of its prompt"
    assert sorted(Counter(record.tenant for record in records).values()) == [1, 1, 1, 2, 3]
    read_counts(counts)


def test_recycles_for_its_tenant(tiny, tmp_path):
    """The logits at verified nodes serve later requests of the tenant, with nothing learnt from the answers."""
    counts = tmp_path / "counts.json"
    env = {"FREEDRAFT_SCORING": "learned", "FREEDRAFT_RECYCLE": "on"}
    options = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 8, "disable_radix_cache": True}
    with sglang_engine(tiny, counts, env, **options) as engine:
        prompt = "one two three four"
        answer, first = ask(engine, prompt, extra_key="a")
        same, second = ask(engine, prompt, extra_key="a")
        assert same == answer and second > first + 0.5
        for keys in [{"extra_key": "b"}, {"cache_salt": "c"}, {}]:
            assert ask(engine, prompt, **keys) == (answer, first), keys
        assert ask(engine, prompt, cache_salt="c") == (answer, second)
        time.sleep(1.0)
    read_counts(counts)
