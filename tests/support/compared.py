"""A plain and a drafting server on this CPU, for `freedraft compare`."""

import os
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import pytest

from bench.lib import servers
from freedraft.compare import BOTH, SAME, Server, compare
from tests.support.models import save, save_byte_tokenizer, tiny_model

ROOT = Path(__file__).parents[2]
DRAFTING = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed"}
FLAGS = {
    "vllm": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"],
    "sglang": ["--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3", "--enable-deterministic-inference"],
}
FLAGS["vllm"] += ["--structured-outputs-config", '{"enable_in_reasoning": true}']
# What `make compare` asks of model runner V2, which Triton's interpreter serves slowly.
RECORDED = """a copy*; a chat; code; streamed; a stop string*; a stop token*; logprobs*; chat logprobs; prompt logprobs;
*penalt*; bad words; allowed tokens; a schema*; a regex; a choice; a grammar; tools, streamed; a tool named; the
same seed*; seeds beside*; a seed*; three answers; to the end*; beyond the context; no answers; the same prompt
again; a cached prompt*; streams cut*; a mixed batch; min_p; a bias*"""
# What a test asks of it: one of each that takes a path of its own there.
TESTED = """a stop string with logprobs; prompt logprobs; all penalties*; a schema, streamed; a seed and penalties;
three answers; to the end of the context; streams cut beside others; a mixed batch; min_p"""


def patterns(kinds):
    return [" ".join(kind.split()) for kind in kinds.split(";")]


CONTROLLED = ["a chat", "a copy", "streamed", "a prefix shared"]  # asked of one server, without and with drafts
UNDRAFTED = {"one token", "one token left", "beams", "sixteen answers"}  # or of too few tokens
# By vLLM, of every speculative method on V2.
REFUSED = {"min_p", "a seed and min_p", "a bias against a token", "a bias for a token", "logprobs of chosen tokens"}
# Plugins of the engine: SGLang's lets seeds be heeded on a CPU, vLLM's runs model runner V2.
PLUGINS = {"sglang": "tests/sglang/plugin", "vllm-v2": "tests/vllm/v2_interpreted"}


def pair(arm, model, folder, room=1024):
    """Two servers that are not started. arm: vllm, vllm-v2 (interpreted) or sglang; room: tokens of a context."""
    engine = arm.removesuffix("-v2")
    sizes = {"requests": 16, "max_model_len": room, "prefixes": True}
    for name, speculative in (("plain", None), ("drafting", DRAFTING)):
        made = servers.build(name, engine, model, folder / f"{name}.log", speculative=speculative, **sizes)
        made.command += FLAGS[engine]
        made.env["OMP_NUM_THREADS"] = "1"
        made.env |= {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1"}
        if arm in PLUGINS:
            path = [str(ROOT / PLUGINS[arm]), str(ROOT), os.environ.get("PYTHONPATH", "")]
            made.env |= {"PYTHONPATH": os.pathsep.join(path), "VLLM_USE_V2_MODEL_RUNNER": "1", "SERVED_AS_ON_GPUS": "1"}
        yield made


def byte_model(folder, demo_model, layers=2):
    """A random model whose tokens are bytes, with the demo model's chats."""
    size = save_byte_tokenizer(folder, (demo_model / "chat_template.jinja").read_text())
    shape = {"vocab_size": size, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape["num_hidden_layers"] = layers
    return save(tiny_model(seed=7, head_dim=32, max_position_embeddings=1024, **shape), folder)


@contextmanager
def compared(arm, model, folder, room=1024):
    """The two, running, as `freedraft compare` sees them."""
    made = list(pair(arm, model, folder, room))
    with servers.running(*made):
        yield [Server(server.url) for server in made]


def check_kinds(arm, model, folder, only=()):
    """That two servers answer every kind alike, most of them with drafts, and what is not compared."""
    with compared(arm, model, folder) as (plain, drafting):
        rows = {row["kind"]: row for row in compare(plain, drafting, only)}
        with pytest.raises(ValueError, match="name a server without speculative decoding first"):
            next(compare(drafting, plain))
        with pytest.raises(ValueError, match="no kind of request is called elephants"):
            next(compare(plain, drafting, ["elephants"]))
        for name in plain.about:
            other = copy(plain)
            other.about = plain.about | {name: "another"}
            with pytest.raises(ValueError, match=f"cannot be compared: {name} another and {drafting.about[name]}"):
                next(compare(other, drafting))
        own = [] if arm == "vllm-v2" else CONTROLLED  # interpreted, it takes minutes
        control = list(compare(Server(drafting.url, off=True), drafting, own)) if own else []
        assert all(row["outcome"] == SAME and row["accepted"] for row in control), control
    different = {kind: row["difference"] for kind, row in rows.items() if row["outcome"] not in (SAME, BOTH)}
    different = {kind: where for kind, where in different.items() if arm != "vllm-v2" or kind not in REFUSED}
    assert not different, different
    undrafted = {kind for kind, row in rows.items() if row["outcome"] == SAME and not row["accepted"]}
    if arm == "sglang":  # there these have no drafts
        undrafted = {kind for kind in undrafted if "penalt" not in kind and "min_tokens" not in kind}
    assert len(rows) >= (len(only) or 80) and undrafted <= UNDRAFTED, undrafted
