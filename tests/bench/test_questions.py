"""Question files: what is read, how it is cut into blocks, and what is said of a file in another format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.lib import made_questions, questions


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def row(number: int, category: str) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": [f"question {number}", "and then?"]}


def test_first_turns_and_groups_of_spec_bench(tmp_path: Path) -> None:
    found = questions.load(write(tmp_path / "q.jsonl", row(81, "writing"), row(91, "coding"), row(161, "rag")))
    assert [(q.name, q.group, q.text) for q in found] == [
        ("q:81", "mt_bench", "question 81"),
        ("q:91", "mt_bench", "question 91"),
        ("q:161", "rag", "question 161"),
    ]


def test_blocks_hold_one_group_each_and_groups_take_turns(tmp_path: Path) -> None:
    rows = [row(i, "qa") for i in range(5)] + [row(10 + i, "rag") for i in range(3)]
    blocks = questions.blocks(questions.load(write(tmp_path / "q.jsonl", *rows)), 1, 2)
    assert [(b[0].group, len(b)) for b in blocks] == [("qa", 2), ("rag", 2), ("qa", 2), ("rag", 1), ("qa", 1)]
    assert sorted(q.name for b in blocks for q in b) == sorted(f"q:{i}" for i in [*range(5), 10, 11, 12])
    assert [len(b) for b in questions.blocks([q for b in blocks for q in b], 1, 2, limit=2)] == [2, 2]


@pytest.mark.parametrize("concurrency", [1, 13, 16, 32, 64, 128, 256])
def test_every_block_keeps_so_many_requests_running(tmp_path: Path, concurrency: int) -> None:
    """Six groups of 40, as of Spec-Bench, and two of 24."""
    large = ("mt_bench", "qa", "rag", "math_reasoning", "summarization", "translation")
    sizes = dict.fromkeys(large, 40) | {"long": 24, "agent": 24}
    rows = [row(100 * g + i, group) for g, (group, size) in enumerate(sizes.items()) for i in range(size)]
    asked = questions.load(write(tmp_path / "q.jsonl", *rows))
    blocks = questions.blocks(asked, concurrency, 8)
    assert all(len(block) >= concurrency and len({q.group for q in block}) == 1 for block in blocks)
    assert sorted(q.name for block in blocks for q in block) == sorted(q.name for q in asked)
    groups = {q.group for block in blocks for q in block}
    by_themselves = {name for name, size in sizes.items() if size >= 2 * concurrency}
    assert groups == by_themselves | ({"mixed"} if len(by_themselves) < len(sizes) else set())


def test_more_requests_at_a_time_than_questions(tmp_path: Path) -> None:
    asked = questions.load(write(tmp_path / "q.jsonl", *[row(i, "qa") for i in range(5)]))
    with pytest.raises(questions.QuestionError, match="8 requests at a time, but 5 questions"):
        questions.blocks(asked, 8)
    asked += questions.load(write(tmp_path / "more.jsonl", *[row(i, "rag") for i in range(16)]))
    assert [(b[0].group, len(b)) for b in questions.blocks(asked, 8)] == [("mixed", 11), ("mixed", 10)]


@pytest.mark.parametrize(("members", "sizes"), [(8, [4, 4]), (9, [5, 4]), (5, [5]), (6, [3, 3]), (3, [3])])
def test_no_block_is_a_small_rest(tmp_path: Path, members: int, sizes: list[int]) -> None:
    """With few questions left a batch is no longer full, which costs most where answers end at different times."""
    asked = questions.load(write(tmp_path / "q.jsonl", *[row(i, "qa") for i in range(members)]))
    assert [len(b) for b in questions.blocks(asked, 1, 4)] == sizes


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"category": "qa", "turns": ["a"]}\n{"prompt": "x"}\n', "line 2: not Spec-Bench's format"),
        ('{"category": "qa", "turns": []}\n', "line 1: not Spec-Bench's format"),
        ('{"category": "qa", "turns": [["a"]]}\n', "line 1"),
        ("[1, 2]\n", "line 1"),
        ("question,answer\n", "line 1"),
        ("\n\n", "no questions in it"),
    ],
)
def test_another_format_is_named_with_its_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(questions.QuestionError, match=says) as error:
        questions.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_made_questions_are_the_same_every_time() -> None:
    long, agent = made_questions.long_documents(), made_questions.agent_turns()
    assert questions.digest(long + agent) == questions.digest(
        made_questions.long_documents() + made_questions.agent_turns()
    )
    assert len(long) == 32 and len(agent) == 64, "groups of their own at 32 requests at a time"
    assert {q.group for q in long} == {"long"} and {q.group for q in agent} == {"agent"}
    assert max(len(q.text) for q in long) > 60_000
    for question in agent:
        task = re.search(r"rename the function (\w+) to", question.text)
        assert task and question.text.count(task[1]) > 3, question.name
    assert len({q.name for q in long + agent}) == len(long + agent)


def test_what_cannot_be_asked_is_said_beforehand(tmp_path: Path) -> None:
    good = str(write(tmp_path / "good.jsonl", *[row(i, "qa") for i in range(70)]))
    assert made_questions.problems([good], [1, 64], 8, 2) == []
    assert made_questions.problems([good, "agent"], [1, 128], None, 0) == []
    (said,) = made_questions.problems([good], [1, 128], None, 0)
    assert said.startswith("128 requests at a time, but 70 questions")
    (said,) = made_questions.problems([good, str(tmp_path / "none.jsonl")], [512], None, 0)
    assert "none.jsonl: cannot be read" in said
