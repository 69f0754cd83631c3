"""Sampled output has the engine's own distribution although the drafts are greedy: they are verified as one-hot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_cases import SAMPLED_PROMPT, SAMPLES, SAMPLING_ENGINE, SETTINGS, PlainTiny, p_value, sample
from vllm_engines import engine, failures, runner_of, settle, spied

from layerskip_plugin.skip_set import SkipSet

CHOSEN = [SETTINGS[0], SETTINGS[1], SETTINGS[3]]


@pytest.fixture(scope="module")
def plain(plain_tiny: PlainTiny) -> dict[tuple, list[tuple]]:
    return plain_tiny.sampled


@pytest.fixture(scope="module")
def layerskip(plain: dict, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Depends on `plain` so that the engines do not exist at the same time."""
    path = tmp_path_factory.mktemp("skip_sets") / "half.json"
    SkipSet(2, frozenset({1}), frozenset({0})).save(path)
    config = {"method": "layerskip", "num_speculative_tokens": 3, "skip_set": str(path), "lookahead": "fixed"}
    with engine(tiny_model, speculative_config=config, **SAMPLING_ENGINE) as llm:
        yield llm


@pytest.mark.parametrize("setting", CHOSEN, ids=str)
def test_sampled_output_has_the_engines_distribution(layerskip: Any, plain: dict, setting: tuple) -> None:
    verified = [0, 0]

    def record(step: Any, drafts: list[list[int]]) -> None:
        verified[0] += int(step.drafted.sum())
        verified[1] += int(step.accepted.sum())

    with spied(runner_of(layerskip).drafter, record):
        sampled = sample(layerskip, setting)
    drafted, accepted = verified
    assert drafted > SAMPLES and 0 < accepted < drafted, "drafts were not both accepted and rejected"
    assert sampled == plain[setting] if setting[-1] else p_value(sampled, plain[setting]) > 1e-3
    settle(layerskip)
    assert not failures(runner_of(layerskip).drafter)


def test_greedy_and_sampled_requests_in_one_batch(layerskip: Any, plain: dict, plain_tiny: PlainTiny) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    warm = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, detokenize=False)
    count = SAMPLES // 2
    requests = [greedy, warm] * (count // 2)
    outputs = layerskip.generate([{"prompt_token_ids": SAMPLED_PROMPT}] * count, requests, use_tqdm=False)
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert set(tokens[::2]) == {plain_tiny.greedy}
    assert p_value(tokens[1::2], plain[SETTINGS[0]]) > 1e-3
