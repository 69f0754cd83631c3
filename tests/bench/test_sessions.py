"""Recorded sessions of agents: how they are read, replayed and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import replay
from bench.lib.sessions import Sessions, comparison
from tests.support.models import save_word_tokenizer

SAID = " ".join(f"w{i}" for i in range(20, 40))


def write(folder: Path, sessions: list[list[tuple[str, str]]]) -> list[str]:
    """A file of sessions, and the arguments that name it and a tokenizer."""
    save_word_tokenizer(folder, 40)
    rows = [
        {"session": f"s{i}", "messages": [{"role": role, "content": content} for role, content in messages]}
        for i, messages in enumerate(sessions)
    ]
    (folder / "agents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--sessions", str(folder / "agents.jsonl"), "--tokenizer", str(folder)]


def test_turns_are_read_as_they_came(tmp_path: Path) -> None:
    write(tmp_path, [[("user", "w5 w6 w7"), ("assistant", "w8 w9 w8 w7"), ("assistant", "w8"), ("assistant", SAID)]])
    (turns,) = Sessions.load(tmp_path / "agents.jsonl", tmp_path).turns.values()
    assert [len(answer) for _, answer in turns] == [4, 20], "one word is too short; the end is glued to the last word"
    (first, answer), (second, _) = turns
    assert second[: len(first) + len(answer)].tolist() == [*first, *answer]
    assert Sessions.load(tmp_path / "agents.jsonl", tmp_path).vocab_size == 40


@pytest.mark.parametrize("line", ["{", '{"session": "a"}', '{"session": "a", "messages": [{"role": "user"}]}', "3"])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path, [[("user", "w5"), ("assistant", SAID)]])
    with (tmp_path / "agents.jsonl").open("a") as file:
        file.write(f"\n{line}")
    with pytest.raises(ValueError, match=r"agents\.jsonl line 2 "):
        Sessions.load(tmp_path / "agents.jsonl", tmp_path)


def test_what_one_session_said_is_drafted_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("user", "w5 w6 w7 w8"), ("assistant", SAID)]
    files = write(tmp_path, [turns, turns])
    out = tmp_path / "out.json"
    options = ["--drafter", "sssd", "--shape", "chain", "tree", "--budget", "16", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["replay.py", *files, *options])
    assert replay.main() == 0
    rows = json.loads(out.read_text())
    assert [row["shape"] for row in rows] == ["chain", "tree"]
    for row in rows:
        first, second = row["sessions"].values()
        assert second["tokens_per_step"] > 3 * first["tokens_per_step"]
        assert row["tokens_per_step"] == pytest.approx(row["output_tokens"] / row["steps"], abs=1e-4)
    assert "| sssd |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["replay.py", *files, "--drafter", "lookup"])
    assert replay.main() == 2 and "learn" in capsys.readouterr().err


def test_the_lowest_session_is_shown() -> None:
    def row(drafter: str, shape: str, limits: str | None, rates: list[float]) -> dict[str, Any]:
        sessions = {str(i): {"tokens_per_step": rate} for i, rate in enumerate(rates)}
        rate = sum(rates) / len(rates)
        return {
            "file": "agent_x_dev.jsonl", "drafter": drafter, "shape": shape, "budget": 16, "limits": limits,
            "tokens_per_step": rate, "sessions": sessions,
        }  # fmt: skip

    rows = [row("sssd", "chain", None, [2.0, 4.0]), row("sssd", "tree", None, [4.0, 4.0])]
    rows += [row("suffix", "chain", "opened", [2.5, 2.5]), row("suffix", "tree", "opened", [2.0, 3.0])]
    rows += [row("suffix", "chain", "vLLM's", [1.0, 2.0])]
    assert "| agent x | 16 | 3.00 | 4.00 | 2.50 | 2.50 | 1.20 | 1.60 | 0.80 |" in comparison(rows, "opened")
    assert "| agent x | 16 | 3.00 | 4.00 | 1.50 |  | 2.00 | 2.67 | 2.00 |" in comparison(rows, "vLLM's")
