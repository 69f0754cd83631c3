"""An answer that a client predicts: drafted from for its request alone, never learnt; and how much of it was right."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from freedraft.engines.predictions import MOST, Prediction, kept, text_of
from freedraft.step import EngineContext
from sssd_plugin.method import MOST_PREDICTED, SssdMethod, predicted_in
from sssd_plugin.options import SssdOptions
from tests.support.steps import make_step

VOCAB, NODES = 1000, 9
RANDOM = np.random.default_rng(0)
PROMPT, ANSWER = (RANDOM.integers(0, VOCAB, size).tolist() for size in (50, 200))
EDITED = [*ANSWER[:60], 7, 8, 9, *ANSWER[70:150], *ANSWER[160:]]  # what a client has before both changes


@pytest.fixture
def method():
    context = EngineContext(vocab_size=VOCAB, max_draft_tokens=NODES - 1, widths=(1, NODES))
    made = SssdMethod(SssdOptions(policy="fixed", live="store", isolation="shared"), context)
    yield made
    made.close()


def steps(method: SssdMethod, name: str, sent: Any = None, *, preempted: int = 0, finishes: bool = True) -> int:
    """Of ANSWER, of which each step gains what was drafted of it and one more token."""
    extra = {} if sent is None else {"prediction": sent}
    method.begin(name, np.array(PROMPT, np.int32), None, extra)
    done, count, new = 1, 1, ANSWER[:1]
    while done < len(ANSWER):
        draft = method.draft(
            make_step([name], [new], capacities=NODES - 1, trees=False, texts=[PROMPT + ANSWER[:done]])
        )
        drafted = draft.tokens[0, 1 : draft.counts[0]].tolist()
        right = next(
            (i for i, pair in enumerate(zip(drafted, ANSWER[done:], strict=False)) if pair[0] != pair[1]), None
        )
        right = min(len(drafted), len(ANSWER) - done) if right is None else right
        new = ANSWER[done : done + right + 1]
        done, count = done + len(new), count + 1
        if count == preempted:
            method.begin(name, np.array(PROMPT + ANSWER[: done - len(new)], np.int32), None, extra)
        assert method.drafter.tokens(name)[: len(PROMPT)].tolist() == PROMPT
    if finishes:
        method.finish(name, np.array(ANSWER, np.int32))
    return count


def test_a_request_is_drafted_from_its_prediction(method):
    """Also behind changes, and after a preemption."""
    method.learns = method.live = None
    assert steps(method, "alone") == len(ANSWER)
    least = -(-len(ANSWER) // NODES)
    assert steps(method, "right", ANSWER) <= least + 3
    assert steps(method, "edited", EDITED) <= least + 30
    assert steps(method, "preempted", EDITED, preempted=5) <= least + 33
    assert steps(method, "wrong", ANSWER[::-1]) == len(ANSWER)


def test_another_request_gets_nothing_of_it_and_nothing_is_learnt(method):
    others = RANDOM.integers(0, VOCAB, 300).tolist()
    method.begin("one", np.array(PROMPT, np.int32), None, {"prediction": ANSWER})
    assert steps(method, "two", finishes=False) == len(ANSWER), "while the first one runs"
    method.finish("two", np.zeros(0, np.int32))
    method.finish("one", np.array(others, np.int32))
    assert steps(method, "three", finishes=False) == len(ANSWER), "and when it has ended"
    method.finish("three", np.zeros(0, np.int32))
    assert not method.drafter._inserted and len(method.drafter) == 0


@pytest.mark.parametrize(
    "sent", [None, 1, "text", {}, [["a"]], [[1], [2]], [None], [10**30], ["x"], [float("nan")]], ids=repr
)
def test_what_is_no_list_of_tokens_is_ignored(sent):
    assert predicted_in({"prediction": sent}).size == 0 == predicted_in({}).size


def test_tokens_beyond_the_vocabulary_are_never_drafted_and_long_ones_are_cut(method):
    assert len(predicted_in({"prediction": [5] * (MOST_PREDICTED + 9)})) == MOST_PREDICTED
    assert steps(method, "strange", [-5, 2**31 - 1, VOCAB, *ANSWER]) < 40


def test_how_many_tokens_of_a_prediction_an_answer_has():
    assert kept(ANSWER, [ANSWER]) == 200 and kept(ANSWER, [[]]) == kept([], [ANSWER]) == kept(ANSWER, [[1, 2]]) == 0
    assert kept(EDITED, [ANSWER]) == 60 + 80 + 40 == kept(ANSWER, [EDITED]) and kept(ANSWER, 2 * [ANSWER]) == 400
    assert kept([5] * 50_000, [[5] * 10_000 + [6] * 10_000]) == 10_000


def test_a_stream_is_what_it_was_but_for_its_usage():
    """Several events in one piece, comments, errors, texts that look like the end of a line."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "\u2028 \n"}}], "usage": {"completion_tokens": 1}}
    last, error = {"choices": [], "usage": {"completion_tokens": 2}}, {"error": {"message": "no"}}
    lines = [f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in (chunk, error, chunk, last)]
    given = [": ping\n\n", lines[0], lines[1] + lines[2], lines[3], "data: [DONE]\n\n"]
    asked = []

    async def events():
        for some in given:
            yield some

    class Tokenizer:
        def encode(self, text, add_special_tokens):
            asked.append(text)
            return [1, 2] if asked[1:] else [1, 2, 3]

    async def read():
        prediction = await Prediction.read({"type": "content", "content": "abc"}, Tokenizer())
        return [some async for some in prediction.of_stream(events())]

    *found, usage, done = asyncio.run(read())
    assert found == given[:3] and done == given[-1] and asked == ["abc", "\u2028 \n" * 2]
    counts = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}
    whole = {"choices": [], "usage": {"completion_tokens": 2, "completion_tokens_details": counts}}
    assert usage.endswith("\n\n") and json.loads(usage.removeprefix("data: ")) == whole


def test_its_text():
    part = {"type": "text", "text": "b"}
    assert text_of({"type": "content", "content": "ab"}) == "ab"
    assert (
        text_of({"type": "content", "content": [part, part]}) == "bb"
        and text_of({"type": "content", "content": []}) == ""
    )
    with pytest.raises(ValueError, match=f"at most {MOST:,} characters, not"):
        text_of({"type": "content", "content": [{"type": "text", "text": "x" * MOST}, part]})
    for wrong in (None, [], "x", {"type": "content", "content": [part, {"type": "image_url"}]}):
        with pytest.raises(ValueError, match="'prediction' must be"):
            text_of(wrong)
