"""Engines on model runner V2, which GPUs are served by, on this CPU: its kernels run in Triton's interpreter, in
processes of their own. Async scheduling is on.

`ON_CPU` are served by vLLM's attention of CPUs, one after the other in one process, `ON_FLASH` by FlashAttention, whose
own kernels PyTorch computes: the interpreter takes a third longer for Triton's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm_cases import TINY, greedy_case, save_sets, seeded_case, token_prompts, two_skip_sets

from freedraft.draft_model import Window
from tests.support import prompts
from tests.support.images import IMAGE, VIDEO, add_torchvision, save_image_model
from tests.support.models import save, tiny_model, weaken

FOLDER = Path(__file__).parent / "v2_interpreted"
ROOT = Path(__file__).parents[2]
SMALL = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_batched_tokens": 64}
CRAMPED = {"num_gpu_blocks_override": 9, "block_size": 32}  # too little room for all requests
SSSD = {"method": "sssd", "num_speculative_tokens": 3, "policy": "fixed", "live": "store"}
SSSD_TREES = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed", "recycle": "on"}
TREES = SMALL | {"max_num_seqs": 8, "num_gpu_blocks_override": 18, "block_size": 16}
OFF = {"extra_args": {"freedraft": "off"}}
WINDOW = Window(16, 24)


def start(script, *arguments, **environment):
    """A script of `v2_interpreted`, run to its end."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_AOT_COMPILE": "0"}
    own["PYTHONPATH"] = os.pathsep.join([str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, str(FOLDER / script), *map(str, arguments)], os.environ | own | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)


def run(script, given, attention="", v2=True):
    """What a script says of this, on its last line."""
    pytest.importorskip("triton")
    runner = dict.fromkeys(("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"), str(int(v2)))
    done = start(script, json.dumps(given, default=str), INTERPRETED_ATTENTION=attention, **runner)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_images(folder, patch, note, v2):
    """What is said about images is said with drafts, in rounds that draft what was said before."""
    add_torchvision(patch)
    done = start("images.py", save_image_model(folder), 4, VLLM_USE_V2_MODEL_RUNNER=str(int(v2)))
    assert done.returncode == 0, done.stderr[-4000:]
    plain, found = json.loads(done.stdout.splitlines()[-1])
    (said,) = plain["answers"]
    assert found["answers"] == [said] * 4
    assert said[0] != said[-2], "another image has the same answer"
    assert not {IMAGE, VIDEO} & {token for answer in said for token in answer}, "else they may be drafted"
    (accepted, drafted), positions = found["drafts"], found["positions"]
    note("drafts", f"{accepted:.0f}/{drafted:.0f}")
    assert drafted >= accepted > 200 and found["marks drafted"] == []
    assert positions["wrong"] == plain["positions"]["wrong"] == 0 < positions["drafts"]


def serve(model, attention="", script="serve.py", **given):
    """What one engine says."""
    (found,) = run(script, [{"model": model} | given], attention)
    return found


class Given(NamedTuple):
    """What engines are made of: a random model with a vocabulary of 24, prompts, its answers, a folder for files."""

    model: Path
    prompts: list[dict[str, list[int]]]
    answers: list[list[int]]
    folder: Path


def chains(given):
    """`sssd`. Steps of three and four requests are not drafted for: what they gain is taken later."""
    cases = {"greedy": greedy_case(given.prompts, abort=6)}
    cases["seeded"] = (seeded := seeded_case()) | {"abort": 6}
    cases["seeded, alone"] = seeded | {name: seeded[name][2:3] for name in ("prompts", "each")}
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 4, 0], [5, 64, 3]]}
    few = SMALL | CRAMPED | {"launches": True, "max_num_seqs": 32}
    return {"model": given.model, "cases": cases, "speculative_config": SSSD | schedule} | few


def plain(given):
    """Without us, and with room for everything."""
    return {"model": given.model, "cases": {"seeded": seeded_case()}, "skip_tokenizer_init": True, "max_model_len": 64}


