"""What clients of SGLang's streaming endpoints get of a text in runs of tokens.

    python -m tests.sglang.parsers --json bench/results/parsers-sglang.json

writes for each parser and endpoint the lengths of runs whose stream differs from that of single tokens, in SGLang and
with freedraft. All but the scheduler and the model is SGLang's own.
"""

import argparse
import asyncio
import json
import os
import re
from pathlib import Path

from tests.support.models import DEMO_MODEL
from tests.support.parser_texts import SGLANG_THOUGHT_TEXTS, SGLANG_TOOL_TEXTS, TOOLS

ENDPOINTS = ("chat", "responses", "messages", "ollama")
LENGTHS = (2, 5, 16, 55)
MARKS = re.compile(r"<[|｜/]{0,2}[^<>\s{}\"=]*[|｜]?>|\[/?[A-Z_]+\]")
ASKED = [{"role": "user", "content": "How is the weather?"}]
# Parts of events that have a text in pieces, and those that differ from stream to stream.
TEXTS = {"content", "reasoning_content", "arguments", "delta", "text", "thinking", "partial_json"}
NAMES = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number"}


class FrontEnd:
    """The endpoints. run: runs a coroutine to its end."""

    def __init__(self, manager, templates, run):
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.ollama.serving import OllamaServing
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

        self.manager, self.run, self.tokenizer = manager, run, manager.tokenizer
        self.chat, self.responses = OpenAIServingChat(manager, templates), OpenAIServingResponses(manager, templates)
        self.messages, self.ollama = AnthropicServing(self.chat), OllamaServing(manager)

    def parse(self, tool, thought):
        """With these parsers, for a model that may think."""
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        for each in (self.chat, self.responses):
            each.tool_call_parser, each.reasoning_parser = tool, thought
            each._reasoning_detector = thought and ReasoningParser(thought, tokenizer=self.tokenizer).detector

    def events(self, endpoint, drafting, adapted=None, messages=ASKED, **keys):
        """Events of a stream, neighbours that differ in texts only as one. drafting: as in a server with a method of
        ours; adapted: makes of a chat request what the engine gets."""
        from sglang.srt.entrypoints.openai.protocol import (
            ChatCompletionRequest,
            RequestResponseMetadata,
            ResponsesRequest,
        )
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.runtime_context import get_spec

        parsed = self.chat.tool_call_parser is not None
        thinks = parsed or self.chat.reasoning_parser == "k2_horizon"
        keys = {"chat_template_kwargs": dict.fromkeys(("thinking", "enable_thinking"), thinks)} | keys
        asked = {"model": "any", "stream": True}
        chat = ChatCompletionRequest(messages=messages, tools=TOOLS if parsed else None, **asked, **keys)
        engine = {"input_ids": [1], "sampling_params": {"skip_special_tokens": False}, "stream": True}
        internal = adapted(chat) if adapted else GenerateReqInput(**engine)

        async def lines():
            if endpoint == "chat":
                stream = self.chat._generate_chat_stream(internal, chat, None)
            elif endpoint == "messages":
                stream = self.messages._generate_anthropic_stream(internal, chat, chat, None)
            elif endpoint == "ollama":
                stream = (await self.ollama._stream_chat_response(internal, None, "any")).body_iterator
            else:
                tools = [{"type": "function", **tool.function.model_dump()} for tool in chat.tools or ()]
                request = ResponsesRequest(input="Hi", tools=tools, tool_choice=chat.tool_choice, **asked)
                result, ids = self.manager.generate_request(internal, None), RequestResponseMetadata(request_id="id")
                stream = self.responses.responses_stream_generator_non_harmony(
                    request, {}, result, "any", self.tokenizer, ids, require_reasoning=thinks
                )
            return [line async for line in stream]

        with get_spec().override(speculative_algorithm="SSSD" if drafting else "NGRAM"):
            return joined(self.run(asyncio.wait_for(lines(), 60)))


class LoneFrontEnd(FrontEnd):
    """Without SGLang's other processes: every request is answered with `ids`, of which a step brings `length`."""

    def __init__(self, model):
        from sglang.srt.managers.detokenizer_manager import DetokenizerManager
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
        from sglang.srt.managers.tokenizer_manager import TokenizerManager
        from sglang.srt.parser.template_manager import TemplateManager
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        load_plugins()
        on_cpu = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
        args = ServerArgs(model_path=str(model), speculative_algorithm="sssd", disable_cuda_graph=True, **on_cpu)
        args.resolve_once()
        publish(args, role="tokenizer")
        ports, run = PortArgs.init_new(args), asyncio.Runner().run

        async def manager():
            return TokenizerManager(args, ports)

        super().__init__(run(manager()), TemplateManager(), run)
        self.detokenizer = DetokenizerManager(args, ports)
        self.detokenizer.tokenizer, self.detokenizer.vocab_size = self.tokenizer, None  # marks are added
        self.streamer = SchedulerOutputStreamer(
            send_to_detokenizer=self, tree_cache=None, server_args=args, is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.NGRAM, disaggregation_mode=None, enable_hicache_storage=bool,
        )  # fmt: skip
        self.manager.event_loop, self.manager._dispatch_to_scheduler = "none", self.take
        self.ids, self.length, self.thought_end, self.aborted, self.answers = [], 1, [], [], set()

    def take(self, sent):
        """As the scheduler does."""
        from sglang.srt.managers.io_struct import AbortReq

        if isinstance(sent, AbortReq):
            self.aborted.append(sent.rid)
        else:
            self.answers.add(asyncio.get_running_loop().create_task(self.answer(sent)))

    def send_output(self, output):
        self.output = self.detokenizer.handle_batch_token_id_out(output)

    async def answer(self, sent):
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.runtime_context import get_parallel

        parameters, reads = sent.sampling_params, sent.return_logprob
        if parameters.max_new_tokens is None:
            parameters.max_new_tokens = 999
        request = Req(
            sent.rid, sent.input_text, sent.input_ids, parameters, reads, sent.top_logprobs_num, stream=sent.stream,
            require_reasoning=sent.require_reasoning, eos_token_ids={self.tokenizer.eos_token_id}, vocab_size=99999,
        )  # fmt: skip
        request.tokenizer = self.tokenizer
        for begin in range(0, len(self.ids), self.length):
            run = self.ids[begin : begin + self.length]
            request.output_ids.extend(run)
            if reads:
                request.logprob.output_token_logprobs_val += [-token / 99 for token in run]
                request.logprob.output_token_logprobs_idx += run
            if sent.require_reasoning:
                request.update_reasoning_tokens(run, self.thought_end)
            request.update_finish_state(len(run))
            self.output = None
            with get_parallel().override(dp_rank=None, attn_tp_rank=0):
                self.streamer.stream_output([request], reads)
            if self.output is not None:
                await self.manager._handle_batch_output(self.output)
            for _ in range(20):  # until the client has it
                await asyncio.sleep(0)
            if request.finished():
                return


