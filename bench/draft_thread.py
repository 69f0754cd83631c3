"""What a thread of the drafter's own hides behind a device, in steps of SGLang's scheduler.

The device is a stand-in: a pass of the target is launched at once, and what it accepts is there 5 ms later, for which
the host sleeps without the GIL. Three of four tokens are followed by what followed them before. Medians in us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.lib.results import write_json
from bench.lib.sglang_engine import plugin

LOG, PASS = "DRAFT_THREAD_LOG", 5e-3
VOCABULARY, NODES, BATCHES, PROMPT, WARM, TOKENS = 512, 16, (1, 8, 32), 200, 20, 700


def register() -> None:
    """Entry point of `sglang.srt.plugins`: puts the stand-in in the target's place, and writes a line for each step."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from freedraft.engines.sglang.accepted import AcceptedTokens, OneCopy
    from freedraft.engines.sglang.drafting import Drafting

    forward, put, draft = TpModelWorker.forward_batch_generation, AcceptedTokens.put, Drafting.draft
    row, over = dict[str, float](), [0.0]  # when the device has done what was launched last

    def launched(self: Any, batch: Any, *given: Any, is_verify: bool = False, **more: Any) -> Any:
        if not is_verify:
            return forward(self, batch, *given, is_verify=is_verify, **more)
        now = time.perf_counter()
        row.update(batch=len(batch.reqs), idle=max(now - over[0], 0.0))
        with Path(os.environ[LOG]).open("a") as file:
            file.write(json.dumps(row) + "\n")
        over[0] = max(now, over[0]) + PASS
        at = batch.spec_info.positions.long()
        following = (batch.input_ids.long() * 167 + 13 + (at % 4 == 0) * at * 31) % VOCABULARY
        logits = torch.nn.functional.one_hot(following, VOCABULARY).float()
        return GenerationBatchResult(logits_output=LogitsProcessorOutput(next_token_logits=logits))

    def putting(self: AcceptedTokens, *given: Any) -> None:
        put(self, *given)
        at = over[0]
        done = SimpleNamespace(synchronize=lambda: time.sleep(max(at - time.perf_counter(), 0.0)))
        self.newest = OneCopy(self.newest.host, done)

    def drafting(self: Drafting, batch: Any) -> Any:
        began = time.perf_counter()
        tree = draft(self, batch)
        row["drafts"] = time.perf_counter() - began
        return tree

    TpModelWorker.forward_batch_generation, AcceptedTokens.put, Drafting.draft = launched, putting, drafting


def measure(engine: Any, log: Path, batch: int) -> dict[str, Any]:
    log.write_text("")
    prompts = [[(7 * i + 5 * j) % VOCABULARY for j in range(PROMPT)] for i in range(batch)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    engine.generate(input_ids=prompts, sampling_params=sampling)
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if row["batch"] == batch][WARM:]
    medians = {name: round(1e6 * statistics.median(row[name] for row in rows)) for name in ("drafts", "idle")}
    return {"batch": batch, "steps": len(rows)} | medians


def main() -> None:
    from tests.sglang.conftest import make_tiny, sglang_engine

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    path, rows = parser.parse_args().json, list[dict[str, Any]]()
    options = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": NODES, "skip_tokenizer_init": True}
    options |= {"max_running_requests": max(BATCHES), "max_total_tokens": 2 * max(BATCHES) * (PROMPT + TOKENS)}
    with tempfile.TemporaryDirectory() as name:
        log, path_there = Path(name) / "log", plugin(Path(name) / "plugin", "bench.draft_thread:register")
        env = {LOG: str(log), "PYTHONPATH": path_there, "FREEDRAFT_SCORING": "learned"}
        model = make_tiny(Path(name) / "model", vocab_size=VOCABULARY, tokenizer=None)
        for timeout in ("0", "1000") * 2:
            env["FREEDRAFT_DRAFT_TIMEOUT_MS"] = timeout
            with sglang_engine(model, env=env, disable_radix_cache=True, **options) as engine:
                rows += [{"thread": timeout != "0"} | measure(engine, log, batch) for batch in BATCHES]
    print(*rows, sep="\n")
    write_json(path, {"rows": rows})


if __name__ == "__main__":
    main()
