"""Sampled output has the distribution that the engine gives it without us: chi-square over whole short outputs. With
seeds it is the same output; more of those in test_vllm_seeds.py.

The model is random with a vocabulary of 24, so that an output of three tokens falls often enough into the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import SAMPLED_PROMPT, SAMPLES, SAMPLING_ENGINE, SETTINGS, PlainTiny, p_value, sample
from vllm_engines import engine, failures, runner_of, settle, spied

from layerskip_plugin.skip_set import SkipSet
from tests.support.stores import build_store

K = 3


@pytest.fixture(scope="module")
def plain(plain_tiny: PlainTiny) -> dict[tuple, list[tuple]]:
    return plain_tiny.sampled


@pytest.fixture(scope="module", params=["sssd", "layerskip"])
def drafting(request: pytest.FixtureRequest, plain: dict, tiny_model: Path, tmp_path_factory: Any) -> Iterator[Any]:
    """An engine that drafts from a store that counts from 0 to 19, over and over; and one that skips layers, so that
    drafts are greedy. Depends on `plain` so that the engines do not exist at the same time."""
    folder = tmp_path_factory.mktemp("drafting")
    config = {"method": request.param, "num_speculative_tokens": K}
    if request.param == "sssd":
        build_store(folder / "store", [np.arange(3000) % 20], 24)
        config |= {"scoring": "paper", "policy": "fixed", "datastore": str(folder / "store"), "live": "off"}
    else:
        SkipSet(2, frozenset({1}), frozenset({0})).save(folder / "half.json")
        config |= {"skip_set": str(folder / "half.json"), "lookahead": "fixed"}
    with engine(tiny_model, speculative_config=config, **SAMPLING_ENGINE) as llm:
        yield llm


def test_the_test_can_tell_distributions_apart(plain: dict) -> None:
    first, second = plain[SETTINGS[0]], plain[SETTINGS[1]]
    assert p_value(first, second) < 1e-12
    assert p_value(first[::2], first[1::2]) > 1e-3


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampled_output_has_the_engines_distribution(drafting: Any, plain: dict, setting: tuple) -> None:
    drafted: list[int] = []
    with spied(runner_of(drafting).drafter, lambda step, drafts: drafted.append(sum(map(len, drafts)))):
        sampled = sample(drafting, setting)
    assert sum(drafted) > SAMPLES, "hardly anything was drafted: the test does not test that"
    assert sampled == plain[setting] if setting[-1] else p_value(sampled, plain[setting]) > 1e-3
    settle(drafting)
    assert not failures(runner_of(drafting).drafter)


@pytest.mark.parametrize("drafting", ["sssd"], indirect=True)
def test_the_engine_drafts_from_the_store(drafting: Any) -> None:
    from vllm import SamplingParams

    proposer = runner_of(drafting).drafter
    assert proposer.guarded.method.store.manifest.n_tokens == 3000 and len(proposer.guarded.method.drafter) == 0
    seen: list[list[int]] = []
    # No n-gram of the prompt comes again, so the draft can only be the store's.
    with spied(proposer, lambda step, drafts: seen.extend(drafts)):
        drafting.generate(
            [{"prompt_token_ids": [7, 2, 4]}],
            SamplingParams(max_tokens=K + 2, temperature=0, allowed_token_ids=[5], detokenize=False),
            use_tqdm=False,
        )
    assert seen and seen[0] == [6, 7, 8]


def test_greedy_and_sampled_requests_in_one_batch(drafting: Any, plain: dict, plain_tiny: PlainTiny) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    warm = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = drafting.generate(
        [{"prompt_token_ids": SAMPLED_PROMPT}] * SAMPLES, [greedy, warm] * (SAMPLES // 2), use_tqdm=False
    )
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert set(tokens[::2]) == {plain_tiny.greedy}
    assert p_value(tokens[1::2], plain[SETTINGS[0]]) > 1e-3
