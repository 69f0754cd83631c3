"""Prompts are read by one server and answered by another, which drafts: KV goes through a folder that both see.

On model runner V1; on V2, in Triton's interpreter, where the environment asks for it (`make test-vllm-v2`).
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_server import Server, client_of, get, metric, server_of

from bench.lib import servers
from tests.support.models import continuations, save, tiny_model
from tests.support.pages import sums
from tests.support.prompts import random_ids
from tests.support.waiting import wait_until

TOKENS, BLOCK = 25, 32
# More than a block, and never whole blocks and one token: vLLM's example connector looks for those under another name.
PROMPTS = random_ids([35, 80, 41, 130, 44, 66], 48, first=5, seed=2)
STEPS = "freedraft_request_steps_total"
SSSD = {"method": "sssd", "num_speculative_tokens": 12, "policy": "fixed"}


def server(model, folder, role):
    """It reads KV that it finds, and writes that of other prompts."""
    transfer = {"kv_connector": "ExampleConnector", "kv_role": role}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "kv")}
    flags = ["--kv-transfer-config", json.dumps(transfer), "--block-size", str(BLOCK), "--skip-tokenizer-init"]
    port = servers.free_port()
    made = server_of(model, folder / f"{role}.log", SSSD | {"metrics_port": port}, *flags)
    made.command += ["--per-request-spec-decode-metrics", "summary"]
    made.env |= {"SERVED_AS_ON_GPUS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return made, Server(made.port, (port,), made.log)


def ask(port, prompt, tokens=TOKENS, enough=1 << 30):
    """The tokens of a stream, which the client leaves after `enough` of them."""
    asked = {"model": servers.MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    said = []
    with client_of(port).completions.create(
        **asked, extra_body={"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    ) as stream:
        for chunk in stream:
            said += chunk.choices[0].token_ids
            if len(said) >= enough:
                break
    return said


@pytest.mark.extended
def test_answers_are_the_models_with_drafts_from_the_first_step(tmp_path, record_property):
    model = save(tiny_model(seed=3, vocab_size=64, head_dim=32, max_position_embeddings=512), tmp_path / "model")
    (first, prompts), (second, answers) = (server(model, tmp_path, role) for role in ("kv_producer", "kv_consumer"))
    with servers.running(first, second), ThreadPoolExecutor(4) as pool:

        def answer(prompt, **more):
            ask(prompts.port, prompt, 1)
            return ask(answers.port, prompt, **more)

        once = [*pool.map(answer, PROMPTS)]
        left = [*pool.map(lambda prompt: answer(prompt, enough=1), PROMPTS[:4])]
        wait_until(lambda: metric(answers, "freedraft_requests") == 0)
        before = metric(answers, STEPS)
        again = [*pool.map(answer, PROMPTS)]
        for each in (prompts, answers):
            wait_until(lambda each=each: metric(each, "freedraft_requests") == 0)
        steps = (metric(answers, STEPS) - before) / len(PROMPTS)
        drafted = metric(prompts, "freedraft_draft_tokens_total")
        pages = [sums(get(each.port, "/metrics")) for each in (prompts, answers)]
    assert once == again == continuations(model, PROMPTS, TOKENS)
    assert all(len(said) < TOKENS for said in left)
    record_property("steps", f"{steps:.2f}")
    assert steps <= 4, "of up to 13 tokens: asked again, the answer is known from the first step on"
    assert drafted == 0, "prompts are read without drafts"
    whole_blocks = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS)
    assert pages[1]["vllm:external_prefix_cache_hits_total"] == whole_blocks
    for page in pages:
        assert page["vllm:num_requests_running"] == page["vllm:kv_cache_usage_perc"] == 0
