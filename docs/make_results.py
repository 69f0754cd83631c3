"""Writes results.md from the files of results, each with its command, commit, versions and machine.

python docs/make_results.py           # write it
python docs/make_results.py --check   # exit code 1 when it is out of date

A file without a manifest, or changed since its benchmark wrote it, is refused by name.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report
from bench.lib.results import checked
from bench.lib.tables import markdown, pivot, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("results.md")
FOLDER = ROOT / "bench" / "results"

HEAD = """\
# Results

<!-- Written by docs/make_results.py from bench/results: run a benchmark with --json there, then that. -->

Everything here ran on CPUs: 2 cores of an AMD EPYC, without a GPU, often beside other work. Ratios are of arms that
took turns in one run, and mean something; tokens per second and milliseconds are those of this machine. The engines'
CPU builds have other kernels than those for GPUs, and little idle arithmetic to use: gains there will differ. Draft
quality by replay is the same on every machine. How to measure it yourself: [benchmarks.md](benchmarks.md).
"""
ON_A_GPU = "On a GPU: "
"""How titles of sections begin that are not of CPUs."""


class Section(NamedTuple):
    """A part of the page: `body` makes Markdown of what the files in `bench/results` hold, in their order."""

    title: str
    files: list[str]
    body: Callable[..., str]


SECTIONS: list[Section] = []
NAMES = {"sssd": "freedraft", "suffix": "ArcticInference suffix decoding", "lookup": "prompt lookup"}


def section(title: str, files: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """The function makes the section with this title of these files; its docstring is the text above."""

    def add(body: Callable[..., str]) -> Callable[..., str]:
        SECTIONS.append(Section(title, files.split(), body))
        return body

    return add


def spread(value: str, bounds: str) -> str:
    """The format of a value with its bounds in brackets."""
    return f"{value} ({{{bounds}[0]:.2f}}-{{{bounds}[1]:.2f}})"


@section("Over HTTP, on the demo's prompts", "demo-vllm-cpu.json demo-sglang-cpu.json")
def demo(vllm: Any, sglang: Any) -> str:
    """SmolLM2-135M-Instruct, fp32, eager, one request at a time, prefill included; two servers, prompts alternating
    between them; datastore of Python's library, 2.4 M tokens, built in seconds. vLLM verifies chains, SGLang trees.
    Ratios depend on the state of the machine."""
    return table(
        (row | {"engine": name} for name, result in (("vLLM", vllm), ("SGLang", sglang)) for row in result["rows"]),
        "engine={engine} | prompts={kind} | plain tok/s={plain_tps:.1f} | sssd tok/s={sssd_tps:.1f} | "
        "ratio (repeats)=**{ratio:.2f}** ({ratio_min:.2f}-{ratio_max:.2f}) | "
        "tokens per step={tokens_per_step:.2f} | identical={identical!y}",
    )


@section("Over HTTP, against plain decoding and vLLM's own drafters", "serve-vllm-cpu.json")
def serve(result: Any) -> str:
    """Questions of all groups in one closed loop. `sssd` is the README's one flag: it starts with an empty datastore
    and learns from what it answers; `ngram` and `suffix` (ArcticInference) have the settings of vLLM's documentation.
    Prefix caching in all. Over plain, with 95 % intervals: of all questions throughput under full load, prefill
    included; of a group the time of a request for each token after the first.

    ![Latency against throughput](../bench/results/serve-vllm-cpu-latency-throughput.png)"""
    said = f"{report.conditions(result)} {report.below_plain(result)}"
    return "\n\n".join(filter(None, [said, report.markdown(result), report.rivals(result)]))


@section("How much is drafted, on machines with known step times", "budget-replay.json")
def budget_replay(result: Any) -> str:
    """Answers of Llama-3.1-8B replayed, chains; step times with 8 % noise that the policies do not know; drafting time
    included. `cpu`: these two cores with SmolLM2; `h200`: the roofline of an 8B model."""
    arms = [arm for arm in result["rows"][0]["ratio"] if arm != "plain"]
    return table(result["rows"], "machine={machine} | batch={batch}", *(f"{arm}={{ratio[{arm}]:.2f}}" for arm in arms))


@section("Draft quality, by replay", "replay.json")
def replay(rows: Any) -> str:
    """Recorded answers; of these, the scorer was trained on the first 240 rows of the Llama trace, which are in the
    store and not replayed. Deterministic."""
    for r in rows:
        r["name"] = NAMES[r["drafter"]] + (f", `{r['scoring']}`" if r["scoring"] else "") + f", {r['shape']}"
        r["name"] += ", no store" if r["drafter"] == "sssd" and not r["store_tokens"] else ""
        r["trace"] = r["trace"].removeprefix("replay_").removesuffix(".jsonl")
    return pivot(rows, "answers of={trace} | tokens per step, by nodes={name}", "budget", "{tokens_per_step:.3f}")


def comparison(rows: list[dict[str, Any]], limits: str) -> str:
    """freedraft beside `suffix` with these limits: tokens per step, their ratio to those of `suffix` (of trees to its
    trees, where it has any), and the lowest ratio of chains in one session."""
    found = {(r["file"], r["drafter"], r["shape"]): r for r in rows if r["limits"] in (None, limits)}
    cells = []
    for file in dict.fromkeys(r["file"] for r in rows):
        ours, our_tree, theirs = (
            found[file, *key] for key in (("sssd", "chain"), ("sssd", "tree"), ("suffix", "chain"))
        )
        their_tree = found.get((file, "suffix", "tree"))
        chain, tree, rival = (r["tokens_per_step"] for r in (ours, our_tree, theirs))
        rival_tree = their_tree["tokens_per_step"] if their_tree else None
        worst = min(
            ours["sessions"][name]["tokens_per_step"] / r["tokens_per_step"] for name, r in theirs["sessions"].items()
        )
        row = {"name": file.removesuffix(".jsonl").removesuffix("_dev").replace("_", " "), "budget": ours["budget"]}
        row |= {"chain": chain, "tree": tree, "rival": rival, "rival_tree": rival_tree, "worst": worst}
        cells.append(row | {"by_chain": chain / rival, "by_tree": tree / (rival_tree or rival)})
    return table(
        cells,
        "sessions={name} | nodes={budget} | chain={chain:.2f} | tree={tree:.2f} | `suffix`, chain={rival:.2f}",
        "its tree={rival_tree:.2f} | chain / its chain={by_chain:.2f} | tree / its tree={by_tree:.2f}",
        "lowest session, chains={worst:.2f}",
    )


@section("Agents' sessions, by replay", "sessions.json")
def agents(rows: Any) -> str:
    """Recorded sessions, every turn of the assistant replayed behind all that came before; both learn each finished
    turn. The scorer was trained on these two files, which flatters it here. First `suffix` as vLLM sets it, at most 32
    draft tokens for either:"""
    opened = [r for r in rows if r["budget"] == 16]
    defaults = comparison([r for r in rows if r["budget"] == 33], "vLLM's")
    return f"{defaults}\n\n`suffix` with opened limits, 16 nodes:\n\n{comparison(opened, 'opened')}"


@section("Long copies and edits", "long-copies.json")
def long_copies(rows: Any) -> str:
    """600 tokens copied from a prompt, with 5 % of them replaced, inserted or deleted; no datastore; at most 16 tokens
    per step; tokens per step by tokens of context."""
    names = NAMES | {"paper": "freedraft, `paper`"}
    rows = [r | {"drafter": names[r["drafter"]], "thousands": r["context"] // 1000} for r in rows]
    rows.sort(key=lambda r: (r["kind"], r["shape"], r["drafter"]))
    form = "text={kind} | draft={shape} | drafter={drafter}"
    return pivot(rows, form, "thousands", "{tokens_per_step:.1f}", "{} k")


@section("What drafting costs", "drafter.json")
def drafter(result: Any) -> str:
    """Batches on two threads."""
    times = ({"name": name} | t for name, t in result["draft_us_per_call"].items())
    prompt, build = result["prompt"], result["store_build"]
    form = "microseconds per draft={name} | median={median:,.0f} | 5 %={p5:,.0f} | 95 %={p95:,.0f}"
    indexing = "; ".join(f"{float(v['ns_per_token']):.0f} ns at {int(n):,} tokens" for n, v in prompt.items())
    return table(times, form) + (
        f"\n\nIndexing a prompt takes, per token, {indexing}; an accepted token at most "
        f"{max(result['append_us_per_token'].values()):.1f} us. A context holds "
        f"{min(v['bytes_per_token'] for v in prompt.values()):.1f} bytes per token, a store "
        f"{min(result['store_bytes_per_token'].values()):.1f}; it builds in {build['us_per_token']:.2f} us per token "
        f"at a peak of {build['peak_bytes_per_token']:.0f} bytes per token."
    )


@section("A datastore that learns", "live-datastore.json")
def live(result: Any) -> str:
    """Answers of Llama-3.1-8B, 16 nodes."""
    update, rebuild, cold = (result[key] for key in ("update", "rebuild", "cold_start"))
    visible, paced = (
        ", ".join(
            f"{name} {u[key]['p50']:.2f} / {u[key]['p99']:.1f}" for name, u in update.items() if isinstance(u, dict)
        )
        for key in ("visible_after_ms", "visible_after_ms_paced")
    )
    merges = f"{1e3 * rebuild['sort_seconds']:.0f}, {1e3 * rebuild['merge_with_as_many_seconds']:.0f}"
    rows = [
        ["tokens per step by hundred rows, from an empty store",
         ", ".join(f"{r['tokens_per_step']:.2f}" for r in cold["by_hundred_rows"])],
        ["on rows that nobody learnt from: no store, live, static",
         "{no_store:.3f}, {live_store:.3f}, {static_store:.3f}".format(**cold["test_rows"])],
        [f"ms until an answer is visible, at {update['paced_tokens_per_second']:,} tokens/s, median / 99 %", paced],
        ["the same, while answers come as fast as they are taken", visible],
        [f"ms to sort {rebuild['delta_tokens']:,} tokens and to merge them with as many", merges],
        ["us to draft, 99 %: idle; while merges never stop",
         "{:.0f}; {:.0f}".format(*(d["p99_us"] for d in rebuild["drafting"].values()))],
        ["bytes of memory per token", f"{update['memory']['bytes_per_token']:.1f}"],
    ]  # fmt: skip
    return markdown(["", ""], rows)


@section("Servers that learn from each other", "exchange.json")
def exchange(result: Any) -> str:
    """Two servers and an S3 bucket, over HTTP: tokens per step of the same question. One server answers it, then the
    other one; then the tenant is forgotten, and both answer it again."""
    rows = [r | {"engine": name} for name, r in result.items()]
    for r in rows:
        r["strangers"], r["again"] = max(*r["before"].values(), *r["after"].values()), max(r["forgotten"])
    form = (
        "engine={engine} | first answer={first_answer:.2f} | the other server's=**{other_server:.2f}** | "
        "after={wait_seconds:.0f} s | other tenants, at most={strangers:.2f} | once it is forgotten={again:.2f}"
    )
    return table(rows, form)


MIXED_SETS = "four skip sets at once, passes of their own for each (4323d4f)"


@section("Layer skipping on vLLM", "layer-skip-vllm-cpu.json")
def layer_skip(result: Any) -> str:
    """bf16, compiled, lookahead `cost`. The deep model is a synthetic one with twice the sublayers it needs; the
    demo model cannot spare layers, and drafting stops by itself."""
    rows, said = [], []
    for model, cells in result.items():
        name = model.partition(",")[0].replace("_", " ")
        if "fp32" in model:
            same = "all answers are those of plain decoding" if cells["token_identical"] else "answers differ"
            said.append(f"{name}: {cells['acceptance']:.1%} of draft tokens accepted one by one, {same}")
        elif isinstance(cells, dict):
            cells = {MIXED_SETS: cells} if model == "mixed_sets" else cells
            rows += [{"share_of_formula": None, "M": None, "name": name, "cell": cell} | r for cell, r in cells.items()]
    for r in rows:
        r["share"] = "-" if r["share_of_formula"] is None else f"{r['share_of_formula']:.0%}"
        r["drafts"] = ["-"] * 3 if r["M"] is None else [f"{r['M']:.2f}", f"{r['alpha']:.3f}", f"{r['c']:.2f}"]
    form = "model={name} | ={cell} | tokens per step={drafts[0]} | accepted={drafts[1]} | cost of a pass={drafts[2]}"
    ratio = f"over plain (quarters)={spread('**{ratio:.2f}**', 'ratio_quarters')}"
    exact = f"\n\nIn fp32, eager: {'; '.join(said)}." if said else ""
    return table(rows, form, ratio, "of the formula={share}") + exact


@section("Layer skipping on SGLang", "layer-skip-sglang-cpu.json")
def layer_skip_sglang(result: Any) -> str:
    """The deep model, bf16."""
    cells = {f"batch {b['batch']}": b for b in result["batches"]}
    cells |= {MIXED_SETS: result["mixed_sets"]} if "mixed_sets" in result else {}
    return table(
        (r | {"name": name} for name, r in cells.items()),
        "={name} | tokens per step={M:.2f} | accepted={alpha:.3f} | cost of a pass={c:.2f} | "
        "of a verification={verify:.2f} | "
        f"over plain (spread)={spread('**{ratio:.2f}**', 'ratio_spread')}",
    )


@section("Windows", "windowed-acceptance.json")
def windowed(result: Any) -> str:
    """How often a pass of all layers over 16 sinks and the newest tokens says what the model says: answers of 96
    tokens to questions about long documents, fp32, without an engine."""
    rows = [r | {"least": min(r["by_document"]), "most": max(r["by_document"])} for r in result["rows"]]
    form = "context={context:,} | window={window:,} | next token (by document)={next 1:.2f} ({least:.2f}-{most:.2f})"
    return table(rows, form, *(f"next {n}={{next {n}:.2f}}" for n in (2, 4, 6)))


@section("Windows in the engines", "windowed-vllm-cpu.json windowed-vllm-cpu-bf16.json windowed-sglang-cpu.json")
def windowed_speed(*results: Any) -> str:
    """`window: auto` over plain decoding, in turns of four steps within the same requests, on vLLM's CPU build (V1)
    and SGLang's CPU platform: questions about long documents. Beside it what the measured times allow: the best of
    all draft lengths and windows, drafting nothing among them."""
    rows = []
    for result in results:
        engine = f"{'SGLang' if 'sglang' in result else 'vLLM'}, {result['dtype']}"
        for r in result["rows"]:
            verify = f"{r['verify'][0]:.2f}" if r["verify"] else "-"
            drafts = [f"{r['c']:.2f}", verify, f"{r['alpha']:.2f}"] if r["alpha"] else ["-"] * 3
            rows.append(r | {"engine": engine, "drafts": drafts})
    return table(
        rows,
        "engine={engine} | batch={batch} | context={context:,} | plain step, ms={plain_ms:.0f} | "
        "draft pass, plain steps={drafts[0]} | verification of a draft token each={drafts[1]} | "
        "next token accepted={drafts[2]} | steps drafted for={drafting_share:.0%} | "
        "over plain (quartiles)={ratio:.2f} ({ratio_quartiles[0]:.2f}-{ratio_quartiles[1]:.2f}) | turns={turns} | "
        "allowed by the times={allowed:.2f} | identical={same!y}",
    )


@section("Both together", "composed-vllm-cpu.json")
def composed(result: Any) -> str:
    """Over plain, quarters in brackets; vLLM, bf16."""
    names = {"sssd": "sssd", "layerskip": "layerskip", "both": "freedraft"}
    ratios = [f"`{name}`={spread(f'{{{arm}[ratio]:.2f}}', f'{arm}[quarters]')}" for arm, name in names.items()]
    models = ("demo model", "deep model")
    rows = ({"model": model, "kind": kind} | arms for model in models for kind, arms in result[model].items())
    return table(rows, "model={model} | prompts={kind}", *ratios)


@section("How far to draft", "lookahead.json")
def lookahead(result: Any) -> str:
    """Recorded drafts of SmolLM2 with 12 of 60 sublayers skipped, held-out answers; tokens per time in units of plain
    decoding, for draft passes that cost c of a whole one."""
    f1 = {r["policy"]: f"{r['f1']:.3f}" for r in result["rows"]} | {"cost": ""}
    rows = [r | {"f1": f1[r["policy"]]} for r in result["rows"]]
    return pivot(rows, 'policy={policy} | F1 of "go on"={f1}', "c", "{tokens_per_time:.2f}", "c = {:.2f}")


@section("Which layers, on streams of prompts", "selection-streams.json selection-deep.json")
def selection(*results: Any) -> str:
    """Expected speed over plain from measured acceptance and pass times."""
    return table(
        (
            r | {"model": model}
            for result in results
            for model, found in result.items()
            for r in found["stream"]["rows"]
        ),
        "model={model} | share of shuffled prompts={mix:.1f} | selection={selection} | tokens per round={M:.2f} | "
        "accepted={alpha:.3f} | cost of a pass={c:.2f} | expected speed={expected_speed:.2f}",
    )


@section(f"{ON_A_GPU}vLLM", "serve-vllm.json")
def gpu_serve(result: Any) -> str:
    """Over plain vLLM with 95 % intervals, by `bench/gpu.sh`: of all questions throughput under full load, prefill
    included; of a group the time of a request for each token after the first."""
    said = (report.conditions(result), report.near_the_best(result), report.below_plain(result))
    own = {tuple(arm["versions"].items()) for arm in result["settings"]["arms"].values() if "versions" in arm}
    apart = [
        f"Versions in the engine's environment: {', '.join(f'{package} {version}' for package, version in pairs)}."
        for pairs in sorted(own)
    ]
    return "\n\n".join([report.markdown(result), " ".join(part for part in (*said, *apart) if part)])


@section(f"{ON_A_GPU}SGLang", "serve-sglang.json")
def gpu_serve_sglang(result: Any) -> str:
    """The same over plain SGLang."""
    return gpu_serve(result)


@section(f"{ON_A_GPU}kernels", "kernels.json")
def gpu_kernels(result: Any) -> str:
    """Each Triton kernel against its reference in PyTorch, and against the bytes that it must move at least."""
    rows = result["rows"]
    for r in rows:
        r["said"], r["MB"], us = {True: "yes", False: "**no**", None: "-"}[r["equal"]], r["bytes"] / 1e6, r["triton_us"]
        times = (f"{us:,.0f}", f"{r['reference_us'] / us:.1f}", f"{r['share_of_copy']:.0%}") if us else "---"
        r["us"], r["times"], r["share"] = times
    form = (
        "kernel={kernel} | requests x nodes={shape} | as its reference={said} | MB that it must move={MB:,.1f} | "
        "us={us} | times faster={times} | of a copy's bandwidth={share}"
    )
    said = f"{result['device']}; a copy moves {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s."
    return f"{table(rows, form)}\n\n{said}"


@section(f"{ON_A_GPU}first hour", "first-hour.json")
def gpu_first_hour(result: Any) -> str:
    """vLLM 0.32, full CUDA graphs, `bench/first_hour.py`. First: answers with exactly the tokens of the plain engine of
    the same numbers, of prompts asked twice in a batch of 12, of 8 asked alone, and of 12 sampled under seeds; steps of
    both passes. SmolLM2-135M with weights rounded to 7 bits. Second: steps of an 8B model's shape with random weights,
    bf16, FlashAttention; at temperature 0 its answers run into cycles and drafts are accepted, at 1 none is. The torch
    there was 2.11, older than vLLM asks for. At that commit the next step was prepared only when the last one's tokens
    had come, and `auto` kept drafting what was never accepted; neither holds now, and no GPU has measured it since."""
    for r in result["identical"]:
        r |= {kind: "{} of {}".format(*r[kind]) for kind in ("greedy", "one", "seeded")}
        r["steps"], r["base"] = ("{}, {}".format(*steps) for steps in r["steps"])
    for r in result["steps"]:
        r["gpu"] = "" if r["busy"] is None else f"{r['busy']:.0%}"
    form = "arm={arm} | batches={greedy} | alone={one} | seeded={seeded} | steps={steps} | plain={base}"
    same = table(result["identical"], form)
    form = (
        "arm={arm} | temperature={temperature:.0f} | batch={batch} | ms per step={step_ms:.2f} | steps={steps} | "
        "drafted={drafted:,} | accepted={accepted:,} | tokens/s={tokens_per_s:,.0f} | GPU busy={gpu}"
    )
    return "\n\n".join([same, table(result["steps"], form), f"{result['device']}. {ROUNDING}"])


ROUNDING = """\
Where tokens differ, the logits of the two, in fp32 by transformers, lie within .0015 (`v1`) and .2 (bf16) of each
other: rounding that depends on the batch's shape and on the kernel. Of the one seeded answer in fp32 (`auto`, trees)
this was not determined; vLLM's Triton attention computes fp32 products in TF32, the attention of trees does not."""


