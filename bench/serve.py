"""Latency against throughput: the same questions to servers with drafting and without, side by side.

    python bench/serve.py --questions question.jsonl --arms plain sssd ngram suffix --concurrency 1 4

An arm is the name of a preset or NAME=JSON (a speculative configuration of vLLM, or of SGLang with "engine": "sglang").
Blocks of questions of all groups go to all arms in turns, in an order that changes from block to block, while the other
servers idle; throughput counts only while all concurrent requests are in flight; see docs/benchmarks.md. After an
interruption, the same command continues the interrupted pass. Failures are named in the report, and the rest continues;
exit code 1 then, or if answers differ in fp32 eager.
"""

import argparse
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.lib import load, questions, servers, summary
from bench.lib.prompts import BY_KIND
from bench.lib.results import ROOT
from bench.lib.serving import PACKAGES, PRESETS, Arm, Report, Step, baseline_of, console, parse_arm
from bench.lib.tables import pivot

WARM_UP = 32  # tokens of each warm-up answer
ARCTIC = Path("build/arctic")  # built by bench/arctic.sh, for arm suffix


@dataclass
class Running:
    """An arm during the measurement, until it has `failed`."""

    arm: Arm
    server: servers.Server
    failed: bool = False


class Bench:
    """All arms, and the blocks that they still have to answer."""

    def __init__(self, args: argparse.Namespace, asked: Sequence[questions.Question], report: Report):
        self.args, self.report = args, report
        self.blocks = {c: questions.blocks(asked, c, args.rounds, args.limit) for c in args.concurrency}
        self.arms = [Running(arm, self.server(arm)) for arm in args.arms]

    def run(self) -> None:
        """Measure what is missing."""
        with console.status("") as self.status:
            try:
                for each in self.order():
                    self.one_pass(*each)
            finally:
                self.stop()

    def stop(self) -> None:
        for running in self.arms:
            running.server.stop()

    def order(self) -> Iterator[tuple[list[Running], int, int]]:
        """Yield passes over all questions: the arms that take part, the concurrency and the number of the repeat."""
        for repeat in range(self.args.repeats):
            first = repeat % len(self.arms)
            turns = [[running] for running in [*self.arms[first:], *self.arms[:first]]]
            for team in turns if self.args.in_turns else [self.arms]:
                for concurrency in self.args.concurrency:
                    yield team, concurrency, repeat

    def one_pass(self, arms: Sequence[Running], concurrency: int, repeat: int) -> None:
        """Send all blocks, in turns, to the arms that lack some. Servers start with nothing learnt or cached."""
        blocks, answered = self.blocks[concurrency], self.report.answered
        team = [r for r in arms if not r.failed and answered(r.arm.name, concurrency, repeat) < len(blocks)]
        self.stop()
        self.start(team, concurrency)
        for i, block in enumerate(blocks):
            turn = (i + repeat) % max(1, len(team))
            for running in [*team[turn:], *team[:turn]]:
                if not running.failed:
                    self.measure(running, Step(running.arm.name, concurrency, repeat, i), block)

    def start(self, team: Sequence[Running], concurrency: int) -> None:
        """Start the servers concurrently, then warm them up."""
        self.status.update(f"starting {len(team)} servers")
        for running in team:
            running.server = self.server(running.arm)  # on a port that is free now
            model, command = self.args.model, running.server.command
            command = [model.name if part == str(model) else part for part in command]
            self.report.commands[running.arm.name] = shlex.join(["python", *command[1:]])
            running.server.start()
        for running in team:
            try:
                running.server.wait_until_ready(self.args.start_limit)
            except servers.ServerError as error:
                self.give_up(running, str(error))
        # Warms up compiled code, thread pools and step times, on the demo's prompts, which are no questions.
        chats: list[load.Request] = [([{"role": "user", "content": text}], WARM_UP) for text in BY_KIND]
        for running in team:
            if not running.failed:
                outcome = self.ask(running, chats * math.ceil(2 * concurrency / len(chats)), concurrency)
                if outcome and outcome.errors:
                    self.give_up(running, f"warm-up: {outcome.errors[0]}")

    def server(self, arm: Arm) -> servers.Server:
        args = self.args
        log = args.json.parent / "logs" / f"serve-{arm.name}.log"
        options = {"dtype": args.dtype, "eager": not args.compiled, "device": args.device, "prefixes": True}
        options |= {"max_model_len": args.max_model_len, "requests": max(args.concurrency)}
        python = str(args.sglang_python if arm.engine == "sglang" else sys.executable)
        options |= {"speculative": arm.speculative, "python": python}
        server = servers.build(arm.name, arm.engine, args.model, log, **options)
        server.tied = True
        server.env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        if arm.engine == "vllm" and ARCTIC.is_dir():
            paths = (str(ARCTIC.resolve()), os.environ.get("PYTHONPATH"))
            server.env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return server

    def ask(self, running: Running, asked: Sequence[load.Request], concurrency: int) -> load.Outcome | None:
        """Send requests to an arm; None if the arm had to be given up."""
        url, template = running.server.url, self.args.chat_template_kwargs
        try:
            return load.ask(url, servers.MODEL_NAME, asked, concurrency, template)
        except Exception as error:
            self.give_up(running, f"{type(error).__name__}: {error}")
            return None

    def measure(self, running: Running, step: Step, block: Sequence[questions.Question]) -> None:
        of = f"block {step.block + 1} of {len(self.blocks[step.concurrency])}, pass {step.repeat + 1}"
        self.status.update(f"{step.arm}, {step.concurrency} at a time, {of}")
        outcome = self.ask(running, [request(q, self.args.max_tokens) for q in block], step.concurrency)
        if outcome is None:
            return
        if running.arm.engine == "vllm" and running.arm.speculative and outcome.accepted is None:  # nothing was drafted
            outcome = replace(outcome, drafted=0, accepted=0)
        self.report.add(step, [q.group for q in block], outcome)
        if outcome.errors:
            self.report.problem(f"arm '{step.arm}', {block[0].name} and following: {outcome.errors[0]}")
        process = running.server.process
        if process and process.poll() is not None:
            self.give_up(running, f"server ended with code {process.returncode}\n{running.server.tail()}")
        elif not any(outcome.answers):
            self.give_up(running, "all requests of a block failed")

    def give_up(self, running: Running, why: str) -> None:
        running.failed = True
        self.report.problem(f"arm '{running.arm.name}' is left out: {why}")
        self.report.write()
        running.server.stop()


