"""Sampled output has the distribution that the engine gives it without us: chi-square over whole short outputs. With
seeds it is the same output; more of those in test_vllm_seeds.py.

The model is random with a vocabulary of 24, so that an output of three tokens falls often enough into the same place.
"""

from __future__ import annotations

import numpy as np
import pytest
from vllm_cases import (
    SAMPLED_PROMPT,
    SAMPLES,
    SAMPLING_ENGINE,
    SETTINGS,
    generate,
    p_value,
    parameters,
    sample,
    save_sets,
    token_prompts,
)
from vllm_engines import engine, runner_of, spied

from tests.support.stores import build_store

K = 3


@pytest.fixture(scope="module", params=["sssd", "layerskip"])
def drafting(request, plain_tiny, tiny_model, tmp_path_factory):
    """An engine that drafts from a store that counts from 0 to 19, over and over; and one that skips layers, so that
    drafts are greedy. Depends on `plain_tiny` so that the engines do not exist at the same time."""
    folder = tmp_path_factory.mktemp("drafting")
    config = {"method": request.param, "num_speculative_tokens": K}
    if request.param == "sssd":
        build_store(folder / "store", [np.arange(3000) % 20], 24)
        config |= {"scoring": "paper", "policy": "fixed", "datastore": str(folder / "store"), "live": "off"}
    else:
        config |= {"skip_set": save_sets(tiny_model, folder, half=({1}, {0})), "lookahead": "fixed"}
    with engine(tiny_model, speculative_config=config, **SAMPLING_ENGINE) as llm:
        yield llm


def test_the_test_can_tell_distributions_apart(plain_tiny):
    first, second, *_ = (plain_tiny.sampled[setting] for setting in SETTINGS)
    assert p_value(first, second) < 1e-12
    assert p_value(first[::2], first[1::2]) > 1e-3


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampled_output_has_the_engines_distribution(drafting, plain_tiny, setting):
    drafted, plain = list[int](), plain_tiny.sampled[setting]
    with spied(runner_of(drafting).drafter, lambda step, drafts: drafted.append(sum(map(len, drafts)))):
        sampled = sample(drafting, setting)
    assert sum(drafted) > SAMPLES, "hardly anything was drafted: the test does not test that"
    assert sampled == plain if setting[-1] else p_value(sampled, plain) > 1e-3


@pytest.mark.parametrize("drafting", ["sssd"], indirect=True)
def test_the_engine_drafts_from_the_store(drafting):
    seen: list[list[int]] = []
    # No n-gram of the prompt comes again, so the draft can only be the store's.
    with spied(runner_of(drafting).drafter, lambda step, drafts: seen.extend(drafts)):
        only = parameters(K + 2, allowed_token_ids=[5], detokenize=False)
        drafting.generate(token_prompts([[7, 2, 4]]), only, use_tqdm=False)
    assert seen and seen[0] == [6, 7, 8]


def test_greedy_and_sampled_requests_in_one_batch(drafting, plain_tiny):
    greedy, warm = (parameters(4, temperature=t, ignore_eos=True, detokenize=False) for t in (0, 1.0))
    asked = token_prompts([SAMPLED_PROMPT] * SAMPLES), [greedy, warm] * (SAMPLES // 2)
    tokens = [*map(tuple, generate(drafting, *asked))]
    assert set(tokens[::2]) == {plain_tiny.greedy}
    assert p_value(tokens[1::2], plain_tiny.sampled[SETTINGS[0]]) > 1e-3
