"""The OpenAI-compatible server of stock vLLM with `--speculative-config '{"method": "sssd"}'`."""

import re
import subprocess
import sys
from collections import Counter

import pytest
from vllm_cases import SAMPLED
from vllm_server import client_of, clients_that_go_away, get, metric, server_of, serving

from bench.lib.load import ask
from bench.lib.servers import MODEL_NAME
from tests.support.pages import sums
from tests.support.parser_texts import CALLS, TOOLS, VLLM_TOOL_TEXTS
from tests.support.predictions import check_predictions
from tests.support.prompts import SHORT
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    speculative = {"method": "sssd", "num_speculative_tokens": 8, "knee": 24, "live": "store"}
    flags = "--per-request-spec-decode-metrics summary --enable-auto-tool-choice --tool-call-parser minicpm5"
    with serving(demo_model, tmp_path_factory.mktemp("server"), speculative, *flags.split()) as made:
        yield made


def test_eight_clients_with_aborts_lose_nothing_and_leak_nothing(server):
    clients_that_go_away(server, SHORT[:2])


def complete(server, salt, **sampling):
    """The answer of 40 tokens to a client that sends this salt; greedy by default."""
    asked = {"model": MODEL_NAME, "prompt": SHORT[5], "max_tokens": 40, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True} | ({} if salt is None else {"cache_salt": salt}) | sampling
    answer = client_of(server.port).completions.create(**asked, extra_body=more).model_dump()
    assert answer["usage"]["completion_tokens"] == 40
    return answer


def accepted(server, salt, **sampling):
    """Draft tokens accepted of one answer, and its tokens."""
    answer = complete(server, salt, **sampling)
    counts = answer["metrics"]["speculative_decoding"]
    return counts["num_accepted_draft_tokens"], answer["choices"][0]["token_ids"]


def test_a_client_that_wants_no_drafts(server):
    """Its answer is the same; what is no "off" is ignored, or refused by vLLM itself."""
    from openai import BadRequestError

    _, answer = accepted(server, "off")
    assert accepted(server, "off", vllm_xargs={"freedraft": "off"}) == (0, answer)
    for sent in ("OFF", 0, ["off", 1]):
        count, same = accepted(server, "off", vllm_xargs={"freedraft": sent})
        assert count > 10 and same == answer, sent
    for sent in ({"freedraft": {"off": 1}}, "off"):
        with pytest.raises(BadRequestError):
            complete(server, "off", vllm_xargs=sent)


def test_predictions(server):
    check_predictions(client_of(server.port), lambda: metric(server, "freedraft_accepted_tokens_total"))


def test_clients_draft_from_texts_of_their_salt_only(server):
    """Those without one from one another's."""
    salts = ("one", None, "one", None, "two")
    one, none, one_again, none_again, two = (accepted(server, salt)[0] for salt in salts)
    # Those without a salt have learnt from the clients of other tests.
    assert all(abs(count - one) <= 2 for count in (none, two))
    assert min(one_again, none_again) > one + 10


def test_a_seed_gives_the_same_answer_while_the_server_learns(server):
    _, plain = accepted(server, "seeds off", vllm_xargs={"freedraft": "off"}, **SAMPLED)
    counts, answers = zip(*(accepted(server, "seeds", **SAMPLED) for _ in range(2)), strict=True)
    assert list(answers) == [plain] * 2
    assert counts[1] > counts[0] + 10, "nothing was learnt: the test does not test that"


def test_each_streamed_token_comes_alone_as_to_a_client_without_drafts(server):
    """The model copies a text with two calls, which vLLM's parser alone misplaces in part."""
    text = VLLM_TOOL_TEXTS["minicpm5"]
    asked = {"messages": [{"role": "user", "content": f"Repeat: {text}"}], "model": MODEL_NAME, "tools": TOOLS}
    extra = {"return_token_ids": True, "structured_outputs": {"choice": [text]}}
    found, before = {}, metric(server, "freedraft_accepted_tokens_total")
    for said in ("off", "on"):
        xargs = {"vllm_xargs": {"freedraft": said}}
        stream = client_of(server.port).chat.completions.create(
            **asked, temperature=0, stream=True, extra_body=extra | xargs
        )
        choices = [chunk.choices[0].model_dump() for chunk in stream]
        calls = [[call["function"] for call in each["delta"]["tool_calls"] or ()] for each in choices]
        tokens = [each.get("token_ids") for each in choices]
        found[said] = tokens, [each["delta"]["content"] for each in choices], calls
    assert metric(server, "freedraft_accepted_tokens_total") > before + 20, "the test does not test that"
    assert found["on"] == found["off"] and all(len(ids) == 1 for ids in tokens if ids)
    assert [each["name"] for one in calls for each in one if each["name"]] == [name for name, _ in CALLS]


