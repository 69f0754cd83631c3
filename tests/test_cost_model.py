from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freedraft import hardware
from freedraft.config import ConfigError
from freedraft.cost_model import CostModel
from freedraft.cost.hardware import HardwareProfile, choose_profile


def profile(**values: object) -> HardwareProfile:
    return HardwareProfile(**({"name": "x", "peak_flops": 1e14, "bandwidth": 1e12, "source": "measured"} | values))


def test_ridge_is_flops_per_byte_unless_a_knee_is_given() -> None:
    # The worked example of papers/sssd.txt, appendix B: 165 TFLOP/s and 0.95 TB/s, b * s_q = 174.
    assert profile(peak_flops=165e12, bandwidth=0.95e12).ridge == 174
    assert profile(peak_flops=165e12, bandwidth=0.95e12, knee=6).ridge == 6


def test_width_of_the_papers_example() -> None:
    # s_q = 174 / 8, rounded.
    model = CostModel(profile(peak_flops=165e12, bandwidth=0.95e12), 63)
    assert model.width(8, range(1, 64)) == 22
    assert model.width(8, (1, 2, 4, 8, 16, 32)) == 16


@pytest.mark.parametrize(("batch", "budget"), [(0, 0), (1, 5), (2, 4), (3, 3), (5, 1), (6, 0), (7, 0), (100, 0)])
def test_budget_on_the_cpu(batch: int, budget: int) -> None:
    assert CostModel(HardwareProfile.load("cpu"), 8).budget(batch) == budget


def test_budget_is_capped_by_what_requests_may_draft() -> None:
    assert CostModel(profile(knee=100), 8).budget(2) == 16
    assert CostModel(profile(knee=100, max_nodes_by_batch={1: 4}), 8).budget(2) == 6
    assert CostModel(profile(knee=100, max_nodes_by_batch={1: 4, 2: 6}), 8).budget(2) == 10


def test_fixed_policy_ignores_knee_and_caps() -> None:
    model = CostModel(profile(knee=2, max_nodes_by_batch={1: 2}), 8, policy="fixed")
    assert model.budget(16) == 128
    assert model.width(16, (1, 4, 8, 16)) == 8


@given(st.integers(1, 500), st.integers(0, 64), st.integers(1, 300), st.integers(1, 40))
def test_budget_keeps_the_batch_at_the_knee(knee: int, most: int, batch: int, cap: int) -> None:
    model = CostModel(profile(knee=knee, max_nodes_by_batch={1: cap}), most)
    budget = model.budget(batch)
    assert 0 <= budget <= batch * most
    assert budget == 0 or batch + budget <= knee
    width = model.width(batch, (1, 2, 4, 8, 16, 32))
    assert width == 1 or (batch * (width - 0.5) <= knee and width <= min(most + 1, cap))


def test_shipped_profiles() -> None:
    names = HardwareProfile.shipped()
    assert set(names) >= {"cpu", "h200", "h100", "a100", "l40s", "rtx4090"}
    for name in names:
        loaded = HardwareProfile.load(name.upper())
        assert loaded.name == name
        assert loaded.source == ("measured" if name == "cpu" else "datasheet")
        assert loaded.max_nodes(1) in (32, None)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce GTX 1080", "a100"),
        (None, "cpu"),
    ],
)
def test_auto_takes_the_profile_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hardware, "device_name", lambda: device)
    assert choose_profile("auto").name == name
    assert ("GTX 1080" in caplog.text) == (device is not None and "1080" in device)


GOOD = "name: mine\npeak_flops: 1.0e+12\nbandwidth: 1.0e+11\nsource: measured\n"


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert choose_profile(str(tmp_path / "mine.yaml")).ridge == 10


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (GOOD.replace("1.0e+11", "0"), "bandwidth"),
        (GOOD.replace("1.0e+12", "-1"), "peak_flops"),
        (GOOD.replace("1.0e+12", ".nan"), "peak_flops"),
        (GOOD.replace("measured", "guessed"), "source"),
        (GOOD + "dtype: bf16\n", "dtype"),
        (GOOD + "max_nodes_by_batch: {0: 3}\n", "max_nodes_by_batch"),
        ("", "peak_flops"),
    ],
)
def test_nonsense_in_a_profile_is_named(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        choose_profile(str(path))
    assert word in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_profile_gets_a_remedy() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        choose_profile("h2000")
