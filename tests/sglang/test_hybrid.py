"""n-grams and layer skip in one engine: the same tokens, whoever drafts for whom."""

from __future__ import annotations

import json

import pytest

from tests.sglang.conftest import read_counts, sglang_engine
from tests.sglang.layerskip_tools import GREEDY, ids, make_model, options, prompts
from tests.support.models import continuations


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """An engine whose requests get draft passes at random."""
    folder = make_model(tmp_path_factory.mktemp("llama"), "Llama")
    log, counts = folder / "log.json", folder / "counts.json"
    env = options(folder, log, "weak mixed", FREEDRAFT_POLICY="auto", FREEDRAFT_SCORING="learned")
    with sglang_engine(
        folder,
        counts,
        env,
        speculative_algorithm="hybrid_any",
        speculative_num_draft_tokens=8,
        skip_tokenizer_init=True,
    ) as engine:
        engine.log = log
        yield engine
    read_counts(counts)


@pytest.mark.parametrize("batch", [1, 4])
def test_same_tokens(composed, tmp_path, batch):
    # Prompts that repeat themselves, so that n-grams have something to say.
    given = [(prompt * 8)[:96] for prompt in prompts()]
    model = make_model(tmp_path / "again", "Llama")
    expected = continuations(model, given, GREEDY["max_new_tokens"])
    got = []
    for start in range(0, len(given), batch):
        got += ids(composed.generate(input_ids=given[start : start + batch], sampling_params=GREEDY))
    assert got == expected
    log = json.loads(composed.log.read_text())
    assert log["of the model"] > 50 and log["of n-grams"] > 10
    assert batch == 1 or log["mixed"] > 5


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FREEDRAFT_LOOKAHEAD": "fixed"}, ["'lookahead'", "cost"]),
        ({"FREEDRAFT_POLICY": "knee"}, ["'policy'", "auto"]),
        ({"FREEDRAFT_SKIP_SET": "/no/such/set.json"}, ["/no/such/set.json"]),
        ({"FREEDRAFT_DATASTORE": "/no/such/store"}, ["/no/such/store"]),
    ],
)
def test_refused_in_one_line(monkeypatch, environment, words):
    from transformers import LlamaConfig

    from freedraft.config import ConfigError
    from freedraft.hybrid import SPEC
    from freedraft.method import METHODS
    from freedraft.step import EngineContext
    from layerskip_plugin import sglang as layerskip
    from sssd_plugin import sglang as sssd

    for part in (sssd, layerskip):  # unless an engine of this process has loaded them
        if part.SPEC.name not in METHODS:
            part.register()
    monkeypatch.delenv("FREEDRAFT_POLICY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ConfigError, ValueError)) as error:
        SPEC.check(SPEC.option_type.read(), EngineContext(hf_config=LlamaConfig(), widths=(1, 8)))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
