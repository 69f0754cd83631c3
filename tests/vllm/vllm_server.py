"""vLLM's OpenAI-compatible server as a process, and clients that go away in the midst of an answer."""

import os
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.lib import servers
from tests.support.pages import sums
from tests.support.waiting import wait_until

CLIENTS = 8
TOKENS = 24


def server_of(model, log, speculative, *flags):
    """A server of its own processes, which is not started yet."""
    sizes = {"requests": 16, "max_model_len": 512, "prefixes": True}
    made = servers.build("tests", "vllm", model, log, speculative=speculative, **sizes)
    made.command += flags
    made.env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    # The prefix becomes a part of the log's format: each line begins with the name of its logger.
    made.env |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_PREFIX": "%(name)s "}
    made.env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", made.env["OMP_NUM_THREADS"])
    return made


def get(port, path):
    with urllib.request.urlopen(f"http://{servers.HOST}:{port}{path}", timeout=60) as answer:
        return answer.read().decode()


class Server(NamedTuple):
    """A server that answers.

    Attributes:
        drafters: ports of the metrics of our drafters, one for each process that drafts.
    """

    port: int
    drafters: tuple[int, ...]
    log: Path


@contextmanager
def serving(model, folder, speculative, *flags, drafters=1, **environment):
    """A running server with method `sssd`, its log in `folder`. drafters: number of its replicas."""
    first = servers.free_port()
    made = server_of(model, folder / "server.log", speculative | {"metrics_port": first}, *flags)
    made.env |= environment
    with servers.running(made):
        yield Server(made.port, tuple(range(first, first + drafters)), made.log)


@cache
def client_of(port):
    """One for all threads: making one takes longer than an answer of a tiny model."""
    from openai import OpenAI

    return OpenAI(base_url=f"http://{servers.HOST}:{port}/v1", api_key="none", max_retries=0, timeout=120)


def complete(port, prompt, abort_after=None):
    """A streamed completion; None when it was left after `abort_after` pieces."""
    text, reason = "", None
    asked = {"model": servers.MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with client_of(port).completions.create(**asked, extra_body={"ignore_eos": True}) as stream:
        for pieces, chunk in enumerate(stream, 1):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
            if pieces == abort_after:
                return None
    assert reason in ("length", "stop"), f"the stream broke off: {text!r}"
    return text


def metric(server, name):
    """The sum over all drafters."""
    return sum(metrics(server, name))


def metrics(server, name):
    """Of each drafter."""
    pages = [sums(get(port, "/metrics")) for port in server.drafters]
    assert all(name in page for page in pages), name
    return [page[name] for page in pages]


def clients_that_go_away(server, prompts, rounds=1):
    """Eight clients at once, whose answers are those of a client alone; nothing is held afterwards."""
    expected = {prompt: complete(server.port, prompt) for prompt in prompts}

    def client(number):
        choose = random.Random(number)
        for _ in range(rounds):
            complete(server.port, choose.choice(prompts), abort_after=choose.randint(1, 5))
            prompt = choose.choice(prompts)
            assert complete(server.port, prompt) == expected[prompt]

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    steps, of_requests = (
        metric(server, "freedraft_drafting_seconds_count"),
        metric(server, "freedraft_request_steps_total"),
    )
    assert of_requests > steps, "never two requests at once"
    wait_until(lambda: metric(server, "freedraft_requests") == 0)
    assert metric(server, "freedraft_draft_tokens_total") > metric(server, "freedraft_accepted_tokens_total") > 0
    assert metric(server, "freedraft_drafting_seconds_sum") > 0