def joined(lines):
    """Each line's JSON without texts and names, and its texts by their places."""
    found = []
    for line in lines:
        data, texts = (line if isinstance(line, str) else line.decode()).split("data: ")[-1].strip(), {}
        if data == "[DONE]":
            continue
        shape = _shape(json.loads(data), "", "", texts)
        if found and found[-1][0] == shape and found[-1][1].keys() == texts.keys():
            found[-1] = shape, {place: found[-1][1][place] + more for place, more in texts.items()}
        else:
            found.append((shape, texts))
    return found


def _shape(value, key, place, texts):
    if isinstance(value, list):
        return [_shape(one, key, f"{place}.{at}", texts) for at, one in enumerate(value)]
    if isinstance(value, dict):
        return {name: _shape(one, name, f"{place}.{name}", texts) for name, one in value.items() if one is not None}
    if key in TEXTS and isinstance(value, str):
        texts[place] = value
    return "" if key in TEXTS | NAMES else value


def text_of(events, key):
    """All the text that a chat stream has at this key."""
    return "".join(text for _, texts in events for place, text in texts.items() if place.endswith(f".{key}"))


def calls_of(events):
    """Names and arguments of the tools that a chat stream calls."""
    calls = {}
    for shape, texts in events:
        for at, call in enumerate(shape["choices"][0]["delta"].get("tool_calls", ()) if shape["choices"] else ()):
            name, arguments = calls.get(call["index"], ("", ""))
            arguments += texts.get(f".choices.0.delta.tool_calls.{at}.function.arguments", "")
            calls[call["index"]] = name + call["function"].get("name", ""), arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


class Streams:
    """Those of a case. marked: the tokenizer has the model's marks as tokens."""

    def __init__(self, front, tool, thought, marked=True):
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        self.front, text, marks = front, SGLANG_TOOL_TEXTS.get(tool, ""), set()
        if thought:
            made = ReasoningParser(thought, tokenizer=front.tokenizer).detector
            start, end = f"{made.think_start_token}{made.think_start_self_label}", made.think_end_token
            marks = {made.think_start_token, end} - {"", None}
            thoughts = f"First, {start}look\nit up.{end}\n\nDone. {start}Again, 1 < 2.{end} End."
            text = f"{start}Look it up.{end}{text}" if tool else SGLANG_THOUGHT_TEXTS.get(thought, thoughts)
        if marked:
            front.tokenizer.add_tokens(sorted(marks | {*MARKS.findall(text)}))
        self.set_text(text)
        front.parse(tool, thought)

    def set_text(self, text):
        self.ids = [*self.front.tokenizer.encode(text, add_special_tokens=False), self.front.tokenizer.eos_token_id]

    def read(self, endpoint, length, drafting, **keys):
        self.front.ids, self.front.length = self.ids, length
        return self.front.events(endpoint, drafting, **keys)

    def differing(self, endpoint, drafting, **keys):
        """Lengths of runs whose stream is not that of single tokens without us."""
        expected = self.read(endpoint, 1, False, **keys)
        return [length for length in LENGTHS if self.read(endpoint, length, drafting, **keys) != expected]


def main():
    os.environ.setdefault("SGLANG_PLATFORM", "freedraft_cpu")  # read at SGLang's first import
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.beam import BEAM_RESPONSE_TEMPLATE
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    from bench.lib.results import write_json

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    path = arguments.parse_args().json
    front, rows = LoneFrontEnd(DEMO_MODEL), []
    front.tokenizer.response_template = BEAM_RESPONSE_TEMPLATE  # as a model's tokenizer_config.json has it
    tools, thoughts = FunctionCallParser.ToolCallParserEnum, ReasoningParser.DetectorMap
    both = [("qwen", "qwen3"), ("deepseekv31", "deepseek-v3"), *((name, name) for name in tools if name in thoughts)]
    for tool, thought in [*((name, None) for name in tools), *((None, name) for name in thoughts), *both]:
        streams = Streams(front, tool, thought)
        for endpoint in ENDPOINTS if tool else ENDPOINTS[:3]:
            row = {"tool": tool, "reasoning": thought, "endpoint": endpoint, "tokens": len(streams.ids)}
            row |= {"before": streams.differing(endpoint, False), "after": streams.differing(endpoint, True)}
            print(row, flush=True)
            rows.append(row)
    write_json(path, {"engine": "sglang", "lengths": LENGTHS, "rows": rows})


if __name__ == "__main__":
    main()
