"""Question files: what is read, and how it is cut into blocks."""

import json
from pathlib import Path

import pytest

from bench.lib import jsonl, questions


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def row(number: int, category: str) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": [f"question {number}", "and then?"]}


@pytest.mark.parametrize("concurrency", [1, 13, 128])
def test_every_block_keeps_so_many_requests_running_on_all_groups(tmp_path: Path, concurrency: int) -> None:
    """Each question once, in the same order for everybody, the groups mixed as evenly as they can be."""
    sizes = {"qa": 80, "rag": 80, "translation": 80, "long": 32}
    rows = [row(100 * g + i, group) for g, (group, size) in enumerate(sizes.items()) for i in range(size)]
    found = questions.load(write(tmp_path / "q.jsonl", *rows))
    blocks = questions.blocks(found, concurrency, 8)
    assert blocks == questions.blocks(found, concurrency, 8)
    assert sorted(q.name for block in blocks for q in block) == sorted(q.name for q in found)
    assert all(len(block) >= 2 * concurrency for block in blocks)
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    order = [q for block in blocks for q in block]
    for group, members in questions.groups(found).items():
        assert [q for q in order if q.group == group] == members
        in_first_half = sum(q.group == group for q in order[: len(order) // 2])
        assert in_first_half == pytest.approx(len(members) / 2, abs=2)
    assert len({q.group for q in order[:8]}) >= 3


def test_turns_of_sessions_have_all_before_them(tmp_path: Path) -> None:
    path, said = tmp_path / "shop.jsonl", [("system", "rules"), ("user", "x" * 18_001), ("user", "hello")]
    said += [("assistant", "look"), ("tool", "found"), ("assistant", "done")]
    said += [("user", "y" * 16_995), ("assistant", "z")]
    messages = [{"role": role, "content": content} for role, content in said]
    write(path, {"session": "s", "messages": messages})
    first, second = questions.read(f"sessions:{path}")
    assert (first.name, first.group, second.name) == ("shop:s:2", "shop", "shop:s:4")
    assert [(m["role"], m["content"]) for m in first.chat] == [("system", "rules"), ("user", "hello")]
    assert second.chat == [*first.chat, {"role": "assistant", "content": "look"}, {"role": "user", "content": "found"}]
    for row, kind, says in (({}, jsonl.FileError, "messages"), ({"messages": []}, questions.QuestionError, "no turn")):
        write(path, {"session": "s"} | row)
        with pytest.raises(kind, match=says):
            questions.read(f"sessions:{path}")
