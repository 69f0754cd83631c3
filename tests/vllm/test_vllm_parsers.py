"""What a client gets of a stream does not depend on how many tokens came at once. vLLM's parsers, without an engine."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest
from vllm_parsers import Streams, cases, differing, tokenizer_of

from tests.support.parser_texts import CALLS

# Of vLLM itself, token by token: formats of one call, and a parser that streams none.
FEWER_CALLS = {"gigachat3": 1, "internlm": 1, "phi4_mini_json": 0}
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 64)
TEXT = "One two, three four: stop here. Five 🙂 six 日本 seven end"


@pytest.fixture(scope="module")
def plain_parser():
    """`ParserManager.get_parser` of vLLM itself; the process is hooked."""
    from vllm.parser.parser_manager import ParserManager

    from freedraft.engines.vllm.streams import parse_by_token

    parse_by_token()
    return ParserManager.get_parser.__wrapped__


def hooked_parser(*args, **kwargs):
    from vllm.parser.parser_manager import ParserManager

    return ParserManager.get_parser(*args, **kwargs)


def pytest_generate_tests(metafunc):
    if "registered" in metafunc.fixturenames:
        found = cases() if find_spec("vllm") else []
        metafunc.parametrize("registered", found, ids=lambda case: "-".join(str(part) for part in case if part))


def test_runs_of_any_length_give_the_stream_of_single_tokens(registered, demo_model, plain_parser):
    try:
        expected = Streams(*registered, plain_parser).read(1, plain_text=True)
    except ImportError:
        pytest.skip("needs a package of the model's maker")
    tool, thought, special = registered
    if tool and not thought:
        assert [call["name"] for call in expected[2].values()] == [name for name, _ in CALLS][: FEWER_CALLS.get(tool)]
    assert tool or special or expected[1] or thought == "minimax_m2_append_think", "no thought"
    assert differing(Streams(*registered, hooked_parser), expected, LENGTHS) == []


@pytest.mark.parametrize("case", [("minicpm5", None, False), ("step3", "step3", False), (None, "deepseek_r1", True)])
def test_vllm_alone_gives_others(case, demo_model, plain_parser):
    """Or there is nothing to mend."""
    plain = Streams(*case, plain_parser)
    assert differing(plain, plain.read(1, plain_text=True), LENGTHS, plain_text=True)


@pytest.fixture
def outputs_of(demo_model, plain_parser):
    """`(runs, at_once, **sampling)`: what vLLM's output processor queues for a client who reads each output at once, or
    none before all are there; runs: lists of token ids, of which the last ends for this reason."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    tokenizer = tokenizer_of(special=False)

    def made(runs, at_once, reason="LENGTH", output_kind=RequestOutputKind.DELTA, **sampling):
        parameters = SamplingParams(output_kind=output_kind, **sampling)
        request = EngineCoreRequest("id", [1, 2], None, parameters, None, 0.0, None, None, None, external_req_id="id")
        processor = OutputProcessor(tokenizer, log_stats=False, stream_interval=1)
        queue = RequestOutputCollector(parameters.output_kind, "id")
        processor.add_request(request, "", queue=queue)
        read = []
        for at, run in enumerate(runs, 1):
            ended = FinishReason[reason] if at == len(runs) else None
            processor.process_outputs([EngineCoreOutput("id", list(run), finish_reason=ended)])
            if at_once and queue.output is not None:
                read.append(asyncio.run(queue.get()).outputs[0])
        return read if at_once else [asyncio.run(queue.get()).outputs[0]]

    return made, tokenizer.encode(TEXT)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop": ["here. Five"]},
        {"stop": ["here", "stop here. Fix"], "include_stop_str_in_output": True},
        {"stop": ["six", "no such text"], "min_tokens": 5},
        {"stop": ["end of no text"]},
        {"reason": "STOP"},
        {"reason": "STOP", "stop": ["none"], "include_stop_str_in_output": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [True, False])
def test_texts_of_tokens_are_those_that_single_tokens_give(outputs_of, sampling, at_once):
    """Also what is held back as the beginning of a stop string, and outputs that are merged as nobody reads them."""
    outputs, ids = outputs_of
    single = outputs([[token] for token in ids], True, **sampling)
    text = "".join(each.text for each in single)
    assert text == TEXT[: len(text)] and len(text) > 25
    for length in LENGTHS:
        found = outputs([ids[at : at + length] for at in range(0, len(ids), length)], at_once, **sampling)
        assert "".join(str(each.text) for each in found) == text
        assert [part for each in found for part in each.text.parts] == [str(each.text) for each in single]
        assert [token for each in found for token in each.token_ids] == [t for each in single for t in each.token_ids]
        assert (found[-1].finish_reason, found[-1].stop_reason) == (single[-1].finish_reason, single[-1].stop_reason)


def test_a_whole_answer_is_one_plain_text(outputs_of):
    from vllm.sampling_params import RequestOutputKind

    outputs, ids = outputs_of
    (answer,) = outputs([ids[:5], ids[5:]], True, output_kind=RequestOutputKind.FINAL_ONLY)
    assert type(answer.text) is str and answer.text == TEXT
