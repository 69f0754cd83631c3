"""Results of serving benchmarks: throughput under full load, what is worked out of blocks, and files with their
manifests, in which what was changed by hand, or came from nowhere, is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.lib import results, serving, summary
from bench.lib.forcing import Answer, figures
from bench.lib.load import full_load
from bench.lib.machine import INSTRUCTIONS, instructions

ROOT = Path(__file__).resolve().parents[2]
SPEED = {"plain": 10.0, "sssd": 20.0, "ngram": 8.0}
ACCEPTED = {"plain": None, "sssd": 4, "ngram": 0}
PLAIN = dict.fromkeys(SPEED, "plain")


def block(arm: str, number: int, concurrency: int = 1, **changes: Any) -> dict[str, Any]:
    """A block of two requests of eight tokens, of groups qa and rag; `SPEED` tokens per second."""
    seconds = 16 / SPEED[arm]
    drafted = None if ACCEPTED[arm] is None else 8
    made = {"arm": arm, "concurrency": concurrency, "repeat": 0, "block": number, "groups": ["qa", "rag"]}
    made |= {"seconds": seconds, "left": 16.0, "latency_s": [seconds / 2] * 2, "ttft_s": [seconds / 4] * 2}
    made |= {"answers": [f"a{number}", f"b{number}"], "drafted": drafted, "accepted": ACCEPTED[arm], "errors": []}
    return made | {"tokens": [8, 8]} | changes


def blocks(without: tuple[str, int, int] | None = None) -> list[dict[str, Any]]:
    """Four blocks of each arm at 1 and 4 requests at a time, but for one of (arm, number, concurrency)."""
    made = [(arm, number, concurrency) for concurrency in (1, 4) for arm in SPEED for number in range(4)]
    return [block(*each) for each in made if each != without]


def find(rows: list[dict[str, Any]], arm: str, group: str, concurrency: int = 1) -> dict[str, Any]:
    (row,) = (r for r in rows if (r["arm"], r["group"], r["concurrency"]) == (arm, group, concurrency))
    return row


def run(*requests: tuple[float, float, list[float], int]) -> dict[str, object]:
    """A run of `vllm bench serve`, of (start, time to the first chunk, gaps between chunks, tokens)."""
    keys = ("start_times", "ttfts", "itls", "output_lens")
    return dict(zip(keys, map(list, zip(*requests, strict=True)), strict=True))


def test_tokens_between_the_first_free_place_and_the_last_request() -> None:
    """Two at a time; the first answer ends at 103 s, and another request takes its place; the last is sent at 106 s."""
    result = run(
        (100.0, 1.0, [0.0, 1.0, 1.0], 3),  # tokens at 101, 102, 103: before
        (100.0, 1.5, [0.0, 2.5, 2.0], 9),  # three tokens a chunk, at 101.5, which is before, 104 and 106
        (103.0, 0.5, [0.0, 0.5, 2.5], 3),  # at 103.5, 104, and 106.5, which is the tail
        (106.0, 0.5, [0.0, 0.5], 2),
    )
    assert full_load(result, 2) == (pytest.approx(3), pytest.approx(6 + 2))
    # Of four requests of a second for the prompt and one for a second token the two in the middle count.
    one = run(*[(2.0 * i, 1.0, [0.0, 1.0], 2) for i in range(4)])
    assert full_load(one, 1) == (pytest.approx(4), pytest.approx(4))
    assert full_load(one, 3) == full_load(one, 9) == (0.0, 0.0), "never full"


def test_rows_by_arm_concurrency_and_group() -> None:
    rows = summary.rows(blocks(), PLAIN)
    assert len(rows) == 3 * 2 * 3
    row = find(rows, "sssd", "all")
    expected = {"requests": 8, "tokens": 64, "tokens_per_second": 20, "ratio": 2, "ratio_interval": [2, 2],
                "ms_per_token": 1000 * 0.4 / 8, "ttft_ms": 200, "decode_ms_per_token": 1000 * 0.2 / 7,
                "identical": 1}  # fmt: skip
    for key, value in expected.items():
        assert row[key] == pytest.approx(value), key
    assert row["over"] == {"ngram": pytest.approx([2.5, 2.5, 2.5])} and "ratio" not in find(rows, "plain", "all")
    group = find(rows, "ngram", "qa", 4)
    assert group["requests"] == 4 and group["ratio"] == pytest.approx(0.8) and "tokens_per_second" not in group


def test_throughput_is_that_of_full_load_and_a_group_has_its_time_per_token() -> None:
    """Two slots full for half of the time, in which 12 of the 16 tokens left; `rag` is decoded at plain's speed."""
    found = [block("plain", i) for i in range(3)]
    found += [block("sssd", i, seconds=0.4, left=12.0, latency_s=[0.4, 0.8], ttft_s=[0.2, 0.4]) for i in range(3)]
    rows = summary.rows(found, PLAIN)
    assert find(rows, "sssd", "all")["tokens_per_second"] == pytest.approx(30)
    assert [find(rows, "sssd", group)["ratio"] for group in ("all", "qa", "rag")] == pytest.approx([3, 2, 1])


