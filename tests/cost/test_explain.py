"""What the cost model says before anything is served: `freedraft explain`, and lengths by batch size."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known import LLAMA3_8B, engine_context, roofline_on
from typer.testing import CliRunner

from freedraft.cli import app
from freedraft.config import ConfigError
from freedraft.cost import profiling
from freedraft.cost.auto_by_batch import CHAIN_TOKENS_PER_STEP, expected_tokens
from freedraft.cost.explain import CURVES, explain
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import state_bytes
from freedraft.cost.policies import CONTEXT, draft_lengths, make_controller
from freedraft.cost.roofline import Roofline
from tests.support.disks import full_disk
from tests.support.published import QWEN3_30B, QWEN36_27B


def rates(roofline: Roofline, batch: int, nodes: range, context: int, curve: dict[int, float]) -> list[float]:
    """Tokens of a request per second, by nodes of its drafts."""
    tokens = expected_tokens(np.array(nodes), curve)
    return [t / float(roofline.seconds(batch, batch * n, context)) for n, t in zip(nodes, tokens, strict=True)]


def test_the_best_length_is_the_best_of_all() -> None:
    curve = {1: 1.0, 2: 1.4, 8: 2.0}
    for row in explain(roofline_on("l40s"), 4096, curve, 12):
        by_length = rates(roofline_on("l40s"), row.batch, range(1, 13), 4096, curve)
        assert row.best == int(np.argmax(by_length)) + 1
        assert row.speedup == pytest.approx(max(by_length) / by_length[0])


def test_the_usual_curve_is_that_of_the_replayed_answers() -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "replay.json"
    kind = {"trace": "replay_llama31_8b.jsonl", "drafter": "sssd", "scoring": "learned", "shape": "tree"}
    rows = [row for row in json.loads(path.read_text()) if row["store_tokens"] and kind.items() <= row.items()]
    assert {1: 1.0} | {row["budget"]: round(row["tokens_per_step"], 3) for row in rows} == CURVES["tree"]


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@pytest.mark.parametrize("most", [1, 8])
def test_no_other_length_of_a_schedule_has_more_tokens_per_second(hardware: str, most: int) -> None:
    schedule = draft_lengths(engine_context(max_draft_tokens=most), "auto", hardware=hardware)
    assert schedule is not None and schedule.learnt[0] == 0 and schedule.learnt[-1] == most
    for batch in (1, 3, 6, 24, 96, 384):
        (chosen,) = [length for first, last, length in schedule.rows if first <= batch <= last]
        by_length = rates(roofline_on(hardware), batch, range(1, most + 2), CONTEXT, CHAIN_TOKENS_PER_STEP)
        assert by_length[chosen] >= 0.97 * max(by_length[length] for length in schedule.learnt), batch


def test_experts_decide_the_first_lengths() -> None:
    """With few requests each draft token of a mixture wakes more experts, so that a step takes longer."""
    lengths, times = [], []
    for config in (QWEN3_30B, LLAMA3_8B):
        schedule = draft_lengths(engine_context(config, max_draft_tokens=15), "auto", hardware="h100")  # vLLM's
        assert schedule is not None
        lengths.append([length for at in (2, 64) for first, last, length in schedule.rows if first <= at <= last])
        sglang = make_controller(engine_context(config, max_draft_tokens=15, widths=(1, 4, 16)), hardware="h100")
        one, _, sixteen = sglang.measured.step_seconds(1, np.array([1, 4, 16]))
        times.append(sixteen / one)
    (alone, many), (dense, _) = lengths
    assert alone == 0 < many and dense >= 7
    assert times[0] > 5 and times[1] < 1.1


def test_schedules_have_no_gaps_and_lengths_fall() -> None:
    schedule = draft_lengths(engine_context(), "knee", hardware="h100")
    assert schedule is not None and schedule.rows[0][0] == 1 and schedule.rows[-1][2] == 0
    assert not schedule.learnt, "a rule stays as it is"
    for (_, last, length), (first, _, shorter) in itertools.pairwise(schedule.rows):
        assert first == last + 1 and shorter < length <= 8
    assert draft_lengths(engine_context({}), "auto", hardware="h100") == schedule, "of a model of unknown shape"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    return tmp_path


def test_the_command_prints(model: Path) -> None:
    result = CliRunner().invoke(app, ["explain", "--model", str(model), "--hardware", "h100"])
    assert result.exit_code == 0, result.output
    assert "speed-up" in result.output and "256" in result.output
    assert "1.529 for 33 nodes" in " ".join(result.output.split()), "chains, as vLLM's FlashAttention verifies them"
    trees = CliRunner().invoke(app, ["explain", "--model", str(model), "--hardware", "h100", "--shape", "tree"])
    assert trees.exit_code == 0 and "1.927 for 32 nodes" in " ".join(trees.output.split())


def explained(config: dict[str, Any], folder: Path, *given: str) -> str:
    """What the command prints for a model without its engine, blanks removed."""
    (folder / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(
        app,
        ["explain", "--model", str(folder), "--hardware", "h100", *given],
        terminal_width=200,
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_command_prints_the_default_of_each_engine(tmp_path: Path) -> None:
    printed = explained(LLAMA3_8B, tmp_path, "--max-num-seqs", "1024")
    for engine in ("vLLM", "SGLang"):
        assert f"{engine}, up to 1,024 requests: 15 draft tokens by default: longer chains gain nothing." in printed
    for figures in ("│ 15 │ 0.00 │ 1,024 │ 0.00 │ 1,024 │ 250 │", "│ 31 │ 0.00 │ 1,024 │ 0.00 │ 1,024 │ 501 │"):
        assert figures in printed
    printed = explained(LLAMA3_8B, tmp_path, "--max-num-seqs", "1024", "--shape", "tree")
    assert "15 draft tokens by default: 31 would take grammar masks of 501 MiB" in printed
    printed = explained(QWEN3_30B, tmp_path, "--max-num-seqs", "64", "--data-parallel", "2")
    assert "vLLM, up to 64 requests: 3 draft tokens by default: ranks that share experts" in printed


def test_the_command_prints_recurrent_states_without_an_engine(tmp_path: Path) -> None:
    """Of a 27B, 154 MB each: vLLM has two besides those of draft tokens, SGLang five and that of the root."""
    one = state_bytes(QWEN36_27B) / 1e9
    printed = explained(QWEN36_27B, tmp_path, "--max-num-seqs", "8", "--memory", "80")
    assert f"│ 7 │ {9 * one:.2f} │ 8 │ {13 * one:.2f} │" in printed
    assert "vLLM, up to 8 requests: 7 draft tokens by default: 15 would take recurrent states of 20.94 GB" in printed
    assert (
        "SGLang, up to 8 requests: 1 draft tokens by default: 3 would take recurrent states of 12.47 GB for 8"
        in printed
    )
    for memory in ([], ["--memory", "40"]):
        given = ["explain", "--model", str(tmp_path), "--hardware", "h100", "--max-num-seqs", "8", *memory]
        assert "give a larger --memory, or more ranks" in CliRunner().invoke(app, given).output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--hardware", "h1000"], "did you mean"),
        (["--hardware", "h100", "--dtype", "int7"], "int7"),
        (["--hardware", "h100", "--shape", "bush"], "chain or tree"),
    ],
)
def test_wrong_arguments_are_named(model: Path, arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["explain", "--model", str(model), *arguments])
    assert result.exit_code == 2 and word in result.output and "Traceback" not in result.output


def test_a_machine_is_measured_and_its_profile_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(profiling, "_SECONDS", 0.3)  # as exact as the bounds below ask for
    out = tmp_path / "mine.yaml"
    result = CliRunner().invoke(app, ["profile", "--device", "cpu", "--name", "mine", "--out", str(out)])
    assert result.exit_code == 0, result.output
    profile = HardwareProfile.load(out)
    assert profile.source == "measured" and profile.name == "mine"
    assert 1e9 < profile.bandwidth < 1e13 and 1e9 < profile.flops("float32") < 1e15
    again = CliRunner().invoke(app, ["profile", "--device", "tpu", "--out", str(out)])
    assert again.exit_code == 2 and "tpu" in again.output
    with pytest.raises(ConfigError, match="--force"):
        profiling.write(profile, out)
    with full_disk(20), pytest.raises(ConfigError, match="cannot write"):
        profiling.write(profile, out, force=True)
    assert HardwareProfile.load(out) == profile  # the one that was there
    profiling.write(profile, out, force=True)
    assert HardwareProfile.load(out) == profile
