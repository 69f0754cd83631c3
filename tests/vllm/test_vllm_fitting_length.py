"""How many draft tokens vLLM's batches hold: the default fits, and what does not fit is refused."""

import logging

import pytest
from test_vllm_start import config_of, refusal

from tests.support.model_classes import save_config

SSSD = {"method": "sssd", "scoring": "paper"}
LORA = {"enable_lora": True, "max_num_seqs": 16}
FIVE, EIGHT = {"num_speculative_tokens": 5}, {"num_speculative_tokens": 8}
SMALL = {"max_num_batched_tokens": 8, "max_num_seqs": 4}


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    caplog.set_level(logging.INFO, "freedraft")
    return lambda: [each.getMessage() for each in caplog.records if "draft tokens" in each.getMessage()]


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({}, 15),
        (LORA | {"max_num_batched_tokens": 16 * 16}, 15),
        (LORA | {"max_num_batched_tokens": 16 * 16 - 1}, 14),
        (LORA | {"max_num_batched_tokens": 40}, 1),
        ({"max_num_batched_tokens": 13, "max_num_seqs": 4}, 12),
        ({"max_num_scheduled_tokens": 5, "max_num_seqs": 4}, 4),
    ],
)
def test_the_default_is_what_a_batch_holds(tiny_model, lines, arguments, length):
    config = config_of(tiny_model, SSSD, **arguments)
    assert config.speculative_config.num_speculative_tokens == length
    (line,) = lines()
    reason = "longer chains gain nothing" if length == 15 else "does not hold 15"
    assert f"up to {length} draft tokens per request by default: " in line and reason in line and "\n" not in line


def test_it_fits_the_defaults_of_each_usage(tiny_model):
    """vLLM's own, which are others for servers; its check ends a start that does not fit."""
    from vllm.usage.usage_lib import UsageContext

    for usage in (UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER):
        config = config_of(tiny_model, SSSD, usage, enable_lora=True, max_model_len=256)
        requests, tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        assert config.speculative_config.num_speculative_tokens == min(15, tokens // requests - 1) > 0


def test_grammar_masks_are_small_by_default_and_named_where_they_are_not(demo_model, lines):
    many = {"max_num_seqs": 4096, "max_num_batched_tokens": 4096}
    config = config_of(demo_model, SSSD, **many)
    assert config.speculative_config.num_speculative_tokens == 7
    (line,) = lines()
    assert "up to 7" in line and "15 would take grammar masks of 384 MiB for 4,096 requests" in line
    config = config_of(demo_model, SSSD | {"num_speculative_tokens": 31}, **many)
    assert config.speculative_config.num_speculative_tokens == 31
    assert lines()[1:] == [
        "freedraft: 31 draft tokens per request, as set: they take grammar masks of 768 MiB for 4,096 requests"
    ]


def test_replicas_that_share_experts_draft_few(tiny_model, tmp_path, lines):
    save_config("Mixtral", tmp_path)
    for model, replicas, length in ((tmp_path, 2, 3), (tmp_path, 1, 15), (tiny_model, 2, 15)):
        config = config_of(model, SSSD, data_parallel_size=replicas)
        assert config.speculative_config.num_speculative_tokens == length
    assert ["share experts" in line for line in lines()] == [True, False, False]


def test_recurrent_states_take_a_tenth_of_the_cache(tmp_path, as_with_triton, lines):
    """Of a model of two layers, each with a state of 1,024 numbers and the last three inputs of a convolution over 96;
    by default a request has two states besides those of its draft tokens, one of them for cached prefixes."""
    from vllm import EngineArgs

    from freedraft.engines.vllm.room import states_of

    save_config("FalconH1", tmp_path)
    one = 2 * (4 * 16 * 16 + 3 * (64 + 2 * 16)) * 4
    args = EngineArgs(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=64)
    assert states_of(args) == (2 * one, one)
    fits = {"dtype": "float32", "kv_cache_memory_bytes": 10 * (2 + 7) * one}
    assert config_of(tmp_path, SSSD, **fits).speculative_config.num_speculative_tokens == 7
    config_of(tmp_path, SSSD | {"num_speculative_tokens": 8}, **fits)
    by_default, given = lines()
    assert "up to 7" in by_default and "15 would take recurrent states" in by_default
    assert "8 draft tokens per request, as set: they take recurrent states" in given


def test_recurrent_states_of_unknown_size(tmp_path, as_with_triton, lines, monkeypatch):
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    save_config("FalconH1", tmp_path)
    assert config_of(tmp_path, SSSD).speculative_config.num_speculative_tokens == 3
    (line,) = lines()
    assert "the size of its recurrent states is not known" in line and "\n" not in line


@pytest.mark.parametrize(
    ("shape", "attention", "length"), [("auto", None, 15), ("tree", None, 31), ("auto", "TRITON_ATTN", 31)]
)
def test_trees_are_larger(tiny_model, as_with_triton, shape, attention, length):
    config = config_of(tiny_model, SSSD | {"shape": shape}, attention_backend=attention)
    assert config.use_v2_model_runner and config.speculative_config.num_speculative_tokens == length


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        (FIVE, LORA | {"max_num_batched_tokens": 64}, ["to 3 or less", "16 requests", "LoRA"]),
        ({}, LORA | {"max_num_batched_tokens": 31}, ["does not hold 15", "set 256 or more"]),
        (EIGHT, SMALL, ["to 7 or less"]),
        (EIGHT | {"method": "layerskip"}, SMALL, ["'layerskip'", "to 7 or less"]),
        (FIVE, {"logits_processors": ["some:Processor"]}, ["model runner V2", "--logits-processors"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(tiny_model, options, arguments, words):
    message = refusal(tiny_model, {"method": "sssd"} | options, **arguments)
    assert all(word in message for word in words), message