def skipping_by_default(given):
    """`layerskip`, asked by one request after the other, where drafts pay."""
    model, skipped = tiny_model(seed=7, **TINY | {"num_hidden_layers": 8}), range(1, 7)
    weaken(model, skipped, 0.05)
    folder = save(model, given.folder / "eight_layers")
    (file,) = save_sets(folder, given.folder, eight=(skipped, skipped))
    ids = prompts.random_ids([12] * 4, 24, first=2, seed=3)
    cases = {f"{i}": greedy_case(token_prompts([prompt]), 40) for i, prompt in enumerate(ids)}
    method = {"method": "layerskip", "num_speculative_tokens": 4, "skip_set": file}
    times = {"seconds": [0.02, 1e-4], "max_num_seqs": 4}
    return {"model": folder, "cases": cases, "speculative_config": method} | times | SMALL


def trees(given):
    """`sssd`, whose prompts are read in parts, among trees and chains."""
    pairs = zip(given.prompts, given.answers, strict=True)
    whole = token_prompts([prompt["prompt_token_ids"] + answer for prompt, answer in pairs])
    cases = {
        "mixed": greedy_case(given.prompts, chains=[1, 3, 4], abort=5),
        "from the cache": greedy_case(whole[-2:], 6),
        "to the end": greedy_case(2 * whole[:2], 64, chains=[2, 3]),
        "read": greedy_case(whole[-2:], 6, salt="other "),
        "seeded": seeded_case() | {"chains": [1, 4, 7], "abort": 6},
    }
    noted = {"kv": True, "warm_up": True, "drafts": True, "rows": 20, "launches": True}
    return {"model": given.model, "cases": cases, "speculative_config": SSSD_TREES | {"shape": "tree"}} | noted | TREES


def skipping(given):
    """`layerskip` with two skip sets, which drafts trees."""
    early = {"lookahead": "confidence", "threshold": 0.3, "num_speculative_tokens": 6, "shape": "tree"}
    cases = {name: greedy_case(given.prompts[:3], skip_set=name) for name in ("empty", "some")}
    cases |= {"chains": cases["some"] | {"chains": [0, 1, 2]}}
    cases |= {"mixed": greedy_case(given.prompts, skip_set="some", chains=[1, 3, 4], abort=6), "seeded": seeded_case()}
    method, noted = two_skip_sets(given.model, given.folder, **early), {"drafts": True, "kv": True, "max_num_seqs": 16}
    return {"model": given.model, "cases": cases, "speculative_config": method} | noted | SMALL | CRAMPED


def windowed(given, ids):
    """`layerskip` with a window and two skip sets, whose passes run as CUDA graphs do, or without where there is none
    so large."""
    folder = save(tiny_model("Llama", seed=11, num_hidden_layers=2, **TINY), given.folder / "windowed")
    asked = token_prompts(ids)
    cases = {"greedy": greedy_case(asked, 24, skip_set="empty")}
    cases["aborted"] = greedy_case(asked[:2], 24, skip_set="some", abort=5)
    method = two_skip_sets(folder, folder, window=WINDOW.tokens, sinks=WINDOW.sinks)
    noted = {"drafts": True, "graphs": True, "graph_sizes": [1, 2], "max_num_seqs": 3, "block_size": 16}
    return {"model": folder, "cases": cases, "speculative_config": method} | noted | SMALL | {"max_model_len": 128}


WINDOWED_IDS = prompts.random_ids((90, 45, 70), TINY["vocab_size"])


def on_cpu(given):
    engines = {"chains": chains, "plain": plain, "by default": skipping_by_default}
    return dict(zip(engines, run("serve.py", [make(given) for make in engines.values()]), strict=True))


def on_flash(given):
    engines = {"trees": trees(given), "skipping": skipping(given), "windowed": windowed(given, WINDOWED_IDS)}
    return dict(zip(engines, run("serve.py", list(engines.values()), "flash"), strict=True))
