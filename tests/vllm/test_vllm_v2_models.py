"""Models of the classes that people serve, on model runner V2, those with recurrent layers among them."""

import json

import pytest
from v2_engines import SSSD, check_images, run, start
from vllm_cases import TINY, class_case, greedy_case, token_prompts

from tests.support.model_classes import ATTENTION, KIMI, RARE, RECURRENT, by_class, save_class
from tests.support.models import continuations, save, tiny_model
from tests.support.prompts import random_ids
from tests.support.speech import save_speech_model

# vLLM's rotation for CPUs takes heads that stand in a dimension of their own for tokens: PyTorch's, where there is one.
ROTATED = {"custom_ops": ["-rotary_embedding"]}
SMALL = {"skip_tokenizer_init": True, "max_model_len": 192, "max_num_seqs": 8, "compilation_config": ROTATED}
HEARING = SMALL | {"skip_tokenizer_init": False, "max_model_len": 128}
UNCACHED = SMALL | {"enable_prefix_caching": False}  # vLLM's platform of CPUs caches no prefixes of latent attention
STEPS = {"seconds": [0.2, 1e-3]}  # with those of the interpreter, or of a busy host, it may find that no draft pays


def served(model, name, cases, own=(), **few):
    """What an engine without drafts says to the first case, and one with drafts, by default but for `few`, to all."""
    given = HEARING if name == "Whisper" else UNCACHED if name in KIMI else SMALL
    given, first = given | {"model": model} | dict(own), next(iter(cases))
    drafting = given | STEPS | {"cases": cases, "speculative_config": {"method": "sssd"}}
    script = "recurrent.py" if name in RECURRENT | KIMI else "latent.py" if name.startswith("Deepseek") else "serve.py"
    plain, found = run(script, [given | {"cases": {first: cases[first]}}, drafting | few])
    assert found["engine"]["v2"] and not found["engine"]["failures"]
    assert min(len(set(tokens)) for tokens in plain[first]) > 2, "else most of what could go wrong would not show"
    return plain[first], found


@pytest.mark.extended
@pytest.mark.parametrize("name", by_class(ATTENTION | RECURRENT | KIMI, rare=(*RARE, *KIMI)))
def test_a_class_of_models(name, tmp_path, record_property):
    """The first time and again, when what was said is known: the tokens of an engine without drafts."""
    plain, found = served(save_class(name, tmp_path), name, {"first": class_case(), "again": class_case()})
    assert found["first"] == found["again"] == plain
    drafted, accepted = found["engine"]["counts"]["again"]
    record_property("drafts", f"{accepted:.0f}/{drafted:.0f}")
    assert drafted >= accepted > 30


@pytest.mark.extended
def test_latent_attention_that_reads_drafts_as_prompts_is_refused(tmp_path):
    """vLLM's of CPUs, among others."""
    model = save_class("DeepseekV3", tmp_path)
    given = SMALL | {"model": str(model), "cases": {}, "speculative_config": {"method": "sssd"}}
    done = start("serve.py", json.dumps([given]), VLLM_USE_V2_MODEL_RUNNER="1")
    assert done.returncode and "ValueError: attention CPU_MLA reads drafts as prompts" in done.stderr


@pytest.mark.extended
@pytest.mark.parametrize(("mode", "blocks", "counted"), [("none", 36, "preempted"), ("align", 64, "cached")])
def test_states_follow_what_is_accepted(mode, blocks, counted, tmp_path, record_property):
    """After aborts; without prefix caching in too few blocks for two requests, and with it, in blocks of 128 tokens."""
    name, prompts = "GraniteMoeHybrid", {"lengths": (130, 100), "tokens": 20}
    cases = {case: class_case(**prompts) for case in ("first", "again")} | {"aborted": class_case(abort=6, **prompts)}
    few = {"num_gpu_blocks_override": blocks, "enable_prefix_caching": mode == "align"}
    plain, found = served(save_class(name, tmp_path), name, cases, **few)
    assert [found[case] for case in cases] == [plain] * 3
    assert found["engine"]["accepted"] > 20 and found["engine"][counted] > 0
    record_property("drafts", "{accepted:.0f}/{drafted:.0f}".format(**found["engine"]))
    record_property(counted, f"{found['engine'][counted]:.0f}")


@pytest.mark.extended
@pytest.mark.rare
@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2"])
def test_rows_without_drafts(name, tmp_path):
    """Beside others with some, where a text reaches the longest one: their states are those of what was accepted."""
    cases = {which: class_case(lengths=range(12, 16), tokens=40) for which in ("first", "again")}
    method = SSSD | {"live": "memory"}
    plain, found = served(save_class(name, tmp_path), name, cases, own={"max_model_len": 40}, speculative_config=method)
    assert found["first"] == found["again"] == plain
    assert found["engine"]["accepted"] > 100 and found["engine"]["skipped"][2] > 1


@pytest.mark.extended
@pytest.mark.rare
def test_wrong_states_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("WRONG_STATES", "1")
    name = "GraniteMoeHybrid"
    plain, found = served(save_class(name, tmp_path), name, {"first": class_case(), "again": class_case()})
    assert found["again"] != plain and found["engine"]["accepted"] > 0


@pytest.mark.extended
@pytest.mark.rare
def test_an_encoder(tmp_path, record_property):
    cases = {name: class_case(speech=True) for name in ("first", "again")}
    fixed = {"method": "sssd", "policy": "fixed"}  # by default it finds that no draft pays
    plain, found = served(save_speech_model(tmp_path / "model"), "Whisper", cases, speculative_config=fixed)
    assert found["first"] == found["again"] == plain
    drafted, accepted = found["engine"]["counts"]["again"]
    record_property("drafts", f"{accepted:.0f}/{drafted:.0f}")
    assert drafted >= accepted > 30


@pytest.mark.extended
def test_new_weights(tmp_path):
    """Answers are theirs, and what was learnt before stays."""
    one, other = (save(tiny_model(seed=seed, **TINY), tmp_path / f"{seed}") for seed in (7, 8))
    ids = random_ids([12] * 4, 24, first=2, seed=5)
    turns = {"first": one, "other": other, "again": one}
    cases = {name: greedy_case(token_prompts(ids), 30) | {"weights": str(weights)} for name, weights in turns.items()}
    (found,) = run(
        "serve.py", [SMALL | STEPS | {"model": one, "cases": cases, "speculative_config": {"method": "sssd"}}]
    )
    expected = [continuations(model, ids, 30) for model in turns.values()]
    assert [found[name] for name in turns] == expected and expected[0] != expected[1]
    accepted = [found["engine"]["counts"][name][1] for name in turns]
    assert accepted[2] > 2 * 30 > accepted[0]


@pytest.mark.extended
def test_images(tmp_path, monkeypatch, record_property):
    check_images(tmp_path / "model", monkeypatch, record_property, v2=True)
