"""Streams through vLLM's parsers of reasoning and tool calls, without an engine, in runs of tokens as a drafting engine
emits them.

    python -m tests.vllm.vllm_parsers --json bench/results/parsers-vllm.json

writes for each parser the lengths of runs whose stream differs from that of single tokens, in vLLM and with freedraft.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

from tests.support.models import DEMO_MODEL
from tests.support.parser_texts import HUNYUAN, MARKS, TEMPLATE, THINKING, TOOLS, VLLM_TOOL_TEXTS, vllm_thought_text

LENGTHS = range(1, 65)


@cache
def tokenizer_of(special):
    """The demo model's, and each mark a token. special: marks are left out of texts unless a parser asks for them."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer
    from vllm.tokenizers.hf import get_cached_tokenizer

    made = AutoTokenizer.from_pretrained(DEMO_MODEL)
    made.add_tokens(
        [AddedToken(mark, special=special, normalized=False) for mark in MARKS.split()], special_tokens=special
    )
    made.response_template = TEMPLATE
    return get_cached_tokenizer(made)


def cases():
    """(tool parser or None, reasoning parser or None, whether marks are special) of all that vLLM has registered."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools, thoughts = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    # Harmony's parser, which reads token by token, replaces these two; its vocabulary has to be downloaded.
    tools, thoughts = set(tools) - {"openai"}, set(thoughts) - {"openai_gptoss"}
    both = [(name, name, False) for name in tools if name in thoughts]
    alone = [(name, None, False) for name in tools] + [(None, name, False) for name in thoughts]
    return sorted(alone + both + [(None, name, True) for name in thoughts], key=str)


def ids_of(tool, thought, tokenizer):
    def encoded(text):
        return tokenizer.encode(text, add_special_tokens=False)

    if thought == "hunyuan_a13b":
        begin, between, end = HUNYUAN
        first, second, third = (encoded(text) for text in ("Look\nit up.", "Done.", " Again, look."))
        ids = begin + first + between + second + end + third + begin + second + between + third
        return ids + (encoded(VLLM_TOOL_TEXTS[tool]) if tool else [])
    return encoded((vllm_thought_text(thought) if thought else "") + (VLLM_TOOL_TEXTS[tool] if tool else ""))


class Streams:
    """The streams of one case. get_parser: vLLM's, hooked or not; ids: token ids of another text."""

    def __init__(self, tool, thought, special, get_parser, ids=None):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self.tokenizer = tokenizer_of(special)
        self.ids = ids or ids_of(tool, thought, self.tokenizer)
        self.parser = get_parser(tool, thought, enable_auto_tools=tool is not None)
        self.asked = {"messages": [{"role": "user", "content": "Hi"}], "model": "", "stream": True}
        self.asked |= {"tools": TOOLS} if tool else {}
        self.request_of = ChatCompletionRequest
        self.prompt = self.tokenizer.apply_chat_template(self.asked["messages"], add_generation_prompt=True)[
            "input_ids"
        ]

    def read(self, length, plain_text=False):
        """What a client gets of runs of this length: text, thoughts, and each call. plain_text: as vLLM's detokenizer
        gives it."""
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = self.request_of(**self.asked)
        parser = self.parser(self.tokenizer, request.tools, chat_template_kwargs=THINKING)
        request = parser.adjust_request(request)
        parameters = request.to_sampling_params(len(self.ids), {})
        made = EngineCoreRequest("id", self.prompt, None, parameters, None, 0.0, None, None, None)
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, made)
        content, thoughts, calls = "", "", {}
        for begin in range(0, len(self.ids), length):
            run, last = self.ids[begin : begin + length], begin + length >= len(self.ids)
            detokenizer.update(run, last and run[-1] == self.tokenizer.eos_token_id)
            text = detokenizer.get_next_output_text(last, True)
            text = str(text) if plain_text else text
            message = parser.parse_delta(text, run, request, self.prompt, finished=last)
            if message is None:
                continue
            content, thoughts = content + (message.content or ""), thoughts + (message.reasoning or "")
            for call in message.model_dump(exclude_unset=True).get("tool_calls", ()):
                one = calls.setdefault(call["index"], {"name": "", "arguments": "", "ids": 0})
                one["ids"] += call.get("id") is not None
                for key, value in (call.get("function") or {}).items():
                    one[key] += value or ""
        return content, thoughts, calls


def differing(streams, expected, lengths=LENGTHS, plain_text=False):
    """Those of the lengths of runs whose stream differs, or ends in an error."""

    def differs(length):
        try:
            return streams.read(length, plain_text) != expected
        except Exception:
            return True

    shortest = len(streams.ids)  # of runs that hold the whole text
    wrong = {length for length in {min(length, shortest) for length in lengths} if differs(length)}
    return [length for length in lengths if min(length, shortest) in wrong]


def main():
    from vllm.parser.parser_manager import ParserManager

    from bench.lib.results import write_json
    from freedraft.engines.vllm.streams import parse_by_token

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    path = arguments.parse_args().json
    plain = ParserManager.get_parser
    parse_by_token()
    rows = []
    for tool, thought, special in cases():
        row = {"tool": tool, "reasoning": thought, "special": special}
        try:
            before = Streams(tool, thought, special, plain)
        except ImportError as error:  # of a parser's own package
            print(f"{tool or thought} is left out: {error}")
            continue
        expected = before.read(1, plain_text=True)
        after = Streams(tool, thought, special, ParserManager.get_parser)
        row |= {"tokens": len(before.ids), "calls": len(expected[2])}
        rows.append(row | {"before": differing(before, expected, plain_text=True), "after": differing(after, expected)})
        print(rows[-1])
    write_json(path, {"engine": "vllm", "lengths": len(LENGTHS), "rows": rows})


if __name__ == "__main__":
    main()
