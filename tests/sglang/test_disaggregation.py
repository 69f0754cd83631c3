"""Prompts are read by one server, and answered by another, which drafts."""

import http.client
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.lib import servers
from tests.support.models import continuations, save, tiny_model
from tests.support.pages import sums
from tests.support.prompts import random_ids
from tests.support.waiting import wait_until

TOKENS = 25
PROMPTS = random_ids([9, 40, 17, 130, 12, 66], 48, first=5, seed=2)
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
STAND_IN, PLUGIN = Path(__file__).parent / "transfer", Path(__file__).parent / "plugin"


def post(server, asked, enough=1 << 30):
    """The events of a stream; the client leaves after `enough` of them."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    connection.request("POST", "/generate", json.dumps(asked), {"Content-Type": "application/json"})
    events = []
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            events.append(json.loads(line[6:]))
            if len(events) == enough:
                break
    connection.close()
    return events


SSSD = {"method": "sssd", "num_speculative_tokens": 12, "policy": "fixed"}


class Pair:
    """A server for prompts and one for answers."""

    def __init__(self, model, folder):
        self.port, self.rooms = servers.free_port(), 0
        self.prompts, self.answers = (self._server(model, folder, mode) for mode in ("prefill", "decode"))

    def _server(self, model, folder, mode):
        given = {"speculative": SSSD, "python": sys.executable, "prefixes": True}
        server = servers.build(mode, "sglang", model, folder / f"{mode}.log", **given)
        server.command[:] += ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake"]
        server.command[:] += ["--disaggregation-bootstrap-port", str(self.port), "--skip-tokenizer-init"]
        if mode == "decode":  # the default takes memory of a GPU's driver
            server.command[:] += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        paths = [] if importlib.util.find_spec("mooncake") else [str(STAND_IN)]
        server.env |= {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "TREE_TEST_TRANSFERS": "1"}
        server.env["PYTHONPATH"] = os.pathsep.join([*paths, str(PLUGIN), server.env.get("PYTHONPATH", "")])
        return server

    def ask(self, prompt, enough=1 << 30):
        self.rooms += 1
        asked = {"input_ids": prompt, "sampling_params": GREEDY, "stream": True, "bootstrap_host": servers.HOST}
        asked |= {"bootstrap_port": self.port, "bootstrap_room": self.rooms}
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(post, self.prompts, asked)
            events = post(self.answers, asked, enough)
            read.result()
        return events


@pytest.mark.extended
def test_answers_are_the_model_s_with_drafts_from_the_first_step(tmp_path):
    model = save(tiny_model(seed=3, vocab_size=64, max_position_embeddings=2048), tmp_path / "model")
    pair = Pair(model, tmp_path)
    with ExitStack() as stack:
        for server in (pair.prompts, pair.answers):
            stack.enter_context(servers.running(server))
        with ThreadPoolExecutor(4) as pool:
            first = [*pool.map(pair.ask, PROMPTS)]
            left = [*pool.map(lambda prompt: pair.ask(prompt, 1), PROMPTS[:4])]
            again = [*pool.map(pair.ask, PROMPTS)]
        pages = [lambda server=server: sums(server.get("/metrics")) for server in (pair.prompts, pair.answers)]
        for page in pages:
            wait_until(lambda page=page: page()["sglang:num_running_reqs"] == 0)
        held = pages[1]()["freedraft_requests"]
    expected = continuations(model, PROMPTS, TOKENS)
    assert [events[-1]["output_ids"] for events in first] == [events[-1]["output_ids"] for events in again] == expected
    assert all(len(events) == 1 for events in left)
    steps = [events[-1]["meta_info"]["spec_verify_ct"] for events in again]
    assert max(steps) <= 5, "of up to 12 tokens: asked again, the answer is known from the first step on"
    assert held == 0
