"""Models of the classes that people serve, on model runner V1. Recurrent ones: `test_vllm_v2_models`."""

import pytest
from v2_engines import check_images
from vllm_cases import class_case, generate, metric, parameters, token_prompts
from vllm_engines import check_nothing_is_left, engine

from tests.support.model_classes import ATTENTION, QUANTISED, quantise, save_class
from tests.support.speech import save_speech_model, speech_prompt

CHEAP = "Mixtral"
# vLLM's rotation for CPUs takes heads that stand in a dimension of their own for tokens: PyTorch's, where there is one.
ROTATED = {"custom_ops": ["-rotary_embedding"]}
SMALL = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8, "compilation_config": ROTATED}


def answers(llm, speech=False):
    """To the requests of `class_case`, behind speech or not."""
    case = class_case(tokens=24)
    asked = [parameters(**case["parameters"] | {"detokenize": False} | one) for one in case["each"]]
    heard = [speech_prompt(tokens, number) for number, tokens in enumerate(case["prompts"])] if speech else ()
    return generate(llm, heard or token_prompts(case["prompts"]), asked)


def check_as_plain(model, note, speech=False, options=None, **arguments):
    """By default, the first time and when what was said is known: the tokens of an engine without drafts."""
    with engine(model, **SMALL | arguments) as llm:
        plain = answers(llm, speech)
    assert min(len(set(tokens)) for tokens in plain) > 2, "else most of what could go wrong would not show"
    for given in (options or {}, {"policy": "fixed"}):
        with engine(model, speculative_config={"method": "sssd"} | given, **SMALL | arguments) as llm:
            for _ in range(4):
                assert answers(llm, speech) == plain
                drafted, accepted = (
                    metric(llm, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")
                )
                if accepted > 60:
                    break
            check_nothing_is_left(llm)
        if accepted > 60:  # by default it may find, on a busy host, that no draft pays
            break
    note("drafts", f"{accepted:.0f}/{drafted:.0f}")
    assert drafted >= accepted > 60


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name != CHEAP)) for name in ATTENTION]
)
def test_a_class_of_models(name, tmp_path, record_property):
    check_as_plain(save_class(name, tmp_path), record_property)


@pytest.mark.extended
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights(kind, tmp_path, record_property):
    dtype = "float32" if kind == "int8" else "bfloat16"
    model = quantise(save_class("Llama", tmp_path), kind)
    check_as_plain(model, record_property, dtype=dtype)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_a_quantised_kv_cache(kind, tmp_path, record_property):
    check_as_plain(save_class("Llama", tmp_path), record_property, kv_cache_dtype=kind)


@pytest.mark.extended
def test_images(tmp_path, monkeypatch, record_property):
    check_images(tmp_path / "model", monkeypatch, record_property, v2=False)


@pytest.mark.extended
def test_an_encoder(tmp_path, record_property):
    """Its KV is that of the speech. By default it finds that no draft pays in so short answers."""
    model = save_speech_model(tmp_path / "model")
    check_as_plain(model, record_property, speech=True, options={"policy": "fixed"}, skip_tokenizer_init=False)
