"""Models of the classes that people serve, on model runner V2, those with recurrent layers among them."""

from __future__ import annotations

import pytest
from v2_engines import run
from vllm_cases import class_case

from tests.support.model_classes import ATTENTION, RECURRENT, save_class

CHEAP = "Mixtral"
# vLLM's rotation for CPUs takes heads that stand in a dimension of their own for tokens: PyTorch's, where there is one.
ROTATED = {"custom_ops": ["-rotary_embedding"]}
SMALL = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8, "compilation_config": ROTATED}
LONG = (70, 40)


def served(model, name, cases, **given):
    """What an engine without drafts says to the first case, and one with drafts, by default, to all."""
    engine, first = SMALL | {"model": model}, next(iter(cases))
    plain = engine | {"cases": {first: cases[first]}}
    drafting = engine | {"cases": cases, "speculative_config": {"method": "sssd"}} | given
    script = "recurrent.py" if name in RECURRENT else "serve.py"
    alone, found = run(script, [plain, drafting])
    assert found["engine"]["v2"] and not found["engine"]["failures"]
    assert min(len(set(tokens)) for tokens in alone[first]) > 2, "else most of what could go wrong would not show"
    return alone[first], found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name != CHEAP)) for name in ATTENTION | RECURRENT]
)
def test_a_class_of_models(name, tmp_path):
    """The first time and again, when what was said is known: the tokens of an engine without drafts."""
    plain, found = served(save_class(name, tmp_path), name, {"first": class_case(), "again": class_case()})
    assert found["first"] == found["again"] == plain
    drafted, accepted = found["engine"]["counts"]["again"]
    assert drafted >= accepted > 30


@pytest.mark.extended
@pytest.mark.parametrize("name", ["FalconH1", "Qwen3Next"])
@pytest.mark.parametrize("cached", [False, True])
def test_states_follow_what_is_accepted(name, cached, tmp_path):
    """After aborts, preemption, and out of the prefix cache."""
    cases = {"first": class_case(LONG), "again": class_case(LONG), "aborted": class_case(LONG, abort=6)}
    few = {"num_gpu_blocks_override": 12, "enable_prefix_caching": cached}
    plain, found = served(save_class(name, tmp_path), name, cases, **few)
    assert [found[case] for case in cases] == [plain] * 3
    engine = found["engine"]
    assert engine["accepted"] > 20 and engine["preempted"] > 0 and (engine["cached"] > 0) == cached
    assert engine["held"] == [0, 0, 0]


@pytest.mark.extended
def test_wrong_states_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("WRONG_STATES", "1")
    name = "FalconH1"
    plain, found = served(save_class(name, tmp_path), name, {"first": class_case(), "again": class_case()})
    assert found["again"] != plain and found["engine"]["accepted"] > 0
