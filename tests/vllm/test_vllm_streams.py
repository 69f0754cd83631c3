"""What a client gets of a stream does not depend on how many tokens came at once: vLLM's API server over given answers,
in runs of tokens as a drafting engine emits them.

    python -m tests.vllm.test_vllm_streams --json bench/results/parsers-vllm.json

writes for each parser and endpoint how many lengths of runs, of all up to 64 tokens or the whole text, give other texts
than single tokens do, in vLLM and with freedraft.
"""

import argparse
import asyncio
import json
import re
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import zmq

from tests.support.models import DEMO_MODEL
from tests.support.parser_texts import CALLS, MARKS, TEMPLATE, THINKING, TOOLS, VLLM_TOOL_TEXTS, vllm_thought_text

LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 64)
TEXT = "One two, three four: stop here. Five 🙂 six 日本 seven end"
THOUGHTS = "日本🙂 é ü 東京</think>Hello 日本🙂 end"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}
FUNCTIONS = [tool["function"] for tool in TOOLS]
BODIES = {
    "chat/completions": CHAT | {"tools": TOOLS},
    "responses": {"input": "Hi", "tools": [{"type": "function"} | function for function in FUNCTIONS]},
    "messages": CHAT | {"tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]},
}
TEXTS = {"content", "reasoning", "name", "arguments", "text", "thinking", "partial_json", "delta"}


class Steps:
    """In place of the client of an engine's process: each request gets the `answer`, in runs of this `length`, of which
    each waits until the one before has been read, if `at_once`."""

    def __init__(self):
        from vllm.v1.engine.core_client import BackgroundResources

        self.resources = BackgroundResources(zmq.Context.instance())
        self.answer, self.length, self.at_once = [], 1, True
        self.states, self.running, self.aborted = {}, {}, []

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def add_request_async(self, request):
        self.running[request.request_id] = request.sampling_params, 0

    async def abort_requests_async(self, request_ids):
        self.aborted += [request_id for request_id in request_ids if self.running.pop(request_id, None)]

    def shutdown(self, timeout=None):
        self.running.clear()

    async def get_output_async(self):
        from vllm.v1.engine import EngineCoreOutputs

        while not self.running or (self.at_once and any(one.queue.output for one in self.states.values())):
            await asyncio.sleep(0)
        return EngineCoreOutputs(outputs=[self.output(*request) for request in [*self.running.items()]])

    def output(self, request_id, known):
        import torch
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists

        (asked, start), more = known, {}
        run, ids = self.answer[start : start + self.length], torch.tensor([[3, 4]])
        self.running[request_id] = asked, start + len(run)
        if start + len(run) == len(self.answer):
            reason = FinishReason.STOP if run[-1] in asked.all_stop_token_ids else FinishReason.LENGTH
            more = {"finish_reason": reason, "kv_transfer_params": None if asked.stop else {"at": 1}}
            del self.running[request_id]
        if asked.logprobs is not None:
            rows = np.array(run)[:, None] + [0, 1]
            more["new_logprobs"], more["routed_experts"] = LogprobsLists(rows, -rows / 7, rows[:, 0]), rows[:, :, None]
            more["new_sampling_mask"] = SamplingMaskLists(rows.ravel(), 2 * np.arange(len(run) + 1))
        if asked.prompt_logprobs is not None and not start:
            more["new_prompt_logprobs_tensors"] = LogprobsTensors(ids, -ids / 7, ids[:, 0])
        return EngineCoreOutput(request_id, run, **more)


class FrontEnd:
    """vLLM's, of the demo model, whose tokenizer has each mark as a token. folder: for the tokenizer."""

    def __init__(self, folder):
        from tokenizers import AddedToken
        from transformers import AutoTokenizer
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.core_client import EngineCoreClient

        from freedraft.engines.vllm.streams import stream_by_token

        stream_by_token()
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self.tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS.split()])
        self.tokenizer.response_template = TEMPLATE
        self.tokenizer.save_pretrained(folder)
        shutil.copy(DEMO_MODEL / "config.json", folder)
        flags = f"--model {folder} --served-model-name demo --max-model-len 1024 --enforce-eager --disable-log-stats"
        thinking = ["--default-chat-template-kwargs", json.dumps(THINKING)]
        self.args = make_arg_parser(FlexibleArgumentParser()).parse_args([*flags.split(), *thinking])
        self.steps, self.loop = Steps(), asyncio.Runner()
        with patch.object(EngineCoreClient, "make_async_mp_client", lambda **_: self.steps):
            self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(self.args))
        self.ours, self.vllms_own = AsyncLLM.generate, AsyncLLM.generate.__wrapped__
        self.steps.states = self.engine.output_processor.request_states
        self.app = build_app(self.args, ("generate",), self.engine.model_config)

    def use(self, tool, thought):
        """Take these parsers, and answer with a text for them. Raises ImportError: it needs a package of its maker."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state

        self.args.tool_call_parser, self.args.enable_auto_tool_choice = tool, tool is not None
        self.args.structured_outputs_config.reasoning_parser = thought or ""
        self.loop.run(init_app_state(self.engine, self.app.state, self.args, ("generate",)))
        text = (vllm_thought_text(thought) if thought else "") + (VLLM_TOOL_TEXTS[tool] if tool else "")
        self.steps.answer = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]

    def stream(self, endpoint, length, generate=None, at_once=True):
        """The events of an answer in runs of this length, without ids and times, which no two have in common. generate:
        in place of ours."""
        import httpx

        body = {
            name: value for name, value in BODIES[endpoint].items() if name != "tools" or self.args.tool_call_parser
        }
        if endpoint == "chat/completions":
            body["stream_options"] = {"include_usage": True}

        async def post():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)  # vLLM alone may break off
            async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
                answer = await client.post(f"/v1/{endpoint}", json={"model": "demo", "stream": True} | body)
            await self.engine.abort([*self.steps.states], internal=True)
            return answer.raise_for_status().text

        self.steps.length, self.steps.at_once = length, at_once
        with patch.object(type(self.engine), "generate", generate or self.ours):
            text = self.loop.run(post())
        text = re.sub(r"[0-9a-f]{16,}|\b[12]\d{9}(\.\d+)?\b", "0", text)
        return [json.loads(line[6:]) for line in text.splitlines() if line[:7] == "data: {"]

    def differing(self, endpoint, lengths, generate):
        """How many lengths give other texts than single tokens do, or an error; None if single tokens give one."""

        def read(length, generate):
            try:
                return texts(self.stream(endpoint, length, generate))
            except Exception as error:
                return repr(error)

        expected = read(1, self.vllms_own)
        differ = [length for length in lengths if read(length, generate) != expected]
        return None if isinstance(expected, str) else len(differ)


def texts(stream):
    """What a client puts together of a stream's events: texts by their place and numbers."""
    found = defaultdict(str)

    def add(value, key, place):
        if isinstance(value, str) and key in TEXTS:
            found[place, key] += value
        for part in value if isinstance(value, list) else ():
            add(part, key, place)
        for name, part in value.items() if isinstance(value, dict) else ():
            add(part, name, (*place, key, value.get("index"), value.get("output_index")))

    add(stream, "", ())
    return found


