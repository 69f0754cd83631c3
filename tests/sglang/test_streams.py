"""What a client gets of a stream does not depend on how many tokens came at once. SGLang's front end, without an
engine."""

import asyncio
import copy
import json
import logging

import pytest

from freedraft.engines.hooks import table
from tests.sglang.parsers import ENDPOINTS, LoneFrontEnd, Streams, calls_of, text_of
from tests.support.parser_texts import CALLS

TOOLS = ("deepseekv31", "glm45", "gpt-oss", "hermes", "lfm2", "llama3", "minicpm5", "mistral", "qwen", "step3")
THOUGHTS = ("qwen3", "deepseek-v3", "gemma4", "kimi_k2", "mistral")
BOTH = [("qwen", "qwen3"), ("deepseekv31", "deepseek-v3"), *((name, name) for name in ("glm45", "mistral", "step3"))]
TEXT = "One two, three four: Zürich <tool_call> at the end of a line\n\n that nobody reads."


@pytest.fixture(scope="module")
def front(demo_model):
    return LoneFrontEnd(demo_model)


@pytest.mark.parametrize(
    ("tool", "thought"), [*((name, None) for name in TOOLS), *((None, name) for name in THOUGHTS), *BOTH]
)
def test_runs_of_any_length_give_the_stream_of_single_tokens(tool, thought, front):
    """And SGLang alone gives others, or there would be nothing to mend."""
    streams, changed = Streams(front, tool, thought), []
    for endpoint in ENDPOINTS:
        assert streams.differing(endpoint, drafting=True) == [], endpoint
        changed += streams.differing(endpoint, drafting=False)
    assert changed
    if tool:
        events = streams.read("chat", 5, drafting=True)
        assert calls_of(events) == list(CALLS) and events[-1][0]["choices"][0]["finish_reason"] == "tool_calls"
    else:
        assert streams.differing("chat", drafting=True, stream_reasoning=False) == []


def test_marks_of_several_tokens(front):
    """As in a model whose tokenizer lacks the parser's marks."""
    streams = Streams(front, "qwen", "qwen3", marked=False)
    events = streams.read("chat", 5, drafting=True)
    assert len(calls_of(events)) == 2 and text_of(events, "reasoning_content")
    assert streams.differing("chat", drafting=True) == []


def test_calls_that_a_grammar_forces(front):
    """As a JSON array, which SGLang reads without a model's parser."""
    streams = Streams(front, "pythonic", None)
    streams.set_text(json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS]))
    assert calls_of(streams.read("chat", 5, drafting=True, tool_choice="required")) == list(CALLS)
    assert streams.differing("chat", drafting=True, tool_choice="required") == []


async def outputs_of(front, asked, left_after):
    from sglang.srt.managers.io_struct import GenerateReqInput

    request, found = GenerateReqInput(**{"input_ids": [1], "stream": True} | copy.deepcopy(asked)), {}
    stream = front.manager.generate_request(request, None)
    async for output in stream:
        # But what SGLang adds to the last one.
        added = ("latency", "_ts", "id", "_versions")
        meta = {key: of for key, of in output["meta_info"].items() if not key.endswith(added)}
        found.setdefault(output.get("index", 0), []).append(copy.deepcopy(output | {"meta_info": meta}))
        if (left_after := left_after - 1) == 0:
            await stream.aclose()
    return found


@pytest.fixture(params=[False, True], ids=["all so far", "incremental"])
def outputs(request, front, monkeypatch):
    """What endpoints read, by choice: `(length, drafting, asked, left_after)`; left_after: outputs after which the
    client leaves."""
    from sglang.srt.runtime_context import get_spec

    monkeypatch.setattr(front.manager, "incremental_streaming_output", request.param)
    front.tokenizer.add_tokens(["<tool_call>"])
    front.ids = [*front.tokenizer.encode(TEXT), front.tokenizer.eos_token_id]
    front.thought_end = front.tokenizer.encode("<tool_call>")

    def made(length, drafting, asked, left_after=99):
        front.length = length
        with get_spec().override(speculative_algorithm="SSSD" if drafting else None):
            return front.run(asyncio.wait_for(outputs_of(front, asked, left_after), 60))

    return made


@pytest.mark.parametrize(
    "asked",
    [
        {"require_reasoning": True},
        {"return_logprob": True},
        {"sampling_params": {"n": 2}},
        {"sampling_params": {"max_new_tokens": 9}, "return_logprob": True, "return_text_in_logprobs": True},
        {"sampling_params": {"stop": "at the"}},
        {"sampling_params": {"stop": "line", "no_stop_trim": True, "n": 2}, "return_logprob": True},
        {"sampling_params": {"max_new_tokens": 9}, "require_reasoning": True, "stream": False},
        {"sampling_params": {"stop": "four"}, "require_reasoning": True, "stream": False},
        {"require_reasoning": True, "stream": False},
    ],
    ids=str,
)
def test_outputs_are_those_of_single_tokens(outputs, asked):
    """Texts, ids, logprobs, counts, of reasoning too, and reasons to end, output by output."""
    expected = outputs(1, False, asked)
    assert len(expected) == asked.get("sampling_params", {}).get("n", 1)
    assert len(expected[0]) > 5 or "stream" in asked
    assert ("require_reasoning" in asked) == (expected[0][-1]["meta_info"]["reasoning_tokens"] > 0)
    for length in (2, 3, 5, 8, 99):
        assert outputs(length, True, asked) == expected, length


def test_a_server_that_streams_several_tokens_does_so(outputs, front):
    from sglang.srt.runtime_context import get_serving

    with get_serving().override(stream_interval=4):
        (found,) = outputs(99, True, {}).values()
    counts = [output["meta_info"]["completion_tokens"] for output in found]
    assert counts == [*range(4, counts[-1], 4), counts[-1]] and counts[-1] == len(front.ids)


def test_a_client_that_leaves_ends_the_request(outputs, front):
    """In the middle of a run, too."""
    before = len(front.aborted)
    (found,) = outputs(99, True, {}, 3).values()
    assert len(found) == 3 and len(front.aborted) == before
    (found,) = outputs(5, True, {}, 3).values()
    assert len(found) == 3 and len(front.aborted) == before + 1


def test_characters_of_several_tokens(front):
    """They do not come late where a run begins within one: Ollama's endpoint leaves the last output's text out."""
    ids = front.tokenizer.encode("One 日本🙂 two a🙂</b🙂>🙂")
    for count in range(5, len(ids) + 1):
        if not front.tokenizer.decode(ids[:count]).endswith("\ufffd"):
            front.ids, front.length = [*ids[:count], front.tokenizer.eos_token_id], 1
            expected = front.events("ollama", False)
            for front.length in (2, 3, 5, 99):
                assert front.events("ollama", True) == expected, (count, front.length)


def test_a_missing_hook_leaves_streams_as_they_are(monkeypatch, caplog):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from freedraft.engines.sglang import streams

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setattr(streams, "STREAM_HOOKS", table("sglang.srt.managers.tokenizer_manager.Manager"))
    with caplog.at_level(logging.WARNING):
        streams.register_stream_hooks()
    (line,) = caplog.messages
    assert "Manager is missing" in line and registered == []