def test_the_ratio_of_throughputs_is_the_median_of_pairs_of_blocks() -> None:
    found = [block("plain", i) for i in range(3)] + [block("sssd", i, seconds=s) for i, s in enumerate((0.8, 0.8, 80))]
    found += [block("sssd", 3), block("plain", 3, seconds=0.0, left=0.0), block("plain", 4)]
    row = find(summary.rows(found, PLAIN), "sssd", "all")
    assert row["ratio"] == pytest.approx(2), "a slow minute, a block that was never full and one without its pair"


def test_a_differing_answer_shows_and_only_blocks_that_both_answered_are_compared() -> None:
    other = block("sssd", 0, answers=["a0", "other"])
    rows = summary.rows([*blocks(without=("sssd", 0, 1)), other], PLAIN)
    assert [find(rows, "sssd", group)["identical"] for group in ("rag", "qa")] == pytest.approx([3 / 4, 1.0])
    failed = block("plain", 0, errors=["refused"], seconds=1000.0, latency_s=[None, 1.0])
    row = find(summary.rows([*blocks(without=("plain", 0, 1)), failed], PLAIN), "sssd", "qa")
    assert row["ratio"] == pytest.approx(2)
    assert row["requests"] == 4  # its own figures count all that it answered


def test_all_files_of_results_are_as_they_were_written() -> None:
    command = [sys.executable, "-m", "bench.lib.results", str(ROOT / "bench" / "results")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_benchmark_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    monkeypatch.setattr(sys, "orig_argv", ["python", str(ROOT / "bench" / "x.py")])
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "x.py"), "--trace", str(trace), "--tokens", "3 4"])
    path = tmp_path / "folder" / "x.json"
    results.write_json(path, {"speed": 1.5}, data=[trace])
    manifest = results.checked(path)
    assert manifest["command"] == "python bench/x.py --trace trace.jsonl --tokens '3 4'"
    assert manifest["data"] == {"trace.jsonl": results.sha256(trace)}
    assert manifest["versions"]["python"] and manifest["machine"]["cores"] and manifest["commit"]
    assert manifest["machine"]["instructions"] == instructions() in ("", *INSTRUCTIONS)


@pytest.mark.parametrize("wrong", ["a row by hand", "no manifest", "damaged", "left over", "another format"])
def test_what_is_not_as_it_was_written(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    results.write_json(path, {"rows": [1.0]})
    manifest = results.manifest_of(path)
    if wrong == "a row by hand":
        path.write_text(json.dumps({"rows": [1.0, 2.0]}))
    elif wrong == "damaged":
        manifest.write_text("{}")
    elif wrong == "another format":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    else:
        (manifest if wrong == "no manifest" else path).unlink()
    assert results.check(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "x.json" in said


def test_results_go_on_only_with_the_same_settings_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, report = tmp_path / "serve.json", serving.Report
    settings = {"max_tokens": 8, "device": "cpu", "arms": {"plain": serving.asdict(serving.PRESETS["plain"])}}
    report(path, settings, [block("plain", 0), block("plain", 1, errors=["refused"])]).write()
    again = report.open(path, settings, fresh=False)
    assert again.answered("plain", 1, 0) == 1, "a pass with a block that failed is not whole"
    assert again.answered("plain", 4, 0) == again.answered("plain", 1, 1) == 0
    other = {**settings, "arms": {"plain": serving.asdict(serving.PRESETS["ngram"])}}
    for given, says in (({**settings, "max_tokens": 16}, "max_tokens 8, not 16"), (other, "measured with arms")):
        with pytest.raises(ValueError, match=says):
            report.open(path, given, fresh=False)
    assert report.open(path, other, fresh=True).blocks == []
    elsewhere = results.origin() | {"commit": "another"}
    monkeypatch.setattr(results, "origin", lambda: elsewhere)
    with pytest.raises(ValueError, match=r"measured with commit .*--fresh"):
        report.open(path, settings, fresh=False)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no results of this benchmark"):
        report.open(path, settings, fresh=False)


def test_figures_of_forced_answers() -> None:
    """One request at a time, three answers of five tokens in three passes each, drafts of two."""
    came = [(1.0, 1), (1.1, 3), (1.2, 4), (1.3, 5)]
    answers = [Answer(n, float(n), [0] * 5, [(at + n, tokens) for at, tokens in came]) for n in range(3)]
    steps = [[at + n, 1, at > 1.0, 3 if at > 1.0 else 1] for n in range(3) for at, _ in came]
    found = figures(answers, 1, steps)
    assert found["tokens_per_step"] == 4 / 3 and found["accepted"] == 3 / 18 and found["steps"] == 6
    assert found["step_ms"] == pytest.approx(100) and found["tpot_ms"] == pytest.approx(75)
    assert found["tokens_per_s"] == pytest.approx(5.0)  # four of the first answer behind 1.0, and one at 2.0
    answers[0].passes = 4
    assert figures(answers, 1, steps)["tokens_per_step"] == 12 / 10
