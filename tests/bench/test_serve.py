"""What arms are given, and in which turns: the same for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import serve
from bench.lib import serving
from bench.lib.questions import Question

ASKED = [Question(f"q:{i}", group, f"question {i}") for group in ("qa", "rag") for i in range(20)]


def bench(folder: Path, *more: str) -> serve.Bench:
    arguments = ["--questions", "agent", "--json", str(folder / "serve.json"), "--arms", *serving.PRESETS, *more]
    args = serve.parse(arguments)
    return serve.Bench(args, ASKED, serving.Report(args.json, {}))


def test_every_arm_caches_prefixes_and_sssd_is_the_one_flag(tmp_path: Path) -> None:
    made = bench(tmp_path)
    for running in made.arms:
        command = made.server(running.arm).command
        assert "--disable-radix-cache" not in command
        assert ("--enable-prefix-caching" in command) == (running.arm.engine == "vllm")
        assert (
            command[command.index({"vllm": "--max-model-len"}.get(running.arm.engine, "--context-length")) + 1]
            == "8192"
        )
    assert serving.PRESETS["sssd"].speculative == serving.PRESETS["sglang-sssd"].speculative == {"method": "sssd"}


def test_answers_differ_in_length_but_not_between_arms() -> None:
    lengths = [serve.request(question, 64)[1] for question in ASKED]
    assert lengths == [serve.request(question, 64)[1] for question in ASKED]
    assert 32 <= min(lengths) < 48 < 80 < max(lengths) <= 96
    assert sum(lengths[:20]) / 20 == pytest.approx(64, rel=0.15)
    assert serve.request(Question("q", "qa", "hello"), 2)[0] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("in_turns", [False, True])
def test_every_arm_gets_every_pass(tmp_path: Path, in_turns: bool) -> None:
    more = ["--concurrency", "1", "4", "--repeats", "2", *(["--in-turns"] if in_turns else [])]
    made = bench(tmp_path, *more)
    passes = [(r.arm.name, concurrency, repeat) for team, concurrency, repeat in made.order() for r in team]
    assert sorted(passes) == sorted((name, c, repeat) for name in serving.PRESETS for c in (1, 4) for repeat in (0, 1))
    assert made.blocks.keys() == {1, 4} and [len(b) for b in made.blocks[4]] == [40]