@section("A drafter's thread behind a device", "draft-thread.json")
def draft_thread(result: Any) -> str:
    """SGLang's adapter over a stand-in for a device whose passes take 5 ms, while the host sleeps; two runs of each
    arm, medians in us. Between: what the scheduler does after it has waited for the device and before it asks for
    drafts; the thread begins when the tokens are there. Idle: for how long the device has nothing to do between passes.
    Hidden: by how much that is shorter with the thread, as a share of the wait for drafts without it."""
    cells: dict[tuple[int, float], dict[str, list[float]]] = {}
    for r in result["rows"]:
        found = cells.setdefault((r["requests"], r["between"]), {})
        for name in ("waited", "idle"):
            found.setdefault(name + "+" * r["thread"], []).append(r[name])
    rows = [
        {"requests": batch, "between": between}
        | {"hidden": (sum(found["idle"]) - sum(found["idle+"])) / sum(found["waited"])}
        | {name: " and ".join(f"{us:.0f}" for us in each) for name, each in found.items()}
        for (batch, between), found in cells.items()
    ]
    return table(
        rows,
        "requests={requests} | between={between} | wait for drafts={waited} | with the thread={waited+} | "
        "device idle={idle} | idle with the thread={idle+} | hidden={hidden:.0%}",
    )


