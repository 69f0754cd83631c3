"""Skip sets that change while SGLang serves, between requests and within them: the same tokens all the time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from layerskip_plugin.calibrate.knn import fit
from tests.sglang.conftest import GREEDY, ids, read_counts, sglang_engine
from tests.sglang.layerskip_tools import SETS, make_model, prompts
from tests.support.models import continuations


@pytest.fixture(scope="module")
def selecting(tmp_path_factory):
    """An engine that searches for half of the time; other selections by the requests' ids."""
    folder = make_model(tmp_path_factory.mktemp("llama"), "Llama")
    env = {
        "SELECTION_TEST_FOLDER": str(folder),
        "FREEDRAFT_SELECTION": "swift",
        "FREEDRAFT_SEARCH_SHARE": "0.5",
        "FREEDRAFT_SKIP_RATIO": "0.3",
        "FREEDRAFT_LOOKAHEAD": "fixed",
        "FREEDRAFT_LENGTH": "3",
    }
    options = {"speculative_algorithm": "layerskip_selecting", "speculative_num_draft_tokens": 8}
    options |= {"chunked_prefill_size": 32, "skip_tokenizer_init": True}
    with sglang_engine(folder, folder / "counts.json", env, **options) as engine:
        engine.folder, engine.asked = folder, 0
        engine.expected = continuations(folder, prompts(), GREEDY["max_new_tokens"])
        yield engine
    assert read_counts(folder / "counts.json")["finished"] > 0


def ask(engine, word):
    engine.asked += 1
    names = [f"{word}-{i}-{engine.asked}" for i in range(len(prompts()))]
    assert ids(engine.generate(input_ids=prompts(), sampling_params=GREEDY, rid=names)) == engine.expected
    log = json.loads((engine.folder / "log.json").read_text())
    read_counts(engine.folder / "counts.json")
    assert log["held"] == 0, "a request is remembered after its end"
    return log, names


def test_swift_searches_while_it_serves(selecting):
    for _ in range(40):  # it searches for a share of the time, which is longer on a slow machine
        log, _ = ask(selecting, "swift")
        if len(log["swift sets"]) > 1:
            break
    assert log["searches"] > 5, "it hardly searched: the test does not test that"
    assert len(log["swift sets"]) > 1, "the set never changed: the test does not test that"
    assert log["kv changed"] == 0, "scoring sets wrote into the KV of requests"


def test_knapspec_searches_while_it_serves(selecting):
    for _ in range(40):
        log, _ = ask(selecting, "knapspec")
        if any(log["knapspec sets"]):
            break
    assert any(log["knapspec sets"]), "no set was found: the test does not test that"
    assert log["as in one pass"] and all(log["as in one pass"])
    assert log["kv changed"] == 0, "a search wrote into the KV of requests"


def test_knn_routes_by_the_hidden_state_of_the_prompt(selecting):
    """Also of prompts that are read in chunks."""
    import torch
    from transformers import AutoModelForCausalLM

    log, names = ask(selecting, "static")
    states = np.array([log["states"][name] for name in names], np.float32)
    model = AutoModelForCausalLM.from_pretrained(selecting.folder, dtype=torch.float32).eval()
    for prompt, state in zip(prompts(), states, strict=True):
        with torch.inference_mode():
            theirs = model.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        assert state == pytest.approx(theirs, abs=1e-3 * float(np.abs(theirs).max()))
    # The prompts are random: every second one is made a domain of its own by what is said of it here.
    sets = [SETS["weak"], SETS["mixed"], SETS["empty"]]
    fit([states[::2], states[1::2]], ["even", "odd"], sets, max_anchors=99).save(selecting.folder / "knn.json", {})
    log, names = ask(selecting, "knn")
    last = [set(log["places"][name]) for name in names]
    assert all(len(places) == 1 for places in last), "a request keeps its set"
    assert {frozenset(places) for places in last} >= {frozenset({1}), frozenset({2})}
    assert log["mixed"] > 1, "two domains were never in one batch: the test does not test that"


def test_prompts_that_are_only_scored(selecting):
    """Under speculation SGLang reads them like any others, with their states, and goes on serving."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt, labels = prompts()[5], [7, 11]
    none = {"max_new_tokens": 0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": labels}
    found = selecting.generate(input_ids=prompt, sampling_params=none, rid="static-scored", **asked)["meta_info"]
    model = AutoModelForCausalLM.from_pretrained(selecting.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)[:, labels]
    rows = found["input_token_ids_logprobs"][1:]  # nothing is before the first token
    np.testing.assert_allclose([[p for p, *_ in row] for row in rows], theirs, rtol=0, atol=1e-3)
    ask(selecting, "static")
