"""Sampled output has the distribution that the engine gives it without us: chi-square over whole short outputs.

The model is random with a vocabulary of 24, so that an output of three tokens falls often enough into the same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import engine, runner_of, settle, spied

SAMPLES = 3000
PROMPT = [5, 9, 17, 5, 9, 3, 5, 9, 17, 22, 5, 9]
K = 3

# temperature, top_p, top_k, one seed per request
SETTINGS = [(1.0, 1.0, 0, False), (0.6, 0.8, 0, False), (1.4, 1.0, 5, False), (0.9, 0.9, 8, True)]


def arguments() -> dict[str, Any]:
    return {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 128,
        "enable_prefix_caching": False,
        # Of several tokens that are as probable as the k-th, top-k keeps all; fp32 keeps ties out.
    }


def sample(llm: Any, setting: tuple[float, float, int, bool], samples: int = SAMPLES, seed: int = 0) -> list[tuple]:
    """Outputs of three tokens, without detokenising; each request has its own seed where the setting says so."""
    from vllm import SamplingParams

    temperature, top_p, top_k, seeded = setting
    requests = [
        SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed + i if seeded else None,
            max_tokens=4,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(samples)
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * samples, requests, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def p_value(a: list[tuple], b: list[tuple]) -> float:
    """That two samples come from one distribution: chi-square over outputs, the rare ones taken together."""
    from scipy.stats import chi2_contingency

    p = 1.0
    # Whole outputs are many; their beginnings are few and show a small shift better.
    for length in (2, 3, 4):
        ours, theirs = (Counter(output[:length] for output in sample) for sample in (a, b))
        common = [key for key in ours | theirs if ours[key] + theirs[key] >= 12]
        table = [[count[key] for key in common] for count in (ours, theirs)]
        for row, sample in zip(table, (a, b), strict=True):
            row.append(len(sample) - sum(row))
        columns = [column for column in zip(*table, strict=True) if sum(column)]
        if len(columns) > 1:
            p = min(p, chi2_contingency(list(zip(*columns, strict=True)), correction=False)[1])
    return p


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[tuple, list[tuple]]:
    with engine(tiny_model, **arguments()) as llm:
        result = {setting: sample(llm, setting) for setting in SETTINGS}
        result["greedy"] = sample(llm, (0.0, 1.0, 0, False), 1)
        return result


@pytest.fixture(scope="module")
def sssd(plain: dict, tiny_model: Path) -> Iterator[Any]:
    """Depends on `plain` so that the engines do not exist at the same time."""
    config = {"method": "sssd", "num_speculative_tokens": K, "scoring": "paper", "policy": "fixed"}
    with engine(tiny_model, speculative_config=config, **arguments()) as llm:
        yield llm


def test_the_test_can_tell_distributions_apart(plain: dict) -> None:
    first, second = plain[SETTINGS[0]], plain[SETTINGS[1]]
    assert p_value(first, second) < 1e-12
    assert p_value(first[::2], first[1::2]) > 1e-3


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampled_output_has_the_engines_distribution(sssd: Any, plain: dict, setting: tuple) -> None:
    drafted: list[int] = []
    with spied(runner_of(sssd).drafter, lambda step, drafts: drafted.append(sum(map(len, drafts)))):
        sampled = sample(sssd, setting, seed=1_000_000)
    assert sum(drafted) > SAMPLES, "hardly anything was drafted: the test does not test that"
    assert p_value(sampled, plain[setting]) > 1e-3
    settle(sssd)
    assert not runner_of(sssd).drafter.failed
    assert len(runner_of(sssd).drafter.drafter) == 0


def test_a_seed_gives_the_same_output_again(sssd: Any) -> None:
    assert sample(sssd, SETTINGS[3], 128, seed=5) == sample(sssd, SETTINGS[3], 128, seed=5)


def test_greedy_and_sampled_requests_in_one_batch(sssd: Any, plain: dict) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    warm = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = sssd.generate([{"prompt_token_ids": PROMPT}] * SAMPLES, [greedy, warm] * (SAMPLES // 2), use_tqdm=False)
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert set(tokens[::2]) == set(plain["greedy"])
    assert p_value(tokens[1::2], plain[SETTINGS[0]]) > 1e-3


# The two fixes: without each, the engine does what its reason says; with it, the tests above pass.


def test_without_the_fix_of_sampling_parameters_the_distribution_is_wrong(sssd: Any, plain: dict) -> None:
    from vllm.v1.sample import rejection_sampler

    from freedraft.engines.vllm.fixes import expand_per_token_parameters
    from freedraft.engines.vllm.patching import unwrap

    assert hasattr(rejection_sampler.expand_batch_to_tokens, "_freedraft_original")
    unwrap(rejection_sampler, "expand_batch_to_tokens")
    try:
        assert p_value(sample(sssd, SETTINGS[1]), plain[SETTINGS[1]]) < 1e-12
    finally:
        expand_per_token_parameters()
    assert p_value(sample(sssd, SETTINGS[1]), plain[SETTINGS[1]]) > 1e-3


def test_without_the_fix_of_empty_steps_the_engine_dies(sssd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    from freedraft.engines.vllm.fixes import allow_steps_without_drafts
    from freedraft.engines.vllm.patching import unwrap

    monkeypatch.setattr(runner_of(sssd).drafter, "draft", lambda step: step.no_drafts(), raising=False)
    setting = SETTINGS[2]
    sample(sssd, setting, 4)
    unwrap(rejection_sampler, "apply_sampling_constraints")
    try:
        # Last in this module: the engine is of no use afterwards.
        with pytest.raises(Exception, match=r"max\(\)"):
            sample(sssd, setting, 4)
    finally:
        allow_steps_without_drafts()
