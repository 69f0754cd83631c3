"""The demo: the same prompts to a plain server and to one with SSSD, over HTTP, side by side.

    python -m bench.demo --engine vllm --model build/model --json build/demo.json

Both servers are up, but only one of them works at any moment: each prompt goes to one server, then to the other, in an
order that alternates between prompts and between rounds, so that a slow minute of the machine affects both. Some of the
prompts are the turns of a coding agent's session, each a request with everything before it. Prefix caching is on, and
every round has its own cache salt, so that it costs as much as the first. The table is drawn anew as results come; what
is no terminal gets it once every kind is measured, and at the end, which may be an interruption. Exit code 1 if outputs
differ in fp32 eager, where they must not.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from openai import OpenAIError
from rich.live import Live

from bench.demo.measure import BASELINE, SSSD, Client, measure, prompts, rows
from bench.demo.store import ensure_store
from bench.lib import servers
from bench.lib.machine import cores, cpu, versions
from bench.lib.results import write_json
from bench.lib.tables import table

DRAFT_TOKENS, MODEL = 8, "SmolLM2-135M-Instruct"
COLUMNS = (
    "prompts={kind} | tok/step={tokens_per_step:.2f} | plain tok/s={plain_tps:.1f} | sssd tok/s={sssd_tps:.1f} | "
    "ratio={ratio:.2f} | rounds={?ratio_min:.2f}-{?ratio_max:.2f} | identical={identical!y}"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plain and SSSD servers on the same prompts, side by side.")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--store", type=Path, default=Path("build/store"), help="datastore; built when it is not there")
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), help="file for the figures")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help="of all of it; every kind is measured")
    args = parser.parse_args()
    if args.max_tokens < 1:
        parser.error("--max-tokens must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"no model at {args.model}: python bench/demo/model.py {args.model}")
    return args


class Progress:
    """What is being done, the time that is left, and the table so far."""

    def __init__(self, minutes: float) -> None:
        self.doing, self.asked, self.ends = "preparing the datastore", prompts(), time.monotonic() + 60 * minutes

    def line(self) -> str:
        left = max(0, round(self.ends - time.monotonic()))
        return f"{self.doing}; {left // 60}:{left % 60:02} left"

    def table(self) -> str:
        return f"\n{table(rows(self.asked), COLUMNS)}\n" if rows(self.asked) else ""

    def drawing(self) -> str:
        return f"{self.table()}\n{self.line()}"


def answer_all(clients: dict[str, Client], progress: Progress, shown: bool) -> None:
    """Measure until the time is over. shown: whether the table is drawn all the time, not only once it is complete."""
    kinds = {prompt.kind for prompt in progress.asked}
    progress.doing = f"measuring {len(progress.asked)} prompts on both servers, round after round"
    for done, prompt in enumerate(measure(clients, progress.asked, progress.ends), 1):
        times = ", ".join(f"{name} {answers[-1].seconds:.1f} s" for name, answers in prompt.answers.items())
        progress.doing = f"{done} measured, {len(progress.asked)} in a round; {prompt.kind}: {times}"
        kinds.discard(prompt.kind)
        if not kinds and not shown:
            print(f"\nthe first of each kind:\n{progress.table()}", flush=True)
            shown = True


def stop(number: int, _: object) -> None:
    """End with the table so far; another signal must not keep the servers running."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    args = parse()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    progress = Progress(args.minutes)
    speculative = {"method": "sssd", "num_speculative_tokens": DRAFT_TOKENS, "datastore": str(args.store.resolve())}
    speculative |= {"isolation": "strict"}  # prompts are repeated, and learnt answers would be copied
    pair = {}
    for name, settings in ((BASELINE, None), (SSSD, speculative)):
        log = args.json.parent / "logs" / f"demo-{args.engine}-{name}.log"
        pair[name] = servers.build(name, args.engine, args.model, log, speculative=settings, prefixes=True)
    engine = ", ".join(f"{name} {version}" for name, version in versions(args.engine, f"{args.engine}-cpu").items())
    where = f"{engine}, {MODEL}, float32 eager, {cores()} cores of {cpu()}, batch 1"
    with Live(get_renderable=progress.drawing, transient=True, refresh_per_second=1) as live:
        if not live.console.is_terminal:
            servers.keep_telling(progress.line)
        ensure_store(args.store, args.model)
        progress.doing = "starting both servers (one to three minutes)"
        with servers.running(*pair.values()):
            clients = {name: Client(args.engine, server, args.max_tokens) for name, server in pair.items()}
            try:
                answer_all(clients, progress, live.console.is_terminal)
            finally:
                live.stop()
                print(f"\n{where}\n{progress.table() or 'nothing was measured'}", flush=True)

    found, rounds = rows(progress.asked), min(len(prompt.answers[SSSD]) for prompt in progress.asked)
    about = {"engine": args.engine, "model": MODEL, "max_tokens": args.max_tokens, "rounds": rounds}
    write_json(args.json, about | {"speculative": speculative | {"datastore": str(args.store)}, "rows": found})
    print("ratio: 1.00 is the engine without freedraft; copying, code and agents should gain, stories should not lose")
    print(f"tok/s, ratio: medians of rounds, {rounds} complete, with prefill. tok/step: per pass of the model.")
    print(f"In {args.json}; more rounds: make demo DEMO_FLAGS='--minutes 30'")
    if not all(r["identical"] for r in found):
        print("error: outputs differ in fp32 eager, where they must be identical", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (servers.ServerError, OpenAIError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