EARLIER = """\
## Measured before

Scripts and files of these are in the history, at commit 4323d4f, or the one that is named.

- **Spec-Bench over HTTP**, on an Intel Xeon, at 1, 2, 4, 8 and 16 at a time, over plain: `sssd` with 8 draft tokens
  1.39, 1.24, 1.08, 1.01 and 1.04, `suffix` 1.35, 1.23, 1.03, 1.01 and 0.99; groups of questions 0.94 to 1.27 at 4
  (`sssd`). Blocks of one group and 8 questions for each request at a time, without prefix caching; a block's end, with
  slots empty, counted against arms that draft. A second plain server 0.99 of the first (commit b1f58a296ea9).
- **How much is drafted, by batch**, through vLLM, the demo's four kinds of prompts mixed: `auto` 1.36, 1.22, 1.12, 1.05
  and 1.18 times plain at batch 1, 2, 4, 8 and 16, the better of 4 and 8 fixed tokens 1.32, 1.15, 1.00, 0.91 and 1.03.
- **Recycled logits**, Spec-Bench questions, policy `fixed`, over the same drafts without: through SGLang, trees of 16,
  32 and 64 nodes +10.2 %, +18.5 % and +24.6 % tokens per step, 1.05, 1.11 and 1.12 times the speed with one request at
  a time; 8 nodes with 32 at a time +7.8 % and 0.99; through vLLM's model runner V1, chains of 9, +1.9 % and 1.03.
- **Trees against chains** of 16 nodes, through SGLang: 2.44 against 1.98 tokens per step on Spec-Bench with a datastore
  of answers, 1.93 against 1.67 on the demo's prompts without one. A step without drafts took vLLM's model runner V2 43
  us more on the host with the attention backend for trees than with the stock one (eager, 30 layers).
- **Trees through vLLM and SGLang**, 20 short prompts of Spec-Bench, policy `fixed`, nothing learnt from answers, tokens
  per step: chains of 16 1.34 in both, trees of 16 1.39 and of 32 1.40; with recycled logits 1.47 and 1.49, 1.74 and
  1.73, 1.87 and 1.87; all answers the same (767612688598; bench/trees.py at ff756db).
- **What sssd adds to a step of vLLM's V2 on the host**, in Triton's interpreter, 8 draft tokens for every request:
  1.2, 1.2, 2.6 and 5.3 ms at 1, 8, 64 and 256 requests, of which drafting 0.2, 0.3, 1.0 and 2.9 (3086aa212817;
  bench/host_time.py at ff756db).
- **A thread of the drafter's own in SGLang**, two passes: one request waits 0.02 ms for its drafts, without it 0.47
  and 0.54; 32 wait 1.2 and 1.6, without it 1.8 and 2.0; all of the host's work in a step is hardly less: 1.2 and 1.2
  against 1.0 and 1.1 ms, at 32 3.2 and 3.0 against 3.9 and 3.1 (3086aa212817; bench/host_time.py at ff756db).
- **Building datastores** of 8 M tokens: 0.30 to 0.34 us and 18.4 bytes of memory at most per token, 8.3 bytes on
  disk, 14 to 20 ms to open; 66,026,620 tokens from text in 94 s on two cores, killed halfway and resumed, within 1.1
  GiB (1dc2e084e014; bench/datastore.py at ff756db).
- **Stores that were tampered with**, 1,000: 827 refused in one line, 173 harmless, none wrong or crashed
  (f7dae5e81ad4; now `tests/datastore/test_fuzzed_stores.py`).
- **Kills**, `kill -9`, 100 times each: of a process that learns in a folder, forgets a tenant or rewrites the file,
  no wrong data and nothing that came back, the oldest loss 0.24 s old; of vLLM's server while it answers, 3 times, no
  wrong document, 24 of 24 answers plain's (937816107692). At a URL, where a process looks every 0.1 s (2 s by
  default): while it learns, while it forgets (47 times) and while it finishes an erasure, nothing wrong, nothing that
  came back or left a copy, the oldest loss 0.17 s (a2f0a052e96b). Now `tests/datastore/test_kills.py`.
- **Sampling over the nodes of trees**, 32 requests of 16 nodes, 152,064 ids, by SGLang's sampler for CPUs: 0.6 s of
  processor time with top-k 50 and top-p 0.9 in all requests, 8.5 s with top-p alone, for which it sorts every row.
- **Calibration in vLLM** (bf16) against transformers (fp32): Spearman's rank correlation over 24 random sets and 64
  tokens .998 for agreement and 1.000 for cosines; of the knapsack search's sets of 13 sizes 13 are the same.
- **Which layers, by search**: held-out agreement with the whole model, demo model, 10, 20 and 30 % skipped: knapsack
  .873, .782 and .695, Self-SD's Bayesian search .861, .714 and .532, SWIFT's .838, .677 and .504, the best of 100
  random sets .814, .664 and .496 ([table](layerskip.md#measured-which-sublayers)).
- **Which layers, by context length**, 256 to 8,000 tokens, demo model: 3 of 60 sublayers, .92 to .95 of plain decoding
  as predicted and .82 to .95 as timed; predicted and timed rates of 30 sets and lengths correlate at .99.
"""


