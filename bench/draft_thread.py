"""Drafting time that a separate thread hides behind a device, in the adapters of SGLang and of vLLM's model runner V2.

    python bench/draft_thread.py sglang --json OUT        # in SGLang's environment
    python bench/draft_thread.py vllm --json OUT          # in vLLM's

Runs an adapter's `Drafting` on the engine's own requests and batches, in the order of its overlapped scheduler. The
device is simulated: accepted tokens arrive 5 ms after the launch of a pass, until when the host sleeps without the GIL.
SGLang: wait for the pass, resolve the next one's inputs (`--between` us, with the GIL), take the drafts, launch it.
vLLM: prepare the next pass (`--between` us, in short operations of PyTorch), wait for the running one, draft, launch;
its adapter has no thread, here one drafts as soon as the tokens arrive. Figures, in us, are of the step of 300 before
which the device idles least: other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.lib.results import write_json
from tests.support.models import DEMO_MODEL

PASS, NODES, VOCABULARY, PROMPT, GAINED, WARM, STEPS = 5e-3, 16, 49152, 500, 3, 20, 320
OPTIONS = {"policy": "fixed", "recycle": "off"}
BETWEEN = {"sglang": (0.0, 150.0), "vllm": (1500.0, 7000.0)}
TEXT = np.tile(np.random.default_rng(0).integers(1, VOCABULARY, 60).astype(np.int32), 100)
Seconds = list[float]


def sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0.0))


def sglang(batch: int, between: float, thread: bool) -> tuple[Seconds, Seconds]:
    """Of each step: how long it waits for its drafts, and how long the device idles before it."""
    from freedraft.engines.sglang.accepted import AcceptedTokens, OneCopy
    from freedraft.engines.sglang.drafting import Drafting
    from freedraft.guarded_method import GuardedMethod
    from freedraft.step import EngineContext
    from sssd_plugin.method import SPEC
    from tests.sglang import test_drafting as adapter

    adapter.NODES, adapter.VOCAB_SIZE = NODES, VOCABULARY
    options = SPEC.option_type.parse({**OPTIONS, "draft_timeout_ms": 1000.0 * thread})
    context = EngineContext(vocab_size=VOCABULARY, max_draft_tokens=NODES - 1, widths=(1, 4, NODES))
    accepted = AcceptedTokens(batch + 1, NODES, "cpu")
    drafting = Drafting(GuardedMethod(SPEC, options, context), context.widths or (), batch, accepted)
    requests = [adapter.request(str(i), TEXT[i : i + PROMPT].tolist()) for i in range(batch)]
    drafting.begin(requests)
    over, waited, idle = time.perf_counter() + PASS, [], []
    for step in range(STEPS):
        starts = [i + PROMPT + step * GAINED for i in range(batch)]
        gained = {r: TEXT[at : at + GAINED].tolist() for r, at in zip(requests, starts, strict=True)}
        scheduled = adapter.decoding_batch(gained, accepted)
        accepted.newest = OneCopy(accepted.newest.host, SimpleNamespace(synchronize=partial(sleep_until, over)))
        drafting.prepare(scheduled)
        resolved = time.perf_counter() + between
        while time.perf_counter() < resolved:
            pass
        asked = time.perf_counter()
        drafts = drafting.draft(scheduled)
        launched = time.perf_counter()
        waited.append(launched - asked)
        idle.append(launched - over)
        over = launched + PASS
        drafting.note(scheduled, drafts)
        adapter.read_result(gained)
    drafting.guarded.close()
    return waited, idle


def vllm(batch: int, between: float, thread: bool) -> tuple[Seconds, Seconds]:
    """The same; the wait for drafts begins when the pass is over and the next one is prepared."""
    from freedraft.draft_thread import DraftThread
    from tests.support.v2_drafting import Decoding

    texts = np.stack([TEXT[i : i + 2048] for i in range(batch)])
    options = {"method": "sssd", "num_speculative_tokens": NODES - 1, **OPTIONS}
    decoding, drafter = Decoding(DEMO_MODEL, texts, PROMPT, options), DraftThread(1.0, int)
    over, waited, idle, small = time.perf_counter() + PASS, [], [], torch.zeros(8)
    for _ in range(STEPS):
        decoding.launch(GAINED, SimpleNamespace(synchronize=partial(sleep_until, over), record=int))
        ahead = drafter.start(decoding.draft) if thread else None
        prepared = time.perf_counter() + between
        while time.perf_counter() < prepared:
            small.add_(1)
        asked = max(time.perf_counter(), over)
        assert drafter.result(ahead) if thread else decoding.draft()
        launched = time.perf_counter()
        waited.append(launched - asked)
        idle.append(launched - over)
        over = launched + PASS
    decoding.drafting.guarded.close()
    return waited, idle


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=sorted(BETWEEN))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--between", type=float, nargs="+", help="us")
    args, rows, started = parser.parse_args(), [], nullcontext()
    if args.engine == "sglang":
        os.environ["SGLANG_PLATFORM"] = "freedraft_cpu"
        importlib.import_module("freedraft.engines.sglang.hooks")  # allows SGLang to be imported without a GPU
        from sglang.srt.runtime_context import get_context

        started = get_context().override_server_args(device="cpu", enable_custom_logit_processor=True)
    arms: Any = itertools.product((1, 8, 32), args.between or BETWEEN[args.engine], (False, True) * 2)
    with started:
        for batch, between, thread in arms:
            waited, idle = {"sglang": sglang, "vllm": vllm}[args.engine](batch, 1e-6 * between, thread)
            best = min(range(WARM, STEPS), key=idle.__getitem__)
            row: dict[str, Any] = {"requests": batch, "between": round(between), "thread": thread}
            row |= {"waited": round(1e6 * waited[best]), "idle": round(1e6 * idle[best])}
            rows.append(row)
            print(rows[-1], flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
