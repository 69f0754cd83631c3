"""Models with recurrent layers: the states of the accepted tokens are kept, in steps of any width, for trees and
chains, from the radix cache, after retraction and aborts.

SGLang's own Triton kernels run in Triton's interpreter.
"""

from contextlib import contextmanager

import pytest

from tests.sglang.conftest import give_up, ids, sglang_engine
from tests.support.model_classes import KIMI, RARE, RECURRENT, by_class, class_model, save_model
from tests.support.models import continuations
from tests.support.prompts import random_ids

PROMPTS = [*random_ids([9, 6, 70], 32, first=5, seed=4), [7] * 30]
OFF = {"custom_params": {"freedraft": "off"}}
INTERPRETED = {"TRITON_INTERPRET": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
DEFAULTS = {"FREEDRAFT_SCORING": None, "FREEDRAFT_LIVE": None}


def greedy(tokens, **more):
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | more


@contextmanager
def served(kind, folder, tokens, env=None, **options):
    """An engine, and what the model itself goes on with."""
    model = class_model(kind)
    save_model(model, folder)
    given = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": 5, "skip_tokenizer_init": True}
    with sglang_engine(folder, env=INTERPRETED | DEFAULTS | (env or {}), **given | options) as engine:
        yield engine, continuations(model, PROMPTS, tokens)


def accepted(outputs):
    return sum(output["meta_info"]["spec_num_correct_drafts"] for output in outputs)


@pytest.mark.parametrize("kind", by_class(RECURRENT | KIMI, ["Qwen3Next"], rare=(*RARE, "Lfm2")))
def test_recurrent_layers(kind, tmp_path):
    seeded = [greedy(12, temperature=0.9, sampling_seed=i) for i in range(len(PROMPTS))]
    with served(kind, tmp_path, 12, enable_deterministic_inference=True) as (engine, expected):
        if kind in KIMI:  # whose latent attention is another in transformers
            expected = ids(engine.generate(input_ids=PROMPTS, sampling_params=greedy(12) | OFF))
        first, again = (engine.generate(input_ids=PROMPTS, sampling_params=greedy(12)) for _ in range(2))
        plain = engine.generate(input_ids=PROMPTS, sampling_params=[each | OFF for each in seeded])
        drafted = [engine.generate(input_ids=PROMPTS, sampling_params=seeded) for _ in range(2)]
    assert ids(first) == expected and ids(again) == expected
    assert accepted(again) > 15, "asked again, the answer is known"
    assert ids(plain) != expected and accepted(plain) == 0
    assert ids(drafted[0]) == ids(drafted[1]) == ids(plain) and accepted(drafted[1]) > 15


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["Qwen3Next", pytest.param("FalconH1", marks=pytest.mark.rare)])
def test_retraction_and_aborts(kind, tmp_path):
    with served(kind, tmp_path, 30, env={"SGLANG_TEST_RETRACT": "1"}, max_total_tokens=512) as (engine, expected):
        engine.loop.run_until_complete(give_up(engine, PROMPTS, greedy(200)))
        outputs = [engine.generate(input_ids=PROMPTS, sampling_params=greedy(30)) for _ in range(2)]
    assert [ids(each) for each in outputs] == [expected, expected]
    assert accepted(outputs[1]) > 30
    for counted in ("num_retractions", "cached_tokens"):
        assert sum(output["meta_info"][counted] for each in outputs for output in each) > 0


@pytest.mark.extended
@pytest.mark.rare
@pytest.mark.parametrize("kind", ["Qwen3Next", "FalconH1"])
def test_a_state_before_the_accepted_one_is_noticed(kind, tmp_path):
    with served(kind, tmp_path, 12, env={"TREE_TEST_STATES": "late"}) as (engine, expected):
        outputs = [engine.generate(input_ids=PROMPTS, sampling_params=greedy(12)) for _ in range(2)]
    assert any(ids(each) != expected for each in outputs)
