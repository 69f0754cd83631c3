"""How many draft tokens vLLM's batches hold: the default fits, and what does not fit is refused."""

from __future__ import annotations

import logging

import pytest
from test_vllm_start import config_of, refusal

SSSD = {"method": "sssd", "scoring": "paper"}
LORA = {"enable_lora": True, "max_num_seqs": 16}
FIVE, EIGHT = {"num_speculative_tokens": 5}, {"num_speculative_tokens": 8}
SMALL = {"max_num_batched_tokens": 8, "max_num_seqs": 4}


@pytest.fixture
def lines(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("freedraft"), "propagate", True)
    caplog.set_level(logging.WARNING, "freedraft")
    return lambda: [each.getMessage() for each in caplog.records if "draft tokens" in each.getMessage()]


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({}, 31),
        (LORA | {"max_num_batched_tokens": 16 * 32}, 31),
        (LORA | {"max_num_batched_tokens": 16 * 32 - 1}, 30),
        (LORA | {"max_num_batched_tokens": 40}, 1),
        ({"max_num_batched_tokens": 31, "max_num_seqs": 4}, 30),
        ({"max_num_scheduled_tokens": 5, "max_num_seqs": 4}, 4),
    ],
)
def test_the_default_is_what_a_batch_holds(tiny_model, lines, arguments, length):
    config = config_of(tiny_model, SSSD, **arguments)
    assert config.speculative_config.num_speculative_tokens == length
    assert len(lines()) == (length < 31)
    assert all(f"up to {length} draft tokens" in line and "\n" not in line for line in lines())


def test_it_fits_the_defaults_of_each_usage(tiny_model):
    """vLLM's own, which are others for servers; its check ends a start that does not fit."""
    from vllm.usage.usage_lib import UsageContext

    for usage in (UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER):
        config = config_of(tiny_model, SSSD, usage, enable_lora=True, max_model_len=256)
        requests, tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        assert config.speculative_config.num_speculative_tokens == min(31, tokens // requests - 1) > 0


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        (FIVE, LORA | {"max_num_batched_tokens": 64}, ["to 3 or less", "16 requests", "LoRA"]),
        ({}, LORA | {"max_num_batched_tokens": 31}, ["does not hold 31", "set 512 or more"]),
        (EIGHT, SMALL, ["to 7 or less"]),
        (EIGHT | {"method": "layerskip"}, SMALL, ["'layerskip'", "to 7 or less"]),
        (FIVE, {"logits_processors": ["some:Processor"]}, ["model runner V2", "--logits-processors"]),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(tiny_model, options, arguments, words):
    message = refusal(tiny_model, {"method": "sssd"} | options, **arguments)
    assert all(word in message for word in words), message
