from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known import profile

from freedraft.config import ConfigError
from freedraft.cost import hardware
from freedraft.cost.controller import Controller, FullLength, Knee
from freedraft.cost.hardware import HardwareProfile, choose_profile
from tests.support.steps import chains, make_step


def budget(controller: Controller, batch: int) -> int:
    """Draft tokens over the whole batch that a step of `batch` requests gets."""
    controller.plan(make_step([f"r{i}" for i in range(batch)], [[1]] * batch))
    return controller.budget


def width(controller: Controller, batch: int) -> int:
    return controller.plan(make_step([f"r{i}" for i in range(batch)], [[1]] * batch)) + 1


def test_the_papers_example() -> None:
    """165 TFLOP/s and 0.95 TB/s: free up to b * s_q = 174, s_q = 22 at b = 8; with 1/h in it, as in the equation,
    181."""
    assert profile().ridge == 174 and round(1 / (0.95 / 165 - 1 / 4096)) == 181
    assert width(Knee(profile(), 63, range(1, 64)), 8) == 22
    assert width(Knee(profile(), 63, (1, 2, 4, 8, 16, 32)), 8) == 16


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(0, 64), st.integers(1, 300), st.integers(1, 40))
def test_budget_keeps_the_batch_at_the_knee(knee: int, longest: int, batch: int, cap: int) -> None:
    machine = profile(knee=knee, max_nodes_by_batch={1: cap})
    tokens = budget(Knee(machine, longest), batch)
    assert 0 <= tokens <= batch * longest
    assert tokens == 0 or batch + tokens <= knee
    widest = width(Knee(machine, longest, (1, 2, 4, 8, 16, 32)), batch)
    assert widest == 1 or (batch * (widest - 0.5) <= knee and widest <= min(longest + 1, cap))


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 0.99), max_size=6), min_size=1, max_size=5), st.integers(1, 20))
def test_the_best_nodes_of_the_batch_get_the_budget(p: list[list[float]], knee: int) -> None:
    draft = chains(p)
    before = [draft.scores[b, 1 : draft.counts[b]].tolist() for b in range(len(p))]
    controller = Knee(profile(knee=knee), 6)
    tokens = budget(controller, len(p))
    controller.cut(draft)
    kept = draft.draft_tokens
    assert kept == min(tokens, sum(map(len, p))) == int((draft.counts - 1).sum())
    taken = sum(sum(scores[: n - 1]) for scores, n in zip(before, draft.counts.tolist(), strict=True))
    assert taken == pytest.approx(sum(sorted((p for scores in before for p in scores), reverse=True)[:kept]), rel=1e-5)


def test_what_a_request_may_have_limits_every_policy() -> None:
    step = make_step(["a", "b"], [[1], [2]], capacities=[0, 3])
    for controller in (FullLength(profile(), 8), Knee(profile(knee=100), 8), FullLength(profile(), 8, (1, 2, 4, 8))):
        assert controller.plan(step) == 3
    assert FullLength(profile(), 8).plan(make_step(["a"], [[1]], capacities=0)) == 0


def test_shipped_profiles() -> None:
    names = HardwareProfile.shipped()
    assert set(names) >= {"cpu", "h200", "h100", "a100", "l40s", "rtx4090"}
    for name in names:
        loaded = HardwareProfile.load(name.upper())
        assert loaded.name == name
        assert loaded.source == ("measured" if name == "cpu" else "datasheet")
        assert loaded.max_nodes(1) in (32, None)


DEVICES = {
    "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce GTX 1080": "a100", None: "cpu",
}  # fmt: skip


def test_auto_takes_the_profile_of_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for device, name in DEVICES.items():
        monkeypatch.setattr(hardware, "device_name", lambda device=device: device)
        assert choose_profile("auto").name == name
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "GTX 1080" in caplog.text


GOOD = "name: mine\npeak_flops: 1.0e+12\nbandwidth: 1.0e+11\nsource: measured\n"


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
def test_a_profile_of_ones_own_and_nonsense_in_it(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert choose_profile(str(path)).ridge == 10
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        choose_profile(str(path))
    assert word in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
