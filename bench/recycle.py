"""Recycled logits through SGLang, or vLLM: tokens per step, and per second, with and without them.

    python bench/recycle.py --model build/model --questions spec_bench.jsonl --nodes 16 32 64 --json OUT
    python bench/recycle.py --engine vllm --model build/model --questions spec_bench.jsonl --nodes 9 --json OUT

Servers of `sssd` learn from what they answer (their stores are empty at first) and always verify trees of this many
nodes; they recycle logits or not, by option `recycle`. The questions are put to them in turns, so all meet the same
machine. Tokens per step depend on no clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib import questions as spec_bench
from bench.lib.machine import machine, versions
from bench.lib.prompts import chats
from bench.lib.results import write_json
from bench.lib.servers import HOST, MODEL_NAME, Server, build, free_port

BASELINE = "off"


def serve(arm: str, nodes: int, args: argparse.Namespace) -> Server:
    # SGLang counts the root among its draft tokens.
    speculative = {"method": "sssd", "num_speculative_tokens": nodes - (args.engine == "vllm")}
    speculative |= {"live": True, "policy": args.policy, "recycle": arm, "isolation": "shared"}
    speculative |= {"metrics_port": args.metrics_ports[arm]}
    log = Path("build/logs") / f"recycle-{args.engine}-{arm}-{nodes}.log"
    return build(arm, args.engine, args.model, log, dtype=args.dtype, speculative=speculative, requests=args.at_once)


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def recycling(port: int) -> bool:
    """Whether a drafter draws on recycled logits now."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
        (line,) = [line for line in answer.read().decode().splitlines() if line.startswith("freedraft_recycling ")]
    return float(line.split()[1]) == 1


def accepted(server: Server) -> int:
    """Draft tokens that a server of vLLM has accepted so far."""
    name = "vllm:spec_decode_num_accepted_tokens_total{"
    return int(sum(float(line.split()[-1]) for line in server.get("/metrics").splitlines() if line.startswith(name)))


def ask(server: Server, prompts: Sequence[str], tokens: int, at_once: int, engine: str) -> dict[str, Any]:
    """Put prompts to a server, so many at a time: their answers, seconds, tokens and the steps of all requests."""
    if engine == "vllm":
        before = accepted(server)
        body = {"model": MODEL_NAME, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        started = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            texts = list(pool.map(lambda p: post(f"{server.url}/v1/completions", body | {"prompt": p}), prompts))
        seconds = time.perf_counter() - started
        made = len(prompts) * (tokens - 1)  # the first comes with the prompt
        answers = [text["choices"][0]["text"] for text in texts]
        return {"answers": answers, "seconds": seconds, "tokens": made, "steps": made - (accepted(server) - before)}

    def one(prompt: str) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return post(f"{server.url}/generate", {"text": prompt, "sampling_params": sampling})

    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(one, prompts))
    seconds = time.perf_counter() - started
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    made = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)  # the first comes with the prompt
    return {"answers": [a["text"] for a in answers], "seconds": seconds, "tokens": made, "steps": steps}


def measure(nodes: int, groups: dict[str, list[str]], args: argparse.Namespace) -> dict[str, Any]:
    """All arms on all groups, in parts of as many questions as are asked at a time."""
    arms = [BASELINE, *args.arms]
    args.metrics_ports = {arm: free_port() for arm in arms}
    servers = [serve(arm, nodes, args) for arm in arms]
    parts = {
        name: [prompts[i : i + args.at_once] for i in range(0, len(prompts), args.at_once)]
        for name, prompts in groups.items()
    }
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {arm: {name: [] for name in groups} for arm in arms}
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
            ask(server, ["Once upon a time"], 16, 1, args.engine)
        for i in range(max(map(len, parts.values()))):
            for name, some in parts.items():
                for server in servers if i % 2 else servers[::-1]:
                    if i < len(some):
                        run = ask(server, some[i], args.tokens, args.at_once, args.engine)
                        run["recycling"] = recycling(args.metrics_ports[server.name])
                        runs[server.name][name].append(run)
    finally:
        for server in servers:
            server.stop()
    return {"nodes": nodes, "at_once": args.at_once} | figures(runs)


def figures(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    def per_step(some: Sequence[dict[str, Any]]) -> float:
        return sum(run["tokens"] for run in some) / sum(run["steps"] for run in some)

    every = {arm: [run for some in groups.values() for run in some] for arm, groups in runs.items()}
    over: dict[str, dict[str, Any]] = {}
    for arm in runs.keys() - {BASELINE}:
        pairs = list(zip(every[BASELINE], every[arm], strict=True))
        ratios = [off["seconds"] / on["seconds"] for off, on in pairs]
        step_seconds = [(on["seconds"] / on["steps"]) / (off["seconds"] / off["steps"]) for off, on in pairs]
        over[arm] = {
            "gain": per_step(every[arm]) / per_step(every[BASELINE]) - 1,
            "speed": statistics.median(ratios),
            "speed_quarters": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios,
            "step_seconds": statistics.median(step_seconds),
            "recycling_at_end": statistics.fmean(some[-1]["recycling"] for some in runs[arm].values()),
            "same": sum(off["answers"] == on["answers"] for off, on in pairs) / len(pairs),
        }
    return {
        "tokens_per_step": {arm: per_step(every[arm]) for arm in runs},
        "groups": {name: {arm: per_step(runs[arm][name]) for arm in runs} for name in runs[BASELINE]},
        "over": over,
    }


def left_out(files: Sequence[Path]) -> str:
    """All that these files of questions say, to find a question in it."""
    return "\n".join(
        " ".join(text.split())
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        for text in json.loads(line).values()
        if isinstance(text, str)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--questions", type=Path, required=True, help="in Spec-Bench's format")
    parser.add_argument("--per-group", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--policy", default="fixed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt-characters", type=int, default=3000, help="longer questions are left out")
    parser.add_argument("--arms", nargs="+", choices=("on", "auto"), default=["on"], help="values of option `recycle`")
    parser.add_argument("--leave-out", nargs="*", type=Path, default=[], help="questions that are in these JSONL files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    groups, known = {}, left_out(args.leave_out)
    for name, members in spec_bench.groups(spec_bench.load(args.questions)).items():
        short = [q.text for q in members if len(q.text) <= args.prompt_characters]
        short = [text for text in short if " ".join(text.split()) not in known]
        if short:
            groups[name] = chats(args.model, short[: args.per_group], tokenize=False)
    result: dict[str, Any] = {"machine": machine(), "versions": versions(args.engine, "torch"), "rows": []}
    result |= {
        "engine": args.engine,
        "tokens": args.tokens,
        "questions": sum(map(len, groups.values())),
        "policy": args.policy,
    }
    for nodes in args.nodes:
        row = measure(nodes, groups, args)
        result["rows"].append(row)
        steps = row["tokens_per_step"]
        for arm, over in row["over"].items():
            print(
                f"{nodes} nodes, {args.at_once} at a time, {arm}: {steps[BASELINE]:.3f} -> {steps[arm]:.3f} tokens per "
                f"step ({over['gain']:+.1%}), a step takes {over['step_seconds']:.3f} times as long, speed "
                f"{over['speed']:.3f}; at the end it recycles in {over['recycling_at_end']:.0%} of the groups; "
                f"same answers: {over['same']:.0%}",
                flush=True,
            )
        write_json(args.json, result, data=[args.questions])
    return 0


if __name__ == "__main__":
    sys.exit(main())
