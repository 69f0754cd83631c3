"""LoRA adapters, and requests whose clients want no drafts, beside others in a real engine."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import GREEDY, ids, read_counts, sglang_engine
from tests.support.models import continuations, save_adapter
from tests.support.prompts import random_ids

EACH = 12
SETTINGS = {"enable_lora": True, "lora_backend": "torch_native", "max_running_requests": 6, "disable_radix_cache": True}
ENVIRONMENT = {"TREE_TEST_ADAPTERS": "1", "FREEDRAFT_LIVE": "memory"}


OFF = {"freedraft": "off"}


def ask_all(engine, given, sent=None):
    """Answers of the model and of two adapters in turn, six at a time."""
    names = (None, "a", "b")
    asked = {"input_ids": [prompt for prompt in given for _ in names], "lora_path": [*names] * len(given)}
    return ids(engine.generate(sampling_params=GREEDY | {"custom_params": sent}, **asked))


def ask(engine, counts, prompt, adapter, salt, sent=None):
    """One answer; draft tokens that were verified for it up to its last steps, and the accepted ones."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    def answered(sent, **keys):
        parameters = GREEDY | {"custom_params": sent}
        request = GenerateReqInput(input_ids=prompt, sampling_params=parameters, **keys)
        return engine.loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(request, None)))

    answered(OFF, cache_salt="counts what was drafted before")
    before = read_counts(counts)
    answer = answered(sent, lora_path=adapter, cache_salt=salt)
    after = read_counts(counts)
    return answer["output_ids"], [after[name] - before[name] for name in ("drafted", "accepted")]


@pytest.fixture(scope="module")
def given():
    return random_ids([12] * EACH, 300, first=2, seed=9)


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {"lora_paths": [f"{name}={save_adapter(tiny, folder / name, seed)}" for seed, name in enumerate("ab")]}


def test_adapters_answer_as_plain_and_draft_from_their_own_text_only(tiny, tmp_path, given, adapters):
    counts = tmp_path / "counts.json"
    options = SETTINGS | adapters | {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 8}
    with sglang_engine(tiny, counts, ENVIRONMENT, **options) as engine:
        plain = ask_all(engine, given, OFF)
        assert len(set(map(tuple, plain))) > 2 * EACH, "the adapters must answer otherwise"
        assert plain[::3] == continuations(tiny, given, GREEDY["max_new_tokens"]), "of the model alone"
        assert ask_all(engine, given) == plain
        for i in range(3):
            prompt, salt = given[i], f"one {i}"
            fresh = ask(engine, counts, prompt, "b", f"fresh {i}")
            taught = ask(engine, counts, prompt, "a", salt)
            ask(engine, counts, prompt, None, salt)
            assert ask(engine, counts, prompt, "b", salt) == fresh, "whatever others have answered to the same prompt"
            again = ask(engine, counts, prompt, "a", salt)
            assert again[0] == taught[0] and again[1][1] > max(taught[1][1], 20), "its own text drafts for it"
            assert ask(engine, counts, prompt, "a", salt, OFF) == (again[0], [0, 0])
            for sent in ({"freedraft": "of"}, {"freedraft": 0}, {"freedraft": ["off"]}, ["off"], "off", 7):
                assert ask(engine, counts, prompt, "a", salt, sent) == again