def request(question: questions.Question, tokens: int) -> load.Request:
    """Return a request for half to one and a half `tokens`, the same for every arm: with equal lengths, plain decoding
    would answer in lockstep and prefill only between answers."""
    return question.chat, max(2, round(tokens * (0.5 + random.Random(question.name).random())))


def described(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the arms as the result file stores them, those of SGLang with the versions of its own environment. Raises
    ValueError (one line): there is no such environment."""
    if all(arm.engine == "vllm" for arm in args.arms):
        return {arm.name: asdict(arm) for arm in args.arms}
    packages = (*PACKAGES, "triton", "sglang-kernel", "flashinfer-python")
    code = f"import json; from bench.lib.machine import versions; print(json.dumps(versions(*{packages})))"
    try:
        command, env = [str(args.sglang_python.absolute()), "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
        other = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ValueError(f"--sglang-python {args.sglang_python} does not run: {error}") from None
    return {arm.name: asdict(arm) | ({"versions": other} if arm.engine == "sglang" else {}) for arm in args.arms}


def parse() -> argparse.Namespace:
    description, form = (__doc__ or "").partition("\n\n")[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    add = parser.add_argument
    named = "Spec-Bench's format; spec-bench, long, agent, quotes, sessions:FILE"
    add("--questions", nargs="+", required=True, metavar="FILE", help=named)
    kinds = f"{', '.join(PRESETS)} or NAME=JSON (a speculative configuration)"
    presets = [PRESETS[name] for name in ("plain", "sssd", "ngram")]
    add("--arms", nargs="+", type=parse_arm, default=presets, metavar="ARM", help=f"servers to compare: {kinds}")
    add("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="N")
    add("--limit", type=int, metavar="N", help="maximum questions per group, but at least a block")
    add("--rounds", type=int, default=8, metavar="N", help="questions per block and concurrent request")
    add("--max-tokens", type=int, default=128, metavar="N", help="mean length of answers")
    add("--max-model-len", type=int, default=8192, metavar="N", help="maximum tokens of a request")
    add("--repeats", type=int, default=1, metavar="N", help="passes over all questions")
    add("--model", type=Path, default=Path("build/model"), help="folder or name of the model")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16", "auto"), default="float32")
    add("--compiled", action="store_true", help="vLLM's compiled graphs instead of eager mode")
    add("--chat-template-kwargs", type=json.loads, metavar="JSON", help='for all chats: {"enable_thinking": false}')
    add("--in-turns", action="store_true", help="one server at a time, if memory does not hold all of them")
    add("--sglang-python", type=Path, default=Path(".venv/sglang/bin/python"), help="python of SGLang's environment")
    add("--start-limit", type=float, default=servers.START_LIMIT_S, metavar="S", help="time limit for a start")
    add("--json", type=Path, default=Path("build/serve.json"), help="file of results")
    add("--fresh", action="store_true", help="discard the file's earlier results")
    args = parser.parse_args()
    if min(args.concurrency) < 1 or args.repeats < 1 or args.max_tokens < 2 or args.rounds < 3:
        parser.error("--concurrency and --repeats must be at least 1, --max-tokens 2, --rounds 3")
    if len({arm.name for arm in args.arms}) < len(args.arms):
        parser.error("two arms have the same name")
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the servers
    asked = [question for name in args.questions for question in questions.read(name)]
    names = ("device", "dtype", "chat_template_kwargs", "max_tokens", "max_model_len", "in_turns", "rounds")
    settings = {"model": args.model.name} | {name: getattr(args, name) for name in names}
    files = {"files": [Path(name).name for name in args.questions], "limit": args.limit}
    settings["questions"] = files | {"sha256": questions.digest(asked)}
    settings |= {"warm_up": WARM_UP, "eager": not args.compiled, "arms": described(args)}
    report = Report.open(args.json, settings, args.fresh)
    try:
        Bench(args, asked, report).run()
    finally:
        report.write()
    rows = summary.rows(report.blocks, baseline_of(report.settings["arms"]))
    form = "{?tokens_per_second:.1f} ({decode_ms_per_token:.1f}) {?ratio:.2f}"
    print(pivot(rows, "at a time={concurrency} | questions={group}", "arm", form))
    print(f"tokens per second (ms per token of a request), and times plain; figures: {args.json}")
    exact = args.dtype == "float32" and not args.compiled
    differing = [r for r in rows if exact and r.get("identical") not in (None, 1.0)]
    for row in differing:
        where = f"arm '{row['arm']}', {row['concurrency']} at a time, {row['group']}"
        share = f"{1 - row['identical']:.1%} of answers differ from plain's in fp32 eager"
        console.print(f"[red]error:[/] {where}: {share}")
    return 1 if report.problems or differing else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, servers.ServerError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
