"""`window: 512` beside `window: auto` on SGLang's CPU platform, in turns of 4 steps within the same requests.

    python -m bench.windows_in_turns --cells 8:4000 8:7500 --json build/windows-in-turns.json

Both share the measured times of steps and passes. By cell of batch and context: ratios of speeds of neighbouring turns,
median and quartiles, and how many rounds of each had which window.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.engine import plugin
from bench.lib.prompts import long_chats
from bench.lib.results import ROOT, write_json
from freedraft.draft import DraftBatch
from freedraft.step import Step

ALGORITHM, LOG = "windows_in_turns", "WINDOWS_IN_TURNS_LOG"
TURN, ORDER = 4, ("plain", "auto", "512", "plain", "512", "auto")


class Arms:
    """Replaces `method.draft`: the name of a request says what drafts for it, or that all do in turns."""

    def __init__(self, method: Any, log: Path) -> None:
        self.method, self.inner, self.log = method, method.draft, log
        self.arms: dict[str, Any] = {}
        self.n, self.ids, self.before = 0, set[str](), "plain"
        method.draft = self.draft

    def make(self) -> None:
        from layerskip_plugin.lookahead import Cost
        from layerskip_plugin.rounds import Recipes

        method = self.method
        fixed = Recipes(method.selection.sets.values(), method.windows[:1], method.context.page_size or 1)
        lookahead = Cost(method.costs, fixed.all)
        lookahead.reads_ahead = method.lookahead.reads_ahead
        self.arms = {"auto": (method.recipes, method.lookahead), "512": (fixed, lookahead)}

    def draft(self, step: Step, **how: Any) -> DraftBatch:
        if not self.arms:
            self.make()
        method, began, ids = self.method, time.perf_counter(), list(step.request_ids)
        if set(ids) != self.ids:
            self.ids, self.n = set(ids), 0
        name = ids[0].split("-")[0] if ids else "plain"
        arm = ORDER[self.n // TURN % len(ORDER)] if name == "turns" else name
        if arm != self.before != "plain" and method._last is not None:
            last, method._last = method._last, None
            if (outcome := last.outcome(step)) is not None:
                method.lookahead.record_acceptance(outcome)
        if arm == "plain":
            if self.before != "plain":
                method.controller.learn(step)
                method.update(step)
            method.controller.interrupt()
            method.unmatched = np.zeros(step.batch_size, np.bool_)
            draft = DraftBatch.roots(step.roots)
        else:
            method.recipes, method.lookahead = self.arms[arm]
            draft = self.inner(step, **how)
        window = method.recipe.window.tokens if draft.max_nodes > 1 else 0
        call = {"began": began, "ids": ids, "arm": arm, "n": self.n, "window": window, "gained": step.gained.tolist()}
        with self.log.open("a") as file:
            file.write(json.dumps(call) + "\n")
        self.n, self.before = self.n + 1, arm
        return draft


def register() -> None:
    """Entry point of `sglang.srt.plugins`."""
    from freedraft.engines.sglang import registration
    from layerskip_plugin.method import SPEC

    registration.register(replace(SPEC, name=ALGORITHM, factory=f"{__name__}:make_method"))


def make_method(options: Any, context: Any, controller: Any = None) -> Any:
    from layerskip_plugin.method import SPEC

    method = SPEC.make(options, context, controller)
    Arms(method, Path(os.environ[LOG]))
    return method


def figures(calls: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Of steps of the whole batch."""
    ratios: dict[str, list[float]] = {"auto/plain": [], "512/plain": [], "512/auto": []}
    windows: dict[str, dict[int, int]] = {"auto": {}, "512": {}}
    for _, group in itertools.groupby(calls, key=lambda call: call["ids"][0]):
        steps = list(itertools.pairwise(call for call in group if len(call["ids"]) == batch))
        speeds = []
        for _, turn in itertools.groupby(steps, key=lambda step: step[0]["n"] // TURN):
            part = list(turn)
            gained, seconds = sum(sum(b["gained"]) for _, b in part), sum(b["began"] - a["began"] for a, b in part)
            if len(part) == TURN:
                speeds.append((part[0][0]["arm"], gained / seconds))
            for a, _ in part:
                if a["window"]:
                    windows[a["arm"]][a["window"]] = windows[a["arm"]].get(a["window"], 0) + 1
        for pair in itertools.pairwise(speeds):
            speed = dict(pair)
            for name, found in ratios.items():
                above, below = name.split("/")
                if speed.keys() == {above, below}:
                    found.append(speed[above] / speed[below])
    result: dict[str, Any] = {"windows": windows}
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        result[name] = {"turns": len(found), "median": middle, "quartiles": [low, high]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model")
    parser.add_argument("--cells", nargs="+", help="batch:context")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=112)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from tests.sglang.conftest import sglang_engine

    cells = [tuple(map(int, cell.split(":"))) for cell in args.cells]
    most, longest = max(batch for batch, _ in cells), max(context for _, context in cells)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        log, installed = Path(folder) / "calls.jsonl", plugin(Path(folder) / "plugin", f"{__name__}:register")
        paths = [str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {LOG: str(log), "PYTHONPATH": os.pathsep.join(paths)}
        env |= {"FREEDRAFT_WINDOW": "auto", "FREEDRAFT_SHAPE": "chain"}
        sys.path.insert(0, str(installed))
        options = {"speculative_algorithm": ALGORITHM, "speculative_num_draft_tokens": 6, "skip_tokenizer_init": True}
        options |= {"max_running_requests": most, "max_total_tokens": (most + 4) * (longest + 512)}
        with sglang_engine(args.model, env=env, chunked_prefill_size=2048, **options) as engine:
            for batch, context in cells:
                prompts = long_chats(args.model, context, batch)
                for name, tokens in (("plain", 8), ("auto", 24), ("512", 24), *[("turns", args.tokens)] * args.rounds):
                    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
                    ids = [f"{name}-{len(rows)}-{time.monotonic_ns()}-{i}" for i in range(batch)]
                    engine.generate(input_ids=list(prompts), sampling_params=sampling, rid=ids)
                calls = [json.loads(line) for line in log.read_text().splitlines()]
                turns = [call for call in calls if call["ids"] and call["ids"][0].startswith(f"turns-{len(rows)}-")]
                rows.append({"batch": batch, "context": context} | figures(turns, batch))
                print(json.dumps(rows[-1]), flush=True)
    write_json(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
