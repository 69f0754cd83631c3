"""What a client of SGLang's chat endpoint gets of a text in runs of tokens.

SGLang's own front end, tokenizer manager and parsers; what the scheduler and the detokenizer send is the text's tokens.
"""

from __future__ import annotations

import asyncio
import json
import re

from tests.support.parser_texts import SGLANG_TOOL_TEXTS, TOOLS

LENGTHS = (2, 3, 5, 8, 13, 21, 34, 55)
MARKS = re.compile(r"<[|｜/]{0,2}[^<>\s{}\"=]*[|｜]?>|\[/?[A-Z_]+\]")


class FrontEnd:
    """The chat endpoint of a drafting server. run: runs a coroutine to its end."""

    def __init__(self, manager, templates, run):
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

        self.manager, self.chat, self.run = manager, OpenAIServingChat(manager, templates), run
        self.tokenizer = manager.tokenizer

    def read(self, drafting, adapted=None, tools=TOOLS, **keys):
        """Content, thoughts, calls and finish reason of a stream. drafting: as in a server with a method of ours;
        adapted: makes of the request what the engine gets."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
        from sglang.srt.runtime_context import get_spec

        messages = keys.pop("messages", [{"role": "user", "content": "How is the weather?"}])
        request = ChatCompletionRequest(model="any", messages=messages, tools=tools, stream=True, **keys)

        async def chunks():
            internal = adapted and adapted(request)
            return [chunk async for chunk in self.chat._generate_chat_stream(internal, request, None)]

        with get_spec().override(speculative_algorithm="SSSD" if drafting else None):
            return client_view(self.run(chunks()))


class LoneFrontEnd(FrontEnd):
    """Without SGLang's other processes."""

    def __init__(self, model):
        from sglang.srt.managers.tokenizer_manager import TokenizerManager
        from sglang.srt.parser.template_manager import TemplateManager
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        on_cpu = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
        args = ServerArgs(model_path=str(model), speculative_algorithm="sssd", disable_cuda_graph=True, **on_cpu)
        args.resolve_once()
        publish(args, role="tokenizer")
        run = asyncio.Runner().run

        async def manager():
            return TokenizerManager(args, PortArgs.init_new(args))

        super().__init__(run(manager()), TemplateManager(), run)

    def stream(self, contents, drafting, tool=None, thought=None, **keys):
        """What is streamed with these parsers, of what the engine gives."""
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        async def generate_request(_adapted, _raw):
            for content in contents:
                yield content

        self.manager.generate_request = generate_request
        self.chat.tool_call_parser, self.chat.reasoning_parser = tool, thought
        self.chat._reasoning_detector = thought and ReasoningParser(thought, tokenizer=self.tokenizer).detector
        thinks = dict.fromkeys(("thinking", "enable_thinking"), tool is not None)
        return self.read(drafting, tools=TOOLS if tool else None, chat_template_kwargs=thinks, **keys)


def client_view(chunks):
    """Content, thoughts, the name and arguments of each call, and the finish reason, of a stream's lines."""
    content = thoughts = ""
    calls, reason = {}, None
    for chunk in chunks:
        data = chunk.removeprefix("data: ").strip()
        for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            content, thoughts = content + (delta.get("content") or ""), thoughts + (delta["reasoning_content"] or "")
            for call in delta.get("tool_calls") or ():
                one = calls.setdefault(call["index"], {"name": "", "arguments": "", "ids": 0})
                one["ids"] += call["id"] is not None
                for key, value in call["function"].items():
                    one[key] += value or ""
    return content, thoughts, calls, reason


class Streams:
    """The text of a case in runs. marked: the tokenizer has the model's marks as tokens."""

    def __init__(self, front, tool, thought, marked=True):
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        self.front, self.case = front, {"tool": tool, "thought": thought}
        text, marks = SGLANG_TOOL_TEXTS.get(tool, ""), set()
        if thought:
            made = ReasoningParser(thought, tokenizer=front.tokenizer).detector
            start, end = made.think_start_token + made.think_start_self_label, made.think_end_token
            marks = {made.think_start_token, end}
            thoughts = f"First, {start}look\nit up.{end}\n\nDone. {start}Again, 1 < 2.{end} End."
            text = f"{start}Look it up.{end}{text}" if tool else thoughts
        if marked:
            front.tokenizer.add_tokens(sorted(marks | {*MARKS.findall(text)}))
        self.set_text(text)

    def set_text(self, text):
        """The text and its tokens; their texts are what SGLang's detokenizer sends of one after another."""
        self.ids = self.front.tokenizer.encode(text, add_special_tokens=False)
        decoded = [self.front.tokenizer.decode(self.ids[: n + 1]) for n in range(len(self.ids))]
        assert decoded[-1] == text
        self.texts = [""]
        for each in decoded:
            self.texts.append(self.texts[-1] if each.endswith("\N{REPLACEMENT CHARACTER}") else each)

    def read(self, length, drafting, **keys):
        contents, count = [], len(self.ids)
        for end in [*range(length, count, length), count]:
            meta = {"id": "id", "prompt_tokens": 1, "completion_tokens": end, "reasoning_tokens": 0, "cached_tokens": 0}
            meta["finish_reason"] = {"type": "stop", "matched": None} if end == count else None
            contents.append({"text": self.texts[end], "output_ids": self.ids[:end], "meta_info": meta})
        return self.front.stream(contents, drafting, **self.case, **keys)


def differing(streams, expected, drafting, **keys):
    """Lengths of runs whose stream differs."""
    return [length for length in LENGTHS if streams.read(length, drafting, **keys) != expected]