def source(name: str) -> str:
    """How a file came to be, in one line.

    Raises:
        ValueError: it is not as its benchmark wrote it.
    """
    manifest = checked(FOLDER / name)
    machine = manifest["machine"]
    known = f" ({machine['instructions']})" if machine.get("instructions") else ""
    where = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}{known}"
    versions = ", ".join(f"{package} {version}" for package, version in manifest["versions"].items())
    data = ", ".join(f"{file} {digest[:12]}" for file, digest in manifest["data"].items())
    parts = [f"`{manifest['command']}`", f"commit {manifest['commit']}", manifest["date"][:10], where, versions, data]
    note = f" ({manifest['note']})" if "note" in manifest else ""
    return f"- [{name}](../bench/results/{name}): " + "; ".join(part for part in parts if part) + note


def head() -> str:
    """The beginning, which says of what the page is: of CPUs, but for sections that are there for somebody's GPU."""
    on_gpus = [name for section in SECTIONS if section.title.startswith(ON_A_GPU) for name in section.files]
    if not any((FOLDER / name).is_file() for name in on_gpus):
        return HEAD
    return HEAD.replace("Everything here ran on CPUs", f'All but what is titled "{ON_A_GPU.strip(": ")}" ran on CPUs')


def page() -> str:
    shown = {name for section in SECTIONS for name in section.files}
    if strange := sorted({path.name for path in FOLDER.glob("*.json")} - shown):
        raise ValueError(f"no section shows {', '.join(strange)}")
    parts = [head()]
    for section in SECTIONS:
        files = [name for name in section.files if (FOLDER / name).is_file()]
        if not files:
            continue  # of a benchmark that has not been run yet
        sources = [source(name) for name in files]
        figures = [json.loads((FOLDER / name).read_text(encoding="utf-8")) for name in files]
        try:
            body = section.body(*figures)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{', '.join(section.files)}: not as their benchmark writes them now ({error!r})"
            ) from None
        text = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(section.body) or "").split("\n\n"))
        blocks = [f"## {section.title}", text, body, "\n".join(sources)]
        parts.append("\n\n".join(block for block in blocks if block) + "\n")
    return "\n".join([*parts, EARLIER])


def main() -> int:
    try:
        text = page()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "--check" in sys.argv:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/results.md is out of date: run python docs/make_results.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