@pytest.fixture(scope="module")
def front_end(demo_model, tmp_path_factory):
    made = FrontEnd(tmp_path_factory.mktemp("model"))
    with made.loop:
        yield made


@pytest.fixture
def generate(front_end):
    """`(length, **sampling)`: `AsyncLLM.generate`, for an answer of `TEXT`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def outputs(length, ends=False, at_once=True, kind="DELTA", **sampling):
        answer = front_end.tokenizer.encode(TEXT) + ends * [front_end.tokenizer.eos_token_id]
        vars(front_end.steps).update(answer=answer, length=length, at_once=at_once)
        asked = SamplingParams(output_kind=RequestOutputKind[kind], max_tokens=99, **sampling)
        return front_end.engine.generate({"prompt_token_ids": [1, 2]}, asked, "id")

    return outputs


@pytest.fixture
def read(front_end, generate):
    async def all_of(stream):
        return [output async for output in stream]

    return lambda *args, **kwargs: front_end.loop.run(all_of(generate(*args, **kwargs)))


def fields(outputs, index=0, without=()):
    """All that outputs say of one choice. A cumulative logprob is that of all tokens that came at once."""
    left_out = {"outputs", "cumulative_logprob", *without}
    found = [vars(output) | vars(one) for output in outputs for one in output.outputs if one.index == index]
    return [{name: str(value) for name, value in one.items() if name not in left_out} for one in found]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logprobs": 1, "prompt_logprobs": 1},
        {"logprobs": 1, "prompt_logprobs": 1, "flat_logprobs": True, "stop": ["here. Five"]},
        {"stop": ["here", "stop here. Fix"], "include_stop_str_in_output": True},
        {"stop": ["six", "no such text"], "min_tokens": 5},
        {"stop": ["end of no text"]},
        {"ends": True, "logprobs": 0},
        {"ends": True, "stop": ["none"], "include_stop_str_in_output": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [True, False])
def test_each_token_comes_alone_with_all_that_belongs_to_it(read, sampling, at_once):
    """Also what is held back as the beginning of a stop string, and outputs that are merged as nobody reads them."""
    single = read(1, **sampling)
    text = "".join(output.outputs[0].text for output in single)
    assert text == TEXT[: len(text)] and len(text) > 25 and len(single) > 7
    for length in LENGTHS:
        assert fields(read(length, at_once=at_once, **sampling)) == fields(single), length


@pytest.mark.parametrize("at_once", [True, False])
def test_two_answers_come_side_by_side(read, at_once):
    asked, of_both = {"n": 2, "logprobs": 1, "stop": ["seven"]}, ("finished", "kv_transfer_params")
    single = read(1, **asked)
    for length in LENGTHS:
        found = read(length, at_once=at_once, **asked)
        assert all(fields(found, i, of_both) == fields(single, i, of_both) for i in range(2)), length
        assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("interval", [10, 1000])
def test_clients_that_ask_for_tokens_in_groups_get_groups(read, interval):
    for length in LENGTHS:
        found = [output.outputs[0] for output in read(length, stream_interval=interval)]
        sizes = [len(one.token_ids) for one in found]
        assert "".join(one.text for one in found) == TEXT
        assert max(sizes) <= interval and len(sizes) < 9


def test_a_whole_answer_is_left_alone(read):
    (output,) = read(5, kind="FINAL_ONLY", n=3)
    assert [(type(one.text), one.text) for one in output.outputs] == [(str, TEXT)] * 3


def test_a_client_that_leaves_ends_its_request_at_once(front_end, generate):
    async def leave():
        stream = generate(8)
        assert len((await anext(stream)).outputs[0].token_ids) == 1 and not front_end.steps.aborted
        await stream.aclose()
        return len(front_end.steps.aborted), len(front_end.steps.states)

    front_end.steps.aborted.clear()
    assert front_end.loop.run(leave()) == (1, 0)


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("parser", ["deepseek_v3", "gemma4", "glm45", "hermes", "minimax_m2", "qwen3_coder"])
def test_runs_of_any_length_give_the_stream_of_single_tokens(front_end, parser, endpoint):
    """Event by event."""
    from vllm.reasoning import ReasoningParserManager

    front_end.use(parser, parser if parser in ReasoningParserManager.list_registered() else None)
    expected = front_end.stream(endpoint, 1, front_end.vllms_own)
    assert all(name in texts(expected).values() for name, _ in CALLS)
    assert [length for length in LENGTHS if front_end.stream(endpoint, length) != expected] == []
    if parser == "deepseek_v3":
        assert front_end.differing(endpoint, LENGTHS, front_end.vllms_own), "there is nothing to mend"


@pytest.mark.parametrize("endpoint", BODIES)
def test_thoughts_in_characters_of_several_tokens(front_end, endpoint):
    """Of which vLLM counts the last token alone, unless others came with it: its own count, without drafts too, depends
    on when its server reads."""
    front_end.use("hermes", "qwen3")
    front_end.steps.answer = [*front_end.tokenizer.encode(THOUGHTS), front_end.tokenizer.eos_token_id]
    expected = front_end.stream(endpoint, 1, front_end.vllms_own)
    for at_once in (True, False):
        assert [length for length in LENGTHS if front_end.stream(endpoint, length, None, at_once) != expected] == []
    if endpoint != "messages":  # which do not tell the count
        merged = front_end.stream(endpoint, 1, front_end.vllms_own, at_once=False)
        assert counts(merged)[-1] != counts(expected)[-1] > 0


def counts(stream):
    return [int(count) for count in re.findall(r'"reasoning_tokens": (\d+)', json.dumps(stream))]


def main():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from bench.lib.results import write_json

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", type=Path)
    path, rows = arguments.parse_args().json, []
    # Harmony's parser, which reads token by token, replaces these two; its vocabulary has to be downloaded.
    tools = {*ToolParserManager.list_registered()} - {"openai"}
    thoughts = {*ReasoningParserManager.list_registered()} - {"openai_gptoss"}
    alone = [(None, name) for name in sorted(thoughts - tools)]
    with tempfile.TemporaryDirectory() as folder:
        front_end = FrontEnd(folder)
        for tool, thought in [(name, name if name in thoughts else None) for name in sorted(tools)] + alone:
            try:
                front_end.use(tool, thought)
            except ImportError as error:
                print(f"{tool or thought} is left out: {error}")
                continue
            lengths, ways = range(1, min(len(front_end.steps.answer), 64) + 1), {}
            for way, generate in (("before", front_end.vllms_own), ("after", front_end.ours)):
                ways[way] = {endpoint: front_end.differing(endpoint, lengths, generate) for endpoint in BODIES}
            rows.append({"tool": tool, "reasoning": thought, "lengths": len(lengths)} | ways)
            print(rows[-1], flush=True)
    write_json(path, {"engine": "vllm", "rows": rows})


if __name__ == "__main__":
    main()
