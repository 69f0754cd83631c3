"""`freedraft compare`: its kinds of request, what counts as a difference, and what it refuses."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from freedraft import cli
from freedraft.compare import BOTH, DIFFERS, ITSELF, ONE, PATHS, SAME, join, judged, load, uncounted


def test_each_engine_has_eighty_kinds_whose_names_are_its_own() -> None:
    for engine in ("vllm", "sglang"):
        kinds = [kind["kind"] for kind in load({}) if kind.get("engine") in (None, engine)]
        assert len(kinds) >= 80 and set(Counter(kinds).values()) == {1}


def test_every_request_is_whole() -> None:
    known = {f"id{i}": i for i in range(16)} | dict.fromkeys(["ids", "page", *(f"room{n}" for n in (0, 1, 8, 24, 64))])
    words = {"kind", "engine", "at", "send", "headers", "cut_ms", "times", "in_turn", "together", "requests"}
    for kind in load(known):
        assert kind.keys() <= words and "$" not in json.dumps(kind["requests"]), kind
        for request in kind["requests"]:
            assert request["at"] in PATHS and request["send"].keys() & {"prompt", "messages", "text", "input"}, kind[
                "kind"
            ]


def answer(text: str, logprob: float = -0.5, identity: str = "a") -> tuple[int, dict]:
    choice = {"index": 0, "text": text, "token_ids": [1, 2], "logprobs": {"token_logprobs": [logprob]}}
    return 200, {"id": identity, "choices": [choice], "usage": {"completion_tokens": 2}}


YES, NO = answer("yes"), answer("no")
REFUSED, GONE = (400, {"error": "x"}), ("ConnectError", "refused")


@pytest.mark.parametrize(
    ("plain", "drafting", "again", "drafting_again", "outcome"),
    [
        (YES, answer("yes", -0.5004, "b"), YES, YES, SAME),
        (YES, answer("yes", -0.502), YES, YES, DIFFERS),
        (YES, NO, YES, YES, DIFFERS),
        (YES, YES, YES, NO, DIFFERS),
        (YES, NO, NO, NO, ITSELF),
        (REFUSED, (400, {"error": "y"}), REFUSED, REFUSED, BOTH),
        (REFUSED, (500, None), REFUSED, REFUSED, DIFFERS),
        (YES, REFUSED, YES, YES, ONE),
        (REFUSED, YES, REFUSED, YES, ONE),
        (YES, GONE, YES, YES, ONE),
        (GONE, GONE, GONE, GONE, ITSELF),
        (YES, (200, {**YES[1], "usage": {"completion_tokens": 3}}), YES, YES, DIFFERS),
        (YES, (200, {**YES[1], "choices": [{**YES[1]["choices"][0], "token_ids": [1]}]}), YES, YES, DIFFERS),
    ],
)
def test_outcomes(plain, drafting, again, drafting_again, outcome) -> None:
    assert judged([[plain], [drafting], [again], [drafting_again]], 1e-3)[0] == outcome


def test_a_request_that_differs_beside_one_of_which_plain_is_not_sure() -> None:
    said, where = judged([[YES, YES], [NO, NO], [NO, YES], [NO, NO]], 1e-3)
    assert said == DIFFERS and where is not None and where.startswith("request 2 choices 0 text")


def test_pieces_of_a_stream_make_the_whole_answer() -> None:
    whole: dict = {}
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {"tool_calls": [call]}):
        join(whole, {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "token_ids": [7]}]})
    join(whole, {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]})
    join(whole, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [8]}]})
    join(whole, {"choices": [], "usage": {"completion_tokens": 5}})
    delta = whole["choices"][0]["delta"]
    assert (delta["role"], delta["content"]) == ("assistant", "ab") and whole["usage"] == {"completion_tokens": 5}
    assert delta["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert whole["choices"][0]["token_ids"] == [7, 7, 7, 7, 8] and whole["choices"][0]["finish_reason"] == "stop"


def test_events_of_a_stream_are_joined_to_runs_of_one_kind() -> None:
    """However many tokens each brings; but what comes in another order is another answer."""

    def streamed(*events: dict) -> dict:
        whole: dict = {}
        for number, event in enumerate(events):
            join(whole, event | {"sequence_number": number, "item_id": f"{number}"})
        return whole

    def text(delta: str) -> dict:
        return {"type": "response.output_text.delta", "output_index": 0, "delta": delta}

    def thought(delta: str) -> dict:
        return {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": delta}}

    call = {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}}
    assert streamed(text("a"), text("b"), call) == streamed(text("ab"), call)
    assert streamed(thought("a"), thought("b"), call) == streamed(thought("ab"), call) != streamed(thought("a"), call)
    for others in ((text("a"), call, text("b")), (text("ab"),), (text("ab"), call | {"index": 2})):
        assert streamed(*others) != streamed(text("ab"), call)


def test_what_vllm_counts_by_the_time_of_reading_is_not_compared() -> None:
    line = (
        '{"usage": {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3, "audio_tokens": 0}}}'
    )
    told = {"completion_tokens": 5, "completion_tokens_details": {"audio_tokens": 0}}
    assert json.loads(line, object_hook=uncounted) == {"usage": told}


@pytest.mark.parametrize("asked", [["http://a", "http://b", "--control", "off"], ["http://a"]])
def test_it_asks_two_servers_or_one_with_a_control(asked) -> None:
    done = CliRunner().invoke(cli.app, ["compare", *asked])
    assert done.exit_code == 2 and "name two servers, or one that drafts and --control off" in done.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "http://["])
def test_a_server_that_is_down_is_one_line(url) -> None:
    done = CliRunner().invoke(cli.app, ["compare", url, url])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and f"no vLLM or SGLang server at {url}" in done.stderr
