"""The real model, what is refused at the start, servers, and a benchmark."""

import json
import re
import sys
import urllib.request

import pytest

from bench.lib import servers
from tests.sglang.conftest import GREEDY, ids, read_counts, sglang_engine, token_ids
from tests.sglang.parsers import FrontEnd, calls_of, text_of
from tests.support.compared import byte_model, check_kinds
from tests.support.forced import forced
from tests.support.models import continuations
from tests.support.pages import sums
from tests.support.parser_texts import CALLS, SGLANG_TOOL_TEXTS
from tests.support.predictions import check_predictions
from tests.support.prompts import SHORT

NAMES = ("tokens", "request_steps", "accepted_tokens", "accepted_lengths", "undrafted_requests")


def test_real_model(demo_model, tmp_path):
    """Its own tokens, with drafts. Then tool calls, in runs of tokens."""
    expected = continuations(demo_model, token_ids(demo_model, SHORT[:4]), 16)
    options = {"max_total_tokens": 4096, "speculative_num_draft_tokens": 8, "tool_call_parser": "qwen"}
    counts = tmp_path / "counts.json"
    with sglang_engine(demo_model, counts, speculative_algorithm="sssd", **options) as engine:
        assert ids(engine.generate(SHORT[:4], GREEDY | {"max_new_tokens": 16})) == expected
        front = FrontEnd(engine.tokenizer_manager, engine.template_manager, engine.loop.run_until_complete)
        text, before = SGLANG_TOOL_TEXTS["qwen"], read_counts(counts)["accepted"]
        events = front.events(
            "chat",
            drafting=True,
            adapted=lambda request: front.chat._convert_to_internal_request(request)[0],
            messages=[{"role": "user", "content": f"Copy this.\n{text}"}],
            regex=re.escape(text),
            temperature=0,
            max_tokens=200,
        )
    assert calls_of(events) == list(CALLS) and text_of(events, "content").strip() == "Look."
    assert events[-1][0]["choices"][0]["finish_reason"] == "tool_calls"
    assert read_counts(counts)["accepted"] > before + 20


def test_bad_options_stop_the_start(tiny):
    """In the front-end process, before a scheduler starts: quick, and the reason is the exception's text."""
    with (
        pytest.raises(Exception, match="no hardware profile 'abacus'"),
        sglang_engine(tiny, env={"FREEDRAFT_HARDWARE": "abacus"}, speculative_algorithm="sssd"),
    ):
        pass


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    log, speculative = tmp_path_factory.mktemp("server") / "log", {"method": "sssd", "num_speculative_tokens": 8}
    made = servers.build("tests", "sglang", demo_model, log, speculative=speculative, python=sys.executable)
    with servers.running(made):
        yield made


def test_the_server_s_own_page_has_its_metrics_and_ours(server):
    """SGLang collects the metrics of all its processes, where ours find that out before they are made."""
    before = sums(server.get("/metrics"))
    asked = json.dumps({"text": SHORT[0], "sampling_params": GREEDY | {"max_new_tokens": 24}}).encode()
    request = urllib.request.Request(f"{server.url}/generate", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["meta_info"]["completion_tokens"] == 24
    found = sums(server.get("/metrics")) - before
    total = {name: found[f"freedraft_{name}_total"] for name in NAMES}
    assert found["sglang:generation_tokens_total"] == 24 and 20 <= total["tokens"] <= 24, found
    assert total["tokens"] == total["request_steps"] + total["accepted_tokens"]
    assert 0 < total["accepted_lengths"] + total["undrafted_requests"] <= total["request_steps"]


def test_predictions(server):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    check_predictions(client, lambda: sums(server.get("/metrics"))["freedraft_accepted_tokens_total"])


@pytest.mark.extended
def test_every_kind_of_request_is_answered_as_without_drafts(demo_model, tmp_path):
    """By a random model whose tokens are bytes."""
    check_kinds("sglang", byte_model(tmp_path / "model", demo_model), tmp_path)


@pytest.mark.extended
@pytest.mark.rare
def test_forced(demo_model, tmp_path):
    """By bench/forced.py answers are the recorded ones, and drafts are accepted."""
    sssd = {"method": "sssd", "num_speculative_tokens": 4, "policy": "fixed", "live": "off", "shape": "tree"}
    (tree,) = forced("sglang", tmp_path, demo_model, {"tree": sssd}).values()
    assert tree["tokens_per_step"] > 1.2 and 0 < tree["accepted"] <= 1
