"""Which models and engines layers can be skipped in, how the others are refused, and compiled draft modules."""

import json

import pytest
from test_vllm_start import config_of, refusal
from vllm_cases import generate, metric, parameters, save_tiny, token_prompts, two_skip_sets
from vllm_engines import engine, runner_of, settle

from freedraft.engines.vllm.guards import check_model
from freedraft.fingerprints import hardware_name
from layerskip_plugin.lookahead.records import Verifications
from layerskip_plugin.selection.knapsack import Choice, Plan
from layerskip_plugin.skip_set import SkipSet, model_fingerprint
from tests.support.models import continuations

SMALL = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4}
GOOD = {"method": "layerskip", "num_speculative_tokens": 3}
PROMPTS = token_prompts([[5, 9, 17, 5, 9, 3], [7, 7, 2, 20, 11], [13, 4, 4, 4, 19, 8, 2], [21]])


def answers(llm, skip_set, tokens=40):
    """Answers to PROMPTS, and how many drafts were verified and accepted."""
    names = [f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted")]
    before = [metric(llm, name) for name in names]
    asked = parameters(tokens, ignore_eos=True, detokenize=False, extra_args={"skip_set": skip_set})
    return generate(llm, PROMPTS, asked), *(metric(llm, name) - was for name, was in zip(names, before, strict=True))


def check_drafts(model, llm):
    """Sets "empty" and "some" of an engine: all accepted, and the same output as without drafts."""
    plain = continuations(model, [prompt["prompt_token_ids"] for prompt in PROMPTS], 40)
    # 1 + 6 x 4 + 3 x 1 tokens and so on: no draft runs past the end of a request.
    assert answers(llm, "empty", 37) == ([tokens[:37] for tokens in plain], 4 * 27, 4 * 27)
    found, drafted, accepted = answers(llm, "some")
    assert found == plain and 0 < accepted < drafted


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Mistral"])
def test_family(family, tmp_path):
    model = save_tiny(family, tmp_path / "model")
    record = tmp_path / "seen.npz"
    with engine(model, speculative_config=two_skip_sets(model, tmp_path, record=str(record)), **SMALL) as llm:
        check_drafts(model, llm)
        settle(llm)
    # Of the first set, whose drafts were all accepted; written by a thread, and at the latest when the engine ends.
    seen = Verifications.load(record)
    assert len(seen.accepted) == 4 * 27 and seen.accepted.all() and seen.top.shape[1] == 10
    assert (seen.top[:, 0] > 1 / 24).all() and (seen.entropy > 0).all()


@pytest.mark.extended
def test_compiled(tmp_path):
    """Two sets of one model get two compiled modules, and switching between them compiles nothing."""
    from torch._dynamo.utils import counters

    model = save_tiny("Llama", tmp_path / "model")
    with engine(model, speculative_config=two_skip_sets(model, tmp_path), enforce_eager=False, **SMALL) as llm:
        modules = [p.layers for p in runner_of(llm).drafter.guarded.method.draft_passes.values()]
        assert all(not module.do_not_compile for module in modules)
        assert not any(getattr(module, "aot_compiled_fn", None) for module in modules)
        assert type(modules[0]) is not type(modules[1])
        before = counters["stats"]["unique_graphs"]
        check_drafts(model, llm)
        assert counters["stats"]["unique_graphs"] == before


def test_an_architecture_without_such_layers(tiny_model, tmp_path):
    from vllm.config import ModelConfig

    config = json.loads((tiny_model / "config.json").read_text())
    config |= {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_config = ModelConfig(str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM") as error:
        check_model(model_config)
    assert "LlamaForCausalLM" in str(error.value) and "\n" not in str(error.value)


def test_files_of_another_machine_stop_the_start(tiny_model, tmp_path):
    """What else is refused: `tests/layerskip/test_layerskip_options.py`."""
    fingerprint = model_fingerprint(json.loads((tiny_model / "config.json").read_text()))
    given = GOOD | {"selection": "knapsack", "selection_file": str(tmp_path / "plan.json")}
    choice = Choice(SkipSet.of_sublayers([1], 2, fingerprint), 2, 1.0)
    Plan((64,), (choice,), hardware_name()).save(tmp_path / "plan.json", {})
    config_of(tiny_model, given)
    Plan((64,), (choice,), "a Cray").save(tmp_path / "plan.json", {})
    assert "measured on a Cray" in refusal(tiny_model, given)


def test_slots_are_reserved_for_this_method_only(tiny_model):
    assert config_of(tiny_model, GOOD | {"window": 128}).num_lookahead_tokens == 3
    assert config_of(tiny_model, GOOD | {"method": "sssd"}).num_lookahead_tokens == 0
    assert config_of(tiny_model, None).num_lookahead_tokens == 0
