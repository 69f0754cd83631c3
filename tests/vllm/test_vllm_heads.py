"""What a user writes for n-grams on top of a drafter that vLLM runs, and what stops the start."""

import json
import pickle
import shutil

import pytest
from test_vllm_start import config_of, refusal
from vllm.config import VllmConfig
from vllm_cases import TINY

from freedraft.config import ConfigError
from freedraft.engines.hooks import check
from freedraft.engines.vllm import methods
from freedraft.engines.vllm.context import context_of_engine, start_line
from freedraft.engines.vllm.hooks import HEAD_HOOKS, V2_HOOKS, settings
from tests.support.built_head import save_glm_with_mtp, save_model_and_head

K = "num_speculative_tokens"
ON_TOP = {"method": "sssd+eagle", K: 3}
pytestmark = pytest.mark.usefixtures("as_with_triton")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A model, its head, and a model with an MTP layer."""
    folder = tmp_path_factory.mktemp("built")
    return (*save_model_and_head(folder, 0.1, **TINY), save_glm_with_mtp(folder / "glm", 0.1))


@pytest.fixture(scope="module", autouse=True)
def all_hooks_are_there():
    assert check(V2_HOOKS + HEAD_HOOKS) == []  # whose modules are there from now on


def test_the_head_keeps_its_settings_and_gets_room_for_n_grams(built):
    model, head, _ = built
    given = ON_TOP | {"model": str(head), "draft_tensor_parallel_size": 1, "hardware": "h200", "isolation": "strict"}
    config = pickle.loads(pickle.dumps(config_of(model, given)))
    made, ours = config.speculative_config, methods.configured(config)
    assert config.use_v2_model_runner
    assert (made.method, made.model, made.num_speculative_tokens) == ("eagle", str(head), 15)
    assert (ours.name, ours.head, ours.shape) == ("sssd", 3, "chain") and ours.options["isolation"] == "strict"
    assert ours.lengths == (3, 7, 15)
    assert {length for *_, length in made.num_speculative_tokens_per_batch_size} <= {3, 7, 15}
    context = context_of_engine(config, v2_lengths=ours.lengths)
    assert (context.head, context.below) == (3, "eagle") and not context.gives_logits
    said = start_line(config, "sssd", v2=True)
    assert "method 'sssd+eagle'" in said and "3 draft tokens of 'eagle', continued by n-grams" in said


def test_doctor_names_what_n_grams_go_on_top_of():
    (said,) = settings()
    assert "model runner V2" in said and all(f"'sssd+{name}'" in said for name in ("mtp", "eagle", "eagle3"))


def test_short_flags_and_fixed_lengths(built):
    model, head, glm = built
    config = config_of(model, None, spec_method="sssd+eagle", spec_model=str(head), spec_tokens=2)
    assert config.speculative_config.model == str(head) and methods.configured(config).head == 2
    config = config_of(model, ON_TOP | {"model": str(head), "ngram_tokens": 9, "policy": "fixed"})
    assert config.speculative_config.num_speculative_tokens == 9 and not methods.configured(config).lengths
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    config = config_of(glm, {"method": "sssd+mtp", K: 1})
    assert config.speculative_config.method == "mtp" and methods.configured(config).head == 1


def test_with_adaptive_verification_vllm_chooses_among_all_tokens(built, monkeypatch):
    model, head, _ = built
    monkeypatch.setattr(VllmConfig, "_validate_adaptive_verification", lambda _: None)  # needs CUDA graphs
    config = config_of(model, given := ON_TOP | {"model": str(head), "enable_adaptive_verification": True})
    made = config.speculative_config
    assert made.num_speculative_tokens == 15 and made.num_speculative_tokens_per_batch_size is None
    assert made.enable_adaptive_verification and not methods.configured(config).lengths
    config = config_of(model, given, max_num_seqs=8, max_num_batched_tokens=64)
    assert config.speculative_config.num_speculative_tokens == 7, "all are scheduled at once"


def test_vllm_detects_the_head(built, tmp_path):
    model, head, _ = built
    config = config_of(
        model, {"method": "sssd+auto", "model": str(shutil.copytree(head, tmp_path / "eagle-tiny")), K: 3}
    )
    assert config.speculative_config.method == "eagle" and methods.configured(config).head == 3
    with pytest.raises(ConfigError, match=r"'draft_model'.*mtp, eagle, eagle3 only"):
        config_of(model, {"method": "sssd+auto", "model": str(model), K: 3})


def test_no_more_than_the_head_where_longer_drafts_cost_too_much(built):
    """Replicas that share experts step together."""
    _, _, glm = built
    for replicas, most in ((1, 15), (2, 3)):
        config = config_of(glm, {"method": "sssd+mtp", K: 3}, data_parallel_size=replicas)
        assert config.speculative_config.num_speculative_tokens == most


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "sssd+nonsense"}, ["'nonsense'", "'sssd+mtp'", "'sssd+eagle3'", "'sssd+auto'"]),
        ({"method": "sssd+"}, ["''", "'sssd+mtp'"]),
        ({"method": "sssd+ngram"}, ["'ngram'", "'sssd+mtp'", "alone"]),
        ({"method": "sssd+dflash"}, ["'dflash'", "'sssd+mtp'", "alone"]),
        ({"method": "layerskip+eagle"}, ["'layerskip'", "use 'sssd+eagle'"]),
        ({"method": "sssd+mtp", "model": None}, ["no drafter 'mtp' of this model", "use 'sssd' alone"]),
        ({"model": None}, ["'sssd+eagle'", '"model"']),
        ({K: 0}, [f"'{K}'", "0"]),
        ({K: None}, [f"'{K}'", "missing"]),
        ({"ngram_tokens": 2}, ["'ngram_tokens'", "at least the head's 3", "leave it out"]),
        ({"ngram_tokens": 64}, ["'ngram_tokens'", "up to 63", "64"]),
        ({"ngram_tokens": True}, ["'ngram_tokens'", "True"]),
        ({"draft_sample_method": "probabilistic"}, ["'draft_sample_method'", "leave it out"]),
        ({"rejection_sample_method": "fly"}, ["'fly'", "leave it out"]),
        ({"num_speculative_tokens_per_batch_size": [(1, 9, 3)]}, ["per_batch_size", "leave it out"]),
        ({"shape": "tree"}, ["leave 'shape' out"]),
        ({"recycle": "on"}, ["leave 'recycle' out"]),
        ({"datastroe": "x"}, ["'datastroe'", "did you mean 'datastore'"]),
    ],
)
def test_bad_input_stops_the_start_with_one_line(built, change, words):
    model, head, _ = built
    given = {name: value for name, value in (ON_TOP | {"model": str(head)} | change).items() if value is not None}
    message = refusal(model, given)
    assert all(word in message for word in words), message


BOTH = {"enable_adaptive_verification": True, "use_local_argmax_reduction": True}


def test_engines_that_are_refused(built, monkeypatch, tmp_path):
    model, head, glm = built
    config = json.loads((head / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 32}))
    several = json.loads((glm / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    for folder in ("several", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "several" / "config.json").write_text(json.dumps(several))
    given = ON_TOP | {"model": str(head)}
    for words, model_of, asked, arguments in (
        ("vocabulary of 32, the model of 24: use one of this model", model, given | {"model": str(tmp_path)}, {}),
        ("empty", model, given | {"model": str(tmp_path / "empty")}, {}),
        ("no-such-folder", model, given | {"model": str(tmp_path / "no-such-folder")}, {}),
        ("use_local_argmax_reduction", model, given | BOTH, {}),
        ("several MTP layers", tmp_path / "several", {"method": "sssd+mtp", K: 2}, {}),
        ("--pipeline-parallel-size 1", model, given, {"pipeline_parallel_size": 2}),
        ("12 does not hold 15", model, given | {"ngram_tokens": 15}, {"max_num_batched_tokens": 12, "max_num_seqs": 4}),
    ):
        assert words in refusal(model_of, asked, **arguments)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "needs model runner V2" in refusal(model, given)
