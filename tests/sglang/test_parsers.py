"""What a client gets of a stream does not depend on how many tokens came at once. SGLang's front end, without an
engine."""

from __future__ import annotations

import json

import pytest

from tests.sglang.conftest import HAVE_SGLANG
from tests.sglang.parser_texts import CALLS
from tests.sglang.parsers import LENGTHS, LoneFrontEnd, Streams, cases, client_view, differing

# In SGLang itself, token by token: the first call of several only, and a format of one call.
ONE_CALL = {"interns1", "gigachat3"}
FEW_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55)


@pytest.fixture(scope="module")
def front(demo_model):
    return LoneFrontEnd(demo_model)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases() if HAVE_SGLANG else [], ids=lambda case: "-".join(filter(None, case)))


def test_runs_of_any_length_give_the_stream_of_single_tokens(case, front):
    tool, thought = case
    streams = Streams(front, tool, thought)
    expected = streams.read(1, drafting=False)
    if tool:
        calls = [(call["name"], json.loads(call["arguments"])) for call in expected[2].values()]
        assert calls == list(CALLS[:1] if tool in ONE_CALL else CALLS)
        assert {call["ids"] for call in expected[2].values()} == {1}
    assert differing(streams, expected, True, FEW_LENGTHS if tool and thought else LENGTHS) == []
    if not tool:
        at_once = streams.read(1, drafting=False, stream_reasoning=False)
        assert differing(streams, at_once, True, FEW_LENGTHS, stream_reasoning=False) == []
