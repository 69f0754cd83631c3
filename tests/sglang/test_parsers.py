"""What a client gets of a stream does not depend on how many tokens came at once. SGLang's front end, without an
engine."""

from __future__ import annotations

import json
import logging
from array import array

import pytest

from freedraft.engines.hooks import table
from tests.sglang.parsers import LoneFrontEnd, Streams, differing
from tests.support.parser_texts import CALLS, SGLANG_TOOL_TEXTS, TOOLS

THOUGHTS = ("qwen3", "deepseek-v3", "gemma4", "kimi_k2", "mistral")
BOTH = [("qwen", "qwen3"), ("deepseekv31", "deepseek-v3"), *((name, name) for name in ("glm45", "mistral", "step3"))]


@pytest.fixture(scope="module")
def front(demo_model):
    return LoneFrontEnd(demo_model)


@pytest.mark.parametrize(
    ("tool", "thought"), [*((name, None) for name in SGLANG_TOOL_TEXTS), *((None, name) for name in THOUGHTS), *BOTH]
)
def test_runs_of_any_length_give_the_stream_of_single_tokens(tool, thought, front):
    """And SGLang alone gives others, or there would be nothing to mend."""
    streams = Streams(front, tool, thought)
    expected = streams.read(1, drafting=False)
    if tool:
        calls = [(call["name"], json.loads(call["arguments"])) for call in expected[2].values()]
        assert calls == list(CALLS) and {call["ids"] for call in expected[2].values()} == {1}
    assert differing(streams, expected, drafting=True) == [] != differing(streams, expected, drafting=False)
    if not tool:
        at_once = streams.read(1, drafting=False, stream_reasoning=False)
        assert differing(streams, at_once, drafting=True, stream_reasoning=False) == []


def test_marks_of_several_tokens(front):
    """As in a model whose tokenizer lacks the parser's marks."""
    streams = Streams(front, "qwen", "qwen3", marked=False)
    expected = streams.read(1, drafting=False)
    assert len(expected[2]) == 2 and expected[1]
    assert differing(streams, expected, drafting=True) == []


def test_calls_that_a_grammar_forces(front):
    """As a JSON array, which SGLang reads without a model's parser."""
    streams = Streams(front, "qwen", None)
    streams.case["tool"] = "pythonic"
    streams.set_text(json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS]))
    expected = streams.read(1, drafting=False, tool_choice="required")
    assert [(call["name"], json.loads(call["arguments"])) for call in expected[2].values()] == list(CALLS)
    assert differing(streams, expected, drafting=True, tool_choice="required") == []


@pytest.mark.parametrize("drafting", [True, False])
def test_parsers_of_other_servers_are_left_alone(front, drafting):
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser
    from sglang.srt.runtime_context import get_spec

    tools = [Tool(**tool) for tool in TOOLS]
    with get_spec().override(speculative_algorithm="SSSD" if drafting else "NGRAM"):
        made = (
            FunctionCallParser(tools, "qwen", tokenizer=front.tokenizer),
            ReasoningParser("qwen3", tokenizer=front.tokenizer),
        )
        without = FunctionCallParser(tools, "qwen")
    assert ["parse_stream_chunk" in vars(each) for each in (*made, without)] == [drafting, drafting, False]


def test_texts_of_tokens(front):
    from freedraft.engines.sglang.patches import token_texts

    text = 'One  two <tool_call>\n{"a": "日本 🙂"}\ufffd\n</tool_call> <|im_end|>'
    texts = token_texts(front.tokenizer, text)
    assert "".join(texts) == text and len(texts) > 12
    assert "<|im_end|>" in texts and any("🙂" in each for each in texts)
    assert token_texts(front.tokenizer, "") == [""]


def test_a_missing_hook_leaves_streams_as_they_are(monkeypatch, caplog):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from freedraft.engines.sglang import patches

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setattr(patches, "STREAM_HOOKS", table("""
        sglang.srt.parser.reasoning_parser.ReasoningParser.read_chunk
    """))  # fmt: skip
    with caplog.at_level(logging.WARNING):
        patches.register_stream_hooks()
    (line,) = caplog.messages
    assert "ReasoningParser.read_chunk is missing" in line and registered == []


THINK_END, EOS = 307, 302
OUTPUTS = [[311, 312, 313, THINK_END, 314, 315, 316, EOS], [311, 312, 313, 314, 315, 316, 317, EOS]]
OUTPUTS += [[311, EOS, 312, THINK_END, 313]]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("ended_by", ["end of text", "length", "stop string"])
def test_counts_of_reasoning_tokens(front, output, ended_by):
    """Those of the tokens that a client gets."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.sampling.sampling_params import SamplingParams

    stop = {"length": {"max_new_tokens": 4}, "stop string": {"stop": front.tokenizer.decode([312, 313])}}
    limits = {"max_new_tokens": 99, "stop_token_ids": [EOS]} | stop.get(ended_by, {})

    def counted(length):
        parameters = SamplingParams(**limits)
        parameters.normalize(front.tokenizer)
        request = Req("id", "", array("q", [305]), parameters, require_reasoning=True, vocab_size=49152)
        request.tokenizer = front.tokenizer
        for begin in range(0, len(output), length):
            run = output[begin : begin + length]
            request.output_ids.extend(run)
            request.update_reasoning_tokens(run, [THINK_END])
            request.update_finish_state(len(run))
            if request.finished():
                break
        return request.reasoning_tokens, request.finished_len, request.finished_reason.to_json()

    with get_spec().override(speculative_algorithm="SSSD"):
        expected = counted(1)
        assert expected[0] > 0
        assert [counted(length) for length in range(2, 9)] == [expected] * 7
    with get_spec().override(speculative_algorithm=None):
        assert counted(1) == expected