def test_metrics_are_true_where_they_are_shown(server):
    """The page of the API server, which drafts nothing, has none of ours; `freedraft top` reads the drafter's."""
    assert "freedraft_" not in get(server.port, "/metrics")
    command = [sys.executable, "-m", "freedraft.cli", "top", str(server.drafters[0]), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"^(\S.*?) +([\d.,-]+) *$", done.stdout, re.MULTILINE))
    assert float(shown["tokens per step (1 without drafts)"]) > 1.0, done.stdout
    assert float(shown["tokens per second"]) > 0 and shown["failures since the start"] == "0", done.stdout
    assert "accepted tokens come from" in done.stdout


def test_the_sums_of_the_page_are_those_of_vllm_of_its_requests_and_of_the_bench(server):
    """Nothing is counted twice or left out, whether answers are asked for one by one or by the bench."""

    def counted():
        return sums(*(get(port, "/metrics") for port in (server.port, *server.drafters)))

    before = counted()

    def more():
        return Counter({name: value - before[name] for name, value in counted().items()})

    chats = [([{"role": "user", "content": text}], 24 + i) for i, text in enumerate(SHORT[:2])]
    outcome = ask(f"http://127.0.0.1:{server.port}", MODEL_NAME, chats, 2, None)
    request = complete(server, "sums")["metrics"]["speculative_decoding"]
    tokens = sum(length for _, length in chats) + 40
    wait_until(lambda: more()["vllm:generation_tokens_total"] == tokens)  # vLLM counts after it has answered
    count = more()
    page = {name: count[f"freedraft_{name}_total"] for name in ("tokens", "request_steps", "draft_tokens")}
    kept = count["freedraft_accepted_tokens_total"]
    assert page["tokens"] == tokens == page["request_steps"] + kept and sum(outcome.tokens) == tokens - 40
    drafts, position = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert page["draft_tokens"] == count["vllm:spec_decode_num_draft_tokens_total"]
    assert page["draft_tokens"] == outcome.drafted + request["num_draft_tokens"]
    assert kept == count["vllm:spec_decode_num_accepted_tokens_total"]
    assert kept == outcome.accepted + request["num_accepted_draft_tokens"] > 0
    lengths = [count["freedraft_accepted_lengths_total", str(length)] for length in range(9)]
    assert sum(lengths) == count[drafts] and sum(n * of for n, of in enumerate(lengths)) == kept
    assert [sum(lengths[at + 1 :]) for at in range(8)] == [count[position, str(at)] for at in range(8)]
    reasons = ("cost", "no match", "no room", "failure", "off")
    undrafted = {reason: count["freedraft_undrafted_requests_total", reason] for reason in reasons}
    assert page["request_steps"] == count[drafts] + sum(undrafted.values())
    assert undrafted["no match"] > 0 and undrafted["no room"] >= len(chats) + 1 and not undrafted["failure"], undrafted
    assert count["freedraft_sourced_tokens_total"] == kept
    assert count["freedraft_sourced_draft_tokens_total"] == page["draft_tokens"]


def test_the_log_says_so_once_and_nothing_per_step(server):
    lines = [line for line in server.log.read_text().splitlines() if re.match(r"freedraft[\w.]* ", line)]
    assert sum("sssd drafts up to 8 tokens per request" in line for line in lines) == 1
    assert sum("method 'sssd': vLLM" in line and "attention CPU_ATTN" in line for line in lines) == 1
    assert sum("cache_salt" in line for line in lines) == 1, "what the default does to clients without one"
    assert len(lines) < 10, lines


@pytest.mark.extended
def test_a_bad_option_stops_the_server_with_one_line(demo_model, tmp_path):
    server = server_of(demo_model, tmp_path / "log", {"method": "sssd", "datastroe": "x"})
    result = subprocess.run(server.command, env=server.env, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("freedraft: "))
    assert "unknown option 'datastroe'" in line and "did you mean 'datastore'?" in line
