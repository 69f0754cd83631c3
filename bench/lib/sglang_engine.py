"""SGLang's CPU platform under a benchmark: layer skip switched by request."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.lib.engine import Drafting, Run, Switch, Turns, calls_in
from bench.lib.results import ROOT
from freedraft.step import Step

LOG = "LAYER_SKIP_BENCH_LOG"
ALGORITHM = "layerskip_in_turns"
PLAIN, DRAFT, TURNS = "plain", "draft", "turns"


def register() -> None:
    """Entry point of `sglang.srt.plugins` in the bench's engines: layer skip for whom `SglangEngine` wants it."""
    from freedraft.engines.sglang import registration
    from layerskip_plugin.method import SPEC

    registration.register(replace(SPEC, name=ALGORITHM, factory=f"{__name__}:make_method"))


def make_method(options: Any, context: Any, controller: Any = None) -> Any:
    from layerskip_plugin.method import SPEC

    method, turns = SPEC.make(options, context, controller), dict[str, Turns]()

    def wants(step: Step) -> bool:
        kind, length, number, _ = step.request_ids[0].split("-")
        if kind == TURNS:
            return turns.setdefault(number, Turns(int(length)))(step)
        return kind == DRAFT

    Switch(method, wants, Path(os.environ[LOG]))
    return method


class SglangEngine:
    """Has the interface of `bench.lib.engine.Engine`."""

    def __init__(self, engine: Any, log: Path) -> None:
        self._engine, self._log = engine, log
        self._numbers = itertools.count()

    def generate(self, prompts: Sequence[list[int]], tokens: int, *, drafting: Drafting) -> Run:
        kind = f"{TURNS}-{drafting.length}" if isinstance(drafting, Turns) else f"{DRAFT if drafting else PLAIN}-0"
        number = next(self._numbers)
        ids = [f"{kind}-{number}-{i}" for i in range(len(prompts))]
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self._engine.generate(input_ids=list(prompts), sampling_params=sampling, rid=ids)
        calls = [call for call in calls_in(self._log) if sorted(call.ids) == sorted(ids)]
        decoded = sum(sum(call.gained) for call in calls[1:])
        return Run([o["output_ids"] for o in outputs], calls, calls[-1].began - calls[0].began, decoded)


@contextmanager
def sglang_engine(
    model: Path, speculative: dict[str, Any], *, requests: int, length: int, exact: bool = False, prefixes: bool = False
) -> Iterator[SglangEngine]:
    """Chains of at most `num_speculative_tokens`; the other options of `speculative` are freedraft's."""
    from tests.sglang.conftest import sglang_engine as started

    given = {name: value for name, value in speculative.items() if name not in ("method", "num_speculative_tokens")}
    env = {f"FREEDRAFT_{name.upper()}": str(value) for name, value in given.items()} | {"FREEDRAFT_TREE": "0"}
    nodes = speculative["num_speculative_tokens"] + 1
    options = {"speculative_algorithm": ALGORITHM, "speculative_num_draft_tokens": nodes, "skip_tokenizer_init": True}
    options |= {"dtype": "float32" if exact else "bfloat16", "disable_radix_cache": not prefixes}
    options |= {"max_running_requests": requests, "max_total_tokens": max(8192, 2 * requests * length)}
    with tempfile.TemporaryDirectory() as folder:
        log, plugin = Path(folder) / "calls.jsonl", Path(folder) / "plugin"
        info = plugin / "freedraft_bench-0.dist-info"  # its entry point is called in the engine's processes
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: freedraft-bench\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nbench = {__name__}:register\n")
        env |= {
            LOG: str(log),
            "PYTHONPATH": os.pathsep.join([str(plugin), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        sys.path.insert(0, str(plugin))
        try:
            with started(model, env=env, **options) as engine:
                yield SglangEngine(engine, log)
        finally:
            sys.path.remove(str(plugin))
