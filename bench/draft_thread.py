"""Drafting time that a separate thread hides behind a device, in SGLang's adapter.

    python bench/draft_thread.py --json OUT        # in SGLang's environment

Runs the adapter's `Drafting` on SGLang's own requests and batches, in the order of its overlapped scheduler: prepare
the step, which waits for the device; resolve the inputs of the pass; take the drafts; launch the pass. The device is
simulated: accepted tokens arrive 5 ms after the launch of a pass, until when the host sleeps without the GIL. Resolving
inputs takes `--between` us, with the GIL. Medians in us.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.lib.machine import rounded
from bench.lib.results import write_json
from tests.sglang import test_drafting as adapter

PASS, NODES, VOCABULARY, PROMPT, GAINED, WARM, STEPS = 5e-3, 16, 49152, 500, 3, 20, 100


def measure(batch: int, between: float, thread: bool) -> dict[str, Any]:
    from freedraft.engines.sglang.accepted import AcceptedTokens, OneCopy
    from freedraft.engines.sglang.drafting import Drafting
    from freedraft.guarded_method import GuardedMethod
    from freedraft.step import EngineContext
    from sssd_plugin.method import SPEC
    from sssd_plugin.options import SssdOptions

    options = SssdOptions(policy="fixed", recycle="off", draft_timeout_ms=1000.0 * thread)
    context = EngineContext(vocab_size=VOCABULARY, max_draft_tokens=NODES - 1, widths=(1, 4, NODES))
    accepted = AcceptedTokens(batch + 1, NODES, "cpu")
    drafting = Drafting(GuardedMethod(SPEC, options, context), context.widths or (), batch, accepted)
    text = np.tile(np.random.default_rng(0).integers(1, VOCABULARY, 60), 100)
    requests = [adapter.request(str(i), text[i : i + PROMPT].tolist()) for i in range(batch)]
    drafting.begin(requests)
    over, waited, idle = time.perf_counter() + PASS, [], []
    for step in range(STEPS):
        starts = [i + PROMPT + step * GAINED for i in range(batch)]
        gained = {r: text[at : at + GAINED].tolist() for r, at in zip(requests, starts, strict=True)}
        scheduled = adapter.decoding_batch(gained, accepted)
        done = SimpleNamespace(synchronize=lambda at=over: time.sleep(max(at - time.perf_counter(), 0.0)))
        accepted.newest = OneCopy(accepted.newest.host, done)
        drafting.prepare(scheduled)
        resolved = time.perf_counter() + between
        while time.perf_counter() < resolved:
            pass
        asked = time.perf_counter()
        drafts = drafting.draft(scheduled)
        launched = time.perf_counter()
        waited.append(1e6 * (launched - asked))
        idle.append(1e6 * (launched - over))
        over = launched + PASS
        drafting.note(scheduled, drafts)
        adapter.read_result(gained)
    drafting.guarded.close()
    row = {"waited": statistics.median(waited[WARM:]), "idle": statistics.median(idle[WARM:])}
    return {"requests": batch, "between": round(1e6 * between), "thread": thread} | rounded(row, 0)


def main() -> None:
    os.environ["SGLANG_PLATFORM"] = "freedraft_cpu"
    importlib.import_module("freedraft.engines.sglang.hooks")  # allows SGLang to be imported without a GPU
    from sglang.srt.runtime_context import get_context

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--between", type=float, nargs="+", default=[0.0, 150.0], help="us")
    args, rows = parser.parse_args(), []
    adapter.NODES, adapter.VOCAB_SIZE = NODES, VOCABULARY
    with get_context().override_server_args(device="cpu", enable_custom_logit_processor=True):
        for batch, between, thread in itertools.product((1, 8, 32), args.between, (False, True) * 2):
            rows.append(measure(batch, 1e-6 * between, thread))
            print(rows[-1], flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
