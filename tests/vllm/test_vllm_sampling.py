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

from tests.support.stores import build_store

K = 3


@pytest.fixture(scope="module")
def plain(plain_tiny: PlainTiny) -> dict[tuple, list[tuple]]:
    return plain_tiny.sampled


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counting from 0 to 19, over and over."""
    path = tmp_path_factory.mktemp("datastore") / "store"
    build_store(path, [np.arange(3000) % 20], 24)
    return path


@pytest.fixture(scope="module")
def sssd(plain: dict, tiny_model: Path, store: Path) -> Iterator[Any]:
    """Depends on `plain` so that the engines do not exist at the same time."""
    config = {
        "method": "sssd",
        "num_speculative_tokens": K,
        "scoring": "paper",
        "policy": "fixed",
        "datastore": str(store),
    }
    with engine(tiny_model, speculative_config=config, **SAMPLING_ENGINE) as llm:
        yield llm


def test_the_test_can_tell_distributions_apart(plain: dict) -> None:
    first, second = plain[SETTINGS[0]], plain[SETTINGS[1]]
    assert p_value(first, second) < 1e-12
    assert p_value(first[::2], first[1::2]) > 1e-3


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampled_output_has_the_engines_distribution(sssd: Any, plain: dict, setting: tuple) -> None:
    drafted: list[int] = []
    with spied(runner_of(sssd).drafter, lambda step, drafts: drafted.append(sum(map(len, drafts)))):
        sampled = sample(sssd, setting)
    assert sum(drafted) > SAMPLES, "hardly anything was drafted: the test does not test that"
    assert sampled == plain[setting] if setting[-1] else p_value(sampled, plain[setting]) > 1e-3
    settle(sssd)
    proposer = runner_of(sssd).drafter
    assert not failures(proposer) and len(proposer.guarded.method.drafter) == 0


def test_the_engine_drafts_from_the_store(sssd: Any) -> None:
    from vllm import SamplingParams

    proposer = runner_of(sssd).drafter
    assert proposer.guarded.method.store.manifest.n_tokens == 3000
    seen: list[list[int]] = []
    # No n-gram of the prompt comes again, so the draft can only be the store's.
    with spied(proposer, lambda step, drafts: seen.extend(drafts)):
        sssd.generate(
            [{"prompt_token_ids": [7, 2, 4]}],
            SamplingParams(max_tokens=K + 2, temperature=0, allowed_token_ids=[5], detokenize=False),
            use_tqdm=False,
        )
    assert seen and seen[0] == [6, 7, 8]


def test_greedy_and_sampled_requests_in_one_batch(sssd: Any, plain: dict, plain_tiny: PlainTiny) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    warm = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = sssd.generate(
        [{"prompt_token_ids": SAMPLED_PROMPT}] * SAMPLES, [greedy, warm] * (SAMPLES // 2), use_tqdm=False
    )
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert set(tokens[::2]) == {plain_tiny.greedy}
    assert p_value(tokens[1::2], plain[SETTINGS[0]]) > 1e-3
