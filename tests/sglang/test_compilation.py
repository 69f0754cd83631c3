"""Nothing is compiled while a server answers: with a cold cache it takes seconds, and every request waits."""

import json

import pytest

from tests.sglang.conftest import ENVIRONMENT, GREEDY, read_counts, sglang_engine
from tests.support.conformance import PROMPTS, make_model

UNSET = dict.fromkeys(name for name in ENVIRONMENT if name.startswith("FREEDRAFT_"))


@pytest.mark.extended
@pytest.mark.parametrize("method", ["sssd", "sssd+layerskip"])
def test_nothing_is_compiled_while_serving(demo_model, tmp_path, method):
    """With default options; neither compiled, nor loaded from the disk."""
    model, compiled, counts = make_model(tmp_path / "model", demo_model), tmp_path / "compiled", tmp_path / "counts"
    env = UNSET | {"TREE_TEST_COMPILED": str(compiled)}
    if method != "sssd":
        env["FREEDRAFT_SKIP_SET"] = str(model / "weak.json")
    with sglang_engine(model, counts, env, speculative_algorithm=method, skip_tokenizer_init=True) as engine:
        for size in (1, 4, 2) * 2:
            engine.generate(input_ids=PROMPTS[-size:], sampling_params=GREEDY | {"max_new_tokens": 90})
    done = read_counts(counts)
    assert done["steps"] - done.get("width 1", 0) > 10, "nothing was drafted"
    found = json.loads(compiled.read_text())
    assert found["at start"] and not found["serving"]
