"""The demo: the same prompts to a plain server and to one with SSSD, over HTTP, side by side.

    python -m bench.demo --engine vllm --model build/model --json build/demo.json

Both servers are up, but only one of them works at any moment: each prompt goes to one server, then to the other, in an
order that alternates between repeats, so that a slow minute of the machine affects both. One of the prompts is a
coding agent's session, each turn a request with everything before it. Prefix caching is on, and every repeat has its
own cache salt, so that it costs as much as the first. Exit code 1 if outputs differ in fp32 eager, where they must not.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from openai import OpenAIError

from bench.demo.measure import BASELINE, SSSD, Client, Prompt, measure, prompts, row
from bench.demo.store import ensure_store
from bench.lib import servers
from bench.lib.machine import cores, versions
from bench.lib.results import write_json
from bench.lib.tables import table

DRAFT_TOKENS, MODEL = 8, "SmolLM2-135M-Instruct"
COLUMNS = (
    "prompts={kind} | plain tok/s={plain_tps:.1f} | sssd tok/s={sssd_tps:.1f} | ratio={ratio:.2f} | "
    "repeats={ratio_min:.2f}-{ratio_max:.2f} | tok/step={?tokens_per_step:.2f} | identical={identical!y}"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plain and SSSD servers on the same prompts, side by side.")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--store", type=Path, default=Path("build/store"), help="datastore; built when it is not there")
    parser.add_argument("--json", type=Path, default=Path("build/demo.json"), help="file for the figures")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of an answer")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    args = parser.parse_args()
    if args.repeats < 1 or args.max_tokens < 1:
        parser.error("--repeats and --max-tokens must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"no model at {args.model}: python bench/demo/model.py {args.model}")
    return args


def rows_of(prompts: list[Prompt]) -> list[dict[str, Any]]:
    return [row(kind, [p for p in prompts if p.kind == kind]) for kind in dict.fromkeys(p.kind for p in prompts)]


def answer_all(clients: dict[str, Client], asked: list[Prompt], repeats: int, now: list[str]) -> None:
    """Measure, keep `now` up to date, and show a first table while the rest is measured."""
    kinds = len({prompt.kind for prompt in asked})
    now[0] = f"measuring: {len(asked)} prompts, {repeats} times each on both servers"
    for done, prompt in enumerate(measure(clients, asked, repeats), 1):
        times = ", ".join(f"{name} {answers[-1].seconds:.1f} s" for name, answers in prompt.answers.items())
        now[0] = f"{done} of {repeats * len(asked)} measured; {prompt.kind}: {times}"
        if done == kinds:
            print(f"\nthe first of each kind:\n\n{table(rows_of(asked[:done]), COLUMNS)}\n", flush=True)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the servers
    servers.keep_telling(now := ["preparing the datastore"])
    ensure_store(args.store, args.model)
    speculative = {"method": "sssd", "num_speculative_tokens": DRAFT_TOKENS, "datastore": str(args.store.resolve())}
    speculative |= {"isolation": "strict"}  # prompts are repeated, and learnt answers would be copied
    pair = {}
    for name, settings in ((BASELINE, None), (SSSD, speculative)):
        log = args.json.parent / "logs" / f"demo-{args.engine}-{name}.log"
        pair[name] = servers.build(name, args.engine, args.model, log, speculative=settings, prefixes=True)
    asked = prompts()
    now[0] = "starting both servers (one to three minutes)"
    with servers.running(*pair.values()):
        clients = {name: Client(args.engine, server, args.max_tokens) for name, server in pair.items()}
        answer_all(clients, asked, args.repeats, now)

    rows = rows_of(asked)
    about = {"engine": args.engine, "model": MODEL, "max_tokens": args.max_tokens, "repeats": args.repeats}
    write_json(args.json, about | {"speculative": speculative | {"datastore": str(args.store)}, "rows": rows})
    engine = ", ".join(f"{name} {version}" for name, version in versions(args.engine, f"{args.engine}-cpu").items())
    print(f"\n{engine}, {MODEL}, float32 eager, {cores()} cores, batch 1\n\n{table(rows, COLUMNS)}\n")
    print("ratio: 1.00 is the engine without freedraft; copying, code and agents should gain, stories should not lose")
    print(f"tok/s, ratio: medians of {args.repeats}, with prefill. tok/step: per pass of the model. In: {args.json}")
    if not all(r["identical"] for r in rows):
        print("error: outputs differ in fp32 eager, where they must be identical", file=sys.stderr)
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
