"""Writes results.md from the files of results, each with its command, commit, versions and machine.

python docs/make_results.py           # write it
python docs/make_results.py --check   # exit code 1 when it is out of date

A file without a manifest, or changed since its benchmark wrote it, is refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import report
from bench.lib.results import checked

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
    """A part of the page.

    Attributes:
        title, text: of it; files: of results, in `bench/results`.
        body: Markdown from what the files hold, in their order.
    """

    title: str
    files: tuple[str, ...]
    text: str
    body: Callable[..., str]


def vllm_trees(result: Any) -> str:
    rows = [
        [name, f"{arm['tokens_per_step']:.3f}", f"{arm['sglang']['tokens_per_step']:.3f}",
         f"{arm['same_answers']} and {arm['sglang']['same_answers']} of {result['questions']}"]
        for name, arm in result["arms"].items()
    ]  # fmt: skip
    plain = result["plain_step"]
    low, high = (plain["us"]["forward"]["more_quarters"][i] for i in (0, 1))
    return (
        table(["drafts", "tokens per step, vLLM", "SGLang", "answers as with the first"], rows)
        + f"\n\nA step without drafts takes the host {plain['us_more_per_step']:.0f} us more than with the stock "
        f"attention backend, eager, {plain['layers']} layers ({low:.1f} to {high:.1f} us for each)."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def demo(vllm: Any, sglang: Any) -> str:
    rows = [
        [name, r["kind"], f"{r['plain_tps']:.1f}", f"{r['sssd_tps']:.1f}",
         f"**{r['ratio']:.2f}** ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})", f"{r['tokens_per_step']:.2f}",
         "yes" if r["identical"] else "no"]
        for name, result in (("vLLM", vllm), ("SGLang", sglang)) for r in result["rows"]
    ]  # fmt: skip
    return table(
        ["engine", "prompts", "plain tok/s", "sssd tok/s", "ratio (repeats)", "tokens per step", "identical"], rows
    )


def serve(result: Any, noise: Any) -> str:
    again = [r for r in noise["rows"] if r["arm"] == "again" and r["group"] == "all"]
    said = ", ".join(f"{r['ratio']:.2f} at {r['concurrency']} at a time" for r in again)
    over = []
    for r in result["rows"]:
        if r["arm"] == "suffix" and r["group"] == "all":
            ratio, low, high = (1 / value for value in (r["over"]["sssd"][i] for i in (0, 2, 1)))
            over.append(f"{ratio:.2f} ({low:.2f}-{high:.2f}) at {r['concurrency']}")
    alone = [b for b in result["blocks"] if b["arm"] == "plain" and b["repeat"] == 0]
    questions = {n: sum(len(b["tokens"]) for b in alone if b["concurrency"] == n) for n in at_a_time(result)}
    asked = ", ".join(f"{count} at {n}" for n, count in questions.items())
    return (
        f"Questions: {asked} at a time; answers of {result['settings']['max_tokens']} tokens. {by_pass(result)}\n\n"
        f"{report.markdown(result)}\n\n`sssd` over `suffix`, all questions: {', '.join(over)} at a time. A second "
        f"plain server, measured the same way, over the first: {said}."
    )


def at_a_time(result: Any) -> list[int]:
    return sorted({r["concurrency"] for r in result["rows"]})


def by_pass(result: Any) -> str:
    """How far passes over the same questions differ."""
    passes = {
        (r["arm"], r["concurrency"]): r["tokens_per_second_by_pass"] for r in result["rows"] if r["group"] == "all"
    }
    said = [
        " and ".join(f"{a / b:.2f}" for a, b in zip(passes["sssd", n], passes["plain", n], strict=True)) + f" at {n}"
        for n in at_a_time(result)
    ]
    return f"`sssd` over plain in each pass: {', '.join(said)} at a time."


def budget(result: Any) -> str:
    arms = list(result["rows"][0]["ratio"])
    rows = [
        [r["batch"], *(f"{r['ratio'][arm]:.2f}" for arm in arms), "{:.2f}-{:.2f}".format(*r["spread"]["auto"]),
         "yes" if r["identical"] else "no"]
        for r in result["rows"]
    ]  # fmt: skip
    return table(["batch", *arms, "spread of auto", "identical"], rows) + (
        f"\n\nAnswers of {result['tokens']} tokens, {result['rounds']} passes. "
        f"The controller takes {result['controller_us']:.0f} us per step at batch 32."
        "\n\n![Throughput by batch](../bench/results/budget-vllm-cpu.png)"
    )


def budget_replay(result: Any) -> str:
    arms = [arm for arm in result["rows"][0]["ratio"] if arm != "plain"]
    rows = [[r["machine"], r["batch"], *(f"{r['ratio'][arm]:.2f}" for arm in arms)] for r in result["rows"]]
    return table(["machine", "batch", *arms], rows)


def replay(rows: Any) -> str:
    names = {"sssd": "freedraft", "suffix": "ArcticInference suffix decoding", "lookup": "prompt lookup"}
    budgets = sorted({r["budget"] for r in rows})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for r in rows:
        name = names[r["drafter"]] + (f", `{r['scoring']}`" if r["scoring"] else "")
        name += f", {r['shape']}" + (", no store" if r["drafter"] == "sssd" and not r["store_tokens"] else "")
        trace = r["trace"].removeprefix("replay_").removesuffix(".jsonl")
        lines.setdefault((trace, name), {})[r["budget"]] = f"{r['tokens_per_step']:.3f}"
    body = [[*key, *(cells.get(b, "") for b in budgets)] for key, cells in lines.items()]
    return table(["answers of", "tokens per step, by nodes", *budgets], body)


def long_copies(rows: Any) -> str:
    names = {"sssd": "freedraft", "paper": "freedraft, `paper`", "suffix": "ArcticInference suffix decoding"}
    contexts = sorted({r["context"] for r in rows})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for r in rows:
        key = (r["kind"], r["shape"], names[r["drafter"]])
        lines.setdefault(key, {})[r["context"]] = f"{r['tokens_per_step']:.1f}"
    body = [[*key, *(cells[c] for c in contexts)] for key, cells in sorted(lines.items())]
    return table(["text", "draft", "drafter", *(f"{c // 1000} k" for c in contexts)], body)


def trees(result: Any) -> str:
    rows = [
        [r["questions"], " and ".join(r["corpus"]) or "none", r["nodes"], f"{r['chain']:.2f}", f"{r['tree']:.2f}",
         f"{r['gain']:+.1%}", "yes" if r["same answers"] else "no"]
        for r in result["runs"]
    ]  # fmt: skip
    return table(["questions", "datastore", "nodes", "chain", "tree", "gain", "identical"], rows)


def drafter(result: Any) -> str:
    times, prompt, build = result["draft_us_per_call"], result["prompt"], result["store_build"]
    rows = [[name, *(f"{t[key]:,.0f}" for key in ("median", "p5", "p95"))] for name, t in times.items()]
    indexing = "; ".join(f"{float(v['ns_per_token']):.0f} ns at {int(n):,} tokens" for n, v in prompt.items())
    return table(["microseconds per draft", "median", "5 %", "95 %"], rows) + (
        f"\n\nIndexing a prompt takes, per token, {indexing}; an accepted token at most "
        f"{max(result['append_us_per_token'].values()):.1f} us. A context holds "
        f"{min(v['bytes_per_token'] for v in prompt.values()):.1f} bytes per token, a store "
        f"{min(result['store_bytes_per_token'].values()):.1f}; it builds in {build['us_per_token']:.2f} us per token "
        f"at a peak of {build['peak_bytes_per_token']:.0f} bytes per token."
    )


def live(result: Any) -> str:
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
    kinds = {"crashes": "while it learns", "crashes_while_forgetting": "while a tenant is forgotten",
             "crashes_while_compacting": "while the file is rewritten"}  # fmt: skip
    wrong = ("restarts_with_wrong_data", "erasures_that_came_back", "erasures_that_left_copies")
    for key, when in kinds.items():
        c = result[key]
        found = f"{sum(c.get(name, 0) for name in wrong)} restarts with wrong data or text that came back"
        if "oldest_lost_ms" in c:
            found += f", the oldest loss {c['oldest_lost_ms'] / 1e3:.2f} s old"
        rows.append([f"kill -9 {when}, {c['kills']} times", found])
    e = result["engine"]
    found = f"{e['documents_with_wrong_data']} wrong documents, "
    found += f"{e['answers_that_differ_from_plain']} of {e['answers']} answers other than plain's"
    return table(["", ""], [*rows, [f"kill -9 of vLLM's server while it answers, {e['kills']} times", found]])


def stores(result: Any) -> str:
    rows = [
        [r["name"], f"{r['store_tokens']:,}", f"{r['build_us_per_token']:.2f}", f"{r['peak_bytes_per_token']:.1f}",
         f"{r['disk_bytes_per_token']:.1f}", f"{1e3 * r['open_seconds']:.0f}"]
        for r in result["rows"]
    ]  # fmt: skip
    large = result["large"]
    return table(["text", "tokens", "us per token", "peak bytes per token", "bytes on disk", "ms to open"], rows) + (
        f"\n\n`{large['command']}` built {large['store_tokens']:,} tokens in {large['seconds_of_both_runs']:.0f} s, "
        f"tokenising included, killed halfway and resumed, at a peak of {large['peak_memory']}."
    )


def fuzz(result: Any) -> str:
    kinds: dict[str, dict[str, int]] = {}
    for name, count in result["ended"].items():
        kind, how = name.split()
        kinds.setdefault(kind, {})[how] = count
    rows = [[kind, c.get("refused", 0), c.get("harmless", 0)] for kind, c in kinds.items()]
    return table(
        ["what was changed", "refused in one line", "harmless"], [*rows, ["wrong or crashed", len(result["wrong"]), ""]]
    )


def layer_skip(result: Any) -> str:
    rows, said = [], []
    for model, batches in result.items():
        name = model.partition(",")[0].replace("_", " ")
        if "fp32" in model:
            same = "all answers are those of plain decoding" if batches["token_identical"] else "answers differ"
            said.append(f"{name}: {batches['acceptance']:.1%} of draft tokens accepted one by one, {same}")
        elif isinstance(batches, dict):
            cells = {"four skip sets, batch 4": batches} if model == "mixed_sets" else batches
            for cell, r in cells.items():
                drafts = ["-"] * 3
                if "M" in r:
                    drafts = [f"{r['M']:.2f}", f"{r['alpha']:.3f}", f"{r['c']:.2f}"]
                low, high = r["ratio_quarters"]
                share = f"{r['share_of_formula']:.0%}" if "share_of_formula" in r else "-"
                rows.append([name, cell, *drafts, f"**{r['ratio']:.2f}** ({low:.2f}-{high:.2f})", share])
    head = ["model", "", "tokens per step", "accepted", "cost of a pass", "over plain (quarters)", "of the formula"]
    return table(head, rows) + f"\n\nIn fp32, eager: {'; '.join(said)}."


def layer_skip_sglang(result: Any) -> str:
    cells = {f"batch {b['batch']}": b for b in result["batches"]} | {"four skip sets, batch 4": result["mixed_sets"]}
    rows = [
        [name, f"{r['M']:.2f}", f"{r['alpha']:.3f}", f"{r['c']:.2f}", f"{r['verify']:.2f}",
         "**{:.2f}** ({:.2f}-{:.2f})".format(r["ratio"], *r["ratio_spread"])]
        for name, r in cells.items()
    ]  # fmt: skip
    head = ["", "tokens per step", "accepted", "cost of a pass", "of a verification", "over plain (spread)"]
    return table(head, rows)


def composed(result: Any) -> str:
    rows = []
    for model in ("demo model", "deep model"):
        for kind, by_arm in result[model].items():
            arms = [by_arm[arm] for arm in ("sssd", "layerskip", "both")]
            cells = ["{:.2f} ({:.2f}-{:.2f})".format(arm["ratio"], *arm["quarters"]) for arm in arms]
            rows.append([model, kind, *cells])
    return table(["model", "prompts", "`sssd`", "`layerskip`", "`freedraft`"], rows)


def lookahead(result: Any) -> str:
    costs = sorted({r["c"] for r in result["rows"]})
    lines: dict[str, dict[float, str]] = {}
    f1 = {}
    for r in result["rows"]:
        lines.setdefault(r["policy"], {})[r["c"]] = f"{r['tokens_per_time']:.2f}"
        f1[r["policy"]] = f"{r['f1']:.3f}"
    rows = [
        [policy, "" if policy == "cost" else f1[policy], *(cells[c] for c in costs)] for policy, cells in lines.items()
    ]
    return table(["policy", 'F1 of "go on"', *(f"c = {c:.2f}" for c in costs)], rows)


def selection(result: Any, *_: Any) -> str:
    """The streams; docs/layerskip.md tells of the agreement."""
    rows = [
        [model, f"{r['mix']:.1f}", r["selection"], f"{r['M']:.2f}", f"{r['alpha']:.3f}", f"{r['c']:.2f}",
         f"{r['expected_speed']:.2f}"]
        for model in result
        for r in result[model]["stream"]["rows"]
    ]  # fmt: skip
    head = ["model", "share of shuffled prompts", "selection", "tokens per round", "accepted", "cost of a pass"]
    return table([*head, "expected speed"], rows)


def skipped_by_context(result: Any) -> str:
    parts = []
    for model in result:
        found = result[model]["context"]
        rows = []
        for r in found["rows"]:
            best, saving = (
                f"{one['attention_skipped']} attention, {one['mlp_skipped']} MLP" for one in (r, r["a_fifth_saved"])
            )
            rows.append(
                [model, f"{r['context']:,}", f"{r['attention_ms']:.2f}", f"{r['mlp_ms']:.2f}", best,
                 f"{r['draft_length']}{', OFF' if r['off'] else ''}", f"{r['predicted']:.1f}", f"{r['measured']:.1f}",
                 f"{r['plain']:.1f}", saving]
            )  # fmt: skip
        head = ["model", "context", "attention, ms", "MLP, ms", "best set skips", "draft length"]
        head += ["predicted, tokens/s", "timed", "plain", "skipped to save a fifth of the time"]
        parts.append(
            f"{table(head, rows)}\n\nCorrelation of predicted and timed rates: {found['correlation']:.2f} over the "
            f"best sets, {found['correlation_of_all']:.2f} over {len(found['points'])} sets and lengths."
        )
    return "\n\n".join(parts)


def windowed_speed(*results: Any) -> str:
    rows = []
    for result in results:
        engine = f"{'SGLang' if 'sglang' in result else 'vLLM'}, {result['dtype']}"
        for r in result["rows"]:
            drafts = [f"{r['c']:.2f}", f"{r['verify'][0]:.2f}" if r["verify"] else "-", f"{r['alpha']:.2f}"]
            rows.append(
                [engine, r["batch"], f"{r['context']:,}", f"{r['plain_ms']:.0f}",
                 *(drafts if r["alpha"] else ["-"] * 3), f"{r['drafting_share']:.0%}",
                 "{:.2f} ({:.2f}-{:.2f})".format(r["ratio"], *r["ratio_quartiles"]), r["turns"], f"{r['allowed']:.2f}",
                 "yes" if r["same"] else "no"]
            )  # fmt: skip
    head = ["engine", "batch", "context", "plain step, ms", "draft pass, plain steps"]
    head += ["verification of a draft token each"]
    head += ["next token accepted", "steps drafted for", "over plain (quartiles)", "turns", "allowed by the times"]
    head += ["identical"]
    return table(head, rows)


def windowed(result: Any) -> str:
    rows = [
        [f"{r['context']:,}", f"{r['window']:,}",
         f"{r['next 1']:.2f} ({min(r['by_document']):.2f}-{max(r['by_document']):.2f})",
         *(f"{r[f'next {n}']:.2f}" for n in (2, 4, 6))]
        for r in result["rows"]
    ]  # fmt: skip
    return table(["context", "window", "next token (by document)", "next 2", "next 4", "next 6"], rows)


def fleet(result: Any, kills: Any) -> str:
    rows = []
    for name in ("vllm", "sglang"):
        r = result[name]
        strangers = max(*r["before"].values(), *r["after"].values())
        rows.append(
            [name, f"{r['first_answer']:.2f}", f"**{r['other_server']:.2f}**", f"{r['wait_seconds']:.0f} s",
             f"{strangers:.2f}", f"{max(r['forgotten']):.2f}", f"{r['seconds_until_asked']:.0f} s"]
        )  # fmt: skip
    head = ["engine", "first answer", "the other server's", "after", "other tenants, at most"]
    head += ["once it is forgotten", "after"]
    crashes = []
    for name in ("publishing", "forgetting", "compacting"):
        c = kills[f"crashes_while_{name}"]
        times = c["kills"] - c.get("ended_before_the_kill", 0)
        lost = f"{c['oldest_lost_ms'] / 1e3:.2f} s" if "oldest_lost_ms" in c else "-"
        back = c.get("erasures_that_came_back", 0) + c.get("erasures_that_left_copies", 0)
        crashes.append(
            [f"{name}, {times} times", c["restarts_with_wrong_data"], back if name != "publishing" else "-",
             f"{c['documents_seen_wrongly']} of {c['documents_looked_for']:,}", lost]
        )  # fmt: skip
    crash_head = ["kill -9 while", "buckets with wrong data", "erasures that came back or left copies"]
    crash_head += ["documents that a server shows wrongly", "oldest loss"]
    return (
        f"{table(head, rows)}\n\nKills, in a folder's URL, of a process that looks and publishes every "
        f"{kills['period_seconds']} s (2 s by default):\n\n{table(crash_head, crashes)}"
    )


def fleet_traffic(result: Any) -> str:
    rows = [
        [f"{p['every_seconds']:.0f} s", f"{p['times_each_token_is_written']:.1f}",
         f"{p['MB_per_second_to_each_host']:.1f}", p["MB_per_second_from_the_bucket"],
         f"{p['age_when_drafted_seconds_p50']:.0f} s", "{}-{}".format(*p["sub_indices"])]
        for p in result["periods"]
    ]  # fmt: skip
    head = ["compacted every", "times a token is written", "MB/s to each host", "MB/s from the bucket"]
    return table([*head, "drafted from after (median)", "sub-indices"], rows) + (
        f"\n\n{result['replicas']} replicas, {result['tokens'] / 1e9:.0f} B tokens of {result['days']:.0f} days, "
        f"{result['learnt_tokens_per_second']:,} learnt per second; each host maps "
        f"{result['GB_on_each_host_mapped']:.0f} GB."
    )


def host_time(result: Any) -> str:
    rows = [
        [r["batch"], f"{r['drafted']} of {r['steps']}", r["waits"],
         *(f"{r['us'].get(name, 0):,.0f}" for name in ("propose", "draft", "decide"))]
        for r in result["rows"]
    ]  # fmt: skip
    head = ["batch", "steps drafted for", "waits", "us per step, all of it", "of which drafting", "choosing lengths"]
    return table(head, rows)


def sglang_host_time(result: Any) -> str:
    names = ("host", "draft", "method", "lookup", "forward")
    rows = [
        [r["arm"], r["batch"], *("{p50:,.0f} ({p25:,.0f}-{p75:,.0f})".format(**r["us"][name]) for name in names)]
        for r in result["rows"]
    ]
    return table(["arm", "batch", "outside the forward pass", "drafting", "method", "lookup", "forward pass"], rows)


def sampling(result: Any) -> str:
    names = {"visited": "ours", "sorted": "a sort of every node's vocabulary"}
    rows = [
        [names[arm], f"{a['median_s']:.2f} ({min(a['seconds']):.2f}-{max(a['seconds']):.2f})",
         f"{a['bytes'] / 2**20:,.0f}"]
        for arm, a in result["arms"].items()
    ]  # fmt: skip
    batch, nodes, vocab = result["shape"]
    said = f"{batch} requests of {nodes} nodes, {vocab:,} ids, top-k {result['top_k']}, top-p {result['top_p']}; "
    said += f"the largest difference of a probability is {result['difference']:.0e}."
    return table(["", "seconds (range)", "MiB beside the logits"], rows) + "\n\n" + said


def gpu_serve(result: Any) -> str:
    said = (report.conditions(result), report.near_the_best(result), report.below_plain(result))
    own = {tuple(arm["versions"].items()) for arm in result["settings"]["arms"].values() if "versions" in arm}
    apart = [
        f"Versions in the engine's environment: {', '.join(f'{package} {version}' for package, version in pairs)}."
        for pairs in sorted(own)
    ]
    return "\n\n".join([report.markdown(result), " ".join(part for part in (*said, *apart) if part)])


def gpu_kernels(result: Any) -> str:
    rows = [
        [r["kernel"], r["shape"], {True: "yes", False: "**no**", None: "-"}[r["equal"]], f"{r['bytes'] / 1e6:,.1f}",
         *([f"{r['triton_us']:,.0f}", f"{r['reference_us'] / r['triton_us']:.1f}", f"{r['share_of_copy']:.0%}"]
           if r["triton_us"] else ["-"] * 3)]
        for r in result["rows"]
    ]  # fmt: skip
    head = ["kernel", "requests x nodes", "as its reference", "MB that it must move", "us", "times faster"]
    said = f"{result['device']}; a copy moves {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s."
    return table([*head, "of a copy's bandwidth"], rows) + f"\n\n{said}"


def gpu_forward_times(result: Any) -> str:
    counts = sorted({r["query_tokens"] for r in result["rows"]})
    cells = {(r["batch"], r["context"], r["query_tokens"]): f"{r['growth']:.2f} ({r['predicted_growth']:.2f})"
             for r in result["rows"]}  # fmt: skip
    plain = {(r["batch"], r["context"]): r for r in reversed(result["rows"])}  # the fewest query tokens of each
    rows = [
        [batch, f"{context:,}", f"{r['ms']:.2f} ({r['predicted_ms']:.2f})",
         *(cells.get((batch, context, n), "") for n in counts)]
        for (batch, context), r in sorted(plain.items())
    ]  # fmt: skip
    middle = ", ".join(
        f"{name.replace('_', ' ')} {low:.2f}, {median:.2f}, {high:.2f}"
        for name, (low, median, high) in result["summary"].items()
    )
    skipped = len(result.get("skipped", ()))
    said = f"Of all cells the least, the median and the most: {middle}."
    said += f" {skipped} cells did not fit into memory." if skipped else ""
    return table(["batch", "context", "ms", *(f"{n} tokens" for n in counts)], rows) + f"\n\n{said}"


SECTIONS = (
    Section(
        "Over HTTP, on the demo's prompts",
        (
            "demo-vllm-cpu.json",
            "demo-sglang-cpu.json",
        ),
        "SmolLM2-135M-Instruct, fp32, eager, one request at a time, prefill included; two servers, prompts "
        "alternating between them; datastore of Python's library, 2.4 M tokens, built in seconds. vLLM verifies "
        "chains, SGLang trees. Ratios depend on the state of the machine.",
        demo,
    ),
    Section(
        "Over HTTP, against plain decoding and vLLM's own drafters",
        (
            "serve-vllm-cpu.json",
            "serve-vllm-cpu-noise.json",
        ),
        "Questions of Spec-Bench, as many of each group; `sssd` starts with an empty datastore and learns from what it "
        "answers; `suffix` (ArcticInference) runs with the settings of vLLM's documentation. Throughput over "
        "plain with 95 % intervals over blocks of questions (none where a group is one block), prefill included.\n\n"
        "![Latency against throughput](../bench/results/serve-vllm-cpu-latency-throughput.png)",
        serve,
    ),
    Section(
        "How much is drafted, by batch",
        ("budget-vllm-cpu.json",),
        "Through vLLM: fp32, eager, SmolLM2-135M, no datastore, the demo's four kinds of prompts mixed. Throughput "
        "over plain.",
        budget,
    ),
    Section(
        "How much is drafted, on machines whose step times are known",
        ("budget-replay.json",),
        "Answers of Llama-3.1-8B replayed, chains; step times with 8 % noise that the policies do not know; "
        "drafting time included. `cpu`: these two cores with SmolLM2; `h200`: the roofline of an 8B model.",
        budget_replay,
    ),
    Section(
        "Draft quality, by replay",
        ("replay.json",),
        "Recorded answers, scorer weights trained on the other trace. Deterministic.",
        replay,
    ),
    Section(
        "Long copies and edits",
        ("long-copies.json",),
        "600 tokens copied from a prompt, with 5 % of them replaced, inserted or deleted; no datastore; at most "
        "16 tokens per step; tokens per step by tokens of context.",
        long_copies,
    ),
    Section(
        "Trees against chains",
        ("sglang-tree.json",),
        "Through SGLang, fp32; tokens per step.",
        trees,
    ),
    Section(
        "Trees through vLLM",
        ("vllm-trees.json",),
        "Model runner V2 in Triton's interpreter with vLLM's Triton attention backend, where PyTorch computes what the "
        "kernels of attention and verification do, and the same through SGLang's CPU platform; fp32, greedy; 20 "
        "prompts from Spec-Bench of at most 120 tokens, four at a time, 48 tokens each; nothing learnt from answers, "
        "policy `fixed`, `num_speculative_tokens` as said.",
        vllm_trees,
    ),
    Section(
        "What drafting costs",
        ("drafter.json",),
        "Batches on two threads.",
        drafter,
    ),
    Section(
        "What sssd adds to a step of vLLM's model runner V2",
        ("v2-host-time.json",),
        "In Triton's interpreter, where kernels take far longer than on a GPU.",
        host_time,
    ),
    Section(
        "What a step takes on the host of SGLang",
        ("sglang-host-time.json",),
        "Microseconds of a decoding step with drafts, medians and quartiles, with the drafter's thread "
        "(`draft_timeout_ms: 20`) and without; `drafting`: how long SGLang's own thread waits for drafts.",
        sglang_host_time,
    ),
    Section(
        "What sampling over the nodes of trees costs",
        ("sampling.json",),
        "Temperature, top-k and top-p, as SGLang verifies sampled requests: on two cores, where NumPy filters; on a "
        "GPU a kernel does.",
        sampling,
    ),
    Section(
        "A datastore that learns",
        ("live-datastore.json",),
        "Answers of Llama-3.1-8B, 16 nodes.",
        live,
    ),
    Section(
        "A fleet that learns",
        ("fleet.json", "fleet-kills.json"),
        "Two servers and an S3 bucket that both publish to, over HTTP: tokens per step of the same question. One "
        "server answers it, then the other one; then the tenant is forgotten, and both answer it again.",
        fleet,
    ),
    Section(
        "A fleet that learns, on paper",
        ("fleet-traffic.json",),
        "Simulated from the format's sizes and the policy of `freedraft datastore compact`; nothing was measured.",
        fleet_traffic,
    ),
    Section(
        "Building datastores",
        ("datastore.json",),
        "",
        stores,
    ),
    Section(
        "Stores that were tampered with",
        ("fuzz-datastore.json",),
        "",
        fuzz,
    ),
    Section(
        "Layer skipping on vLLM",
        ("layer-skip-vllm-cpu.json",),
        "bf16, compiled, lookahead `cost`. The deep model is a synthetic one, half of whose sublayers can be "
        "skipped; the demo model cannot spare layers, and drafting stops by itself.",
        layer_skip,
    ),
    Section(
        "Layer skipping on SGLang",
        ("layer-skip-sglang-cpu.json",),
        "The deep model, bf16.",
        layer_skip_sglang,
    ),
    Section(
        "Windows",
        ("windowed-acceptance.json",),
        "How often a pass of all layers over 16 sinks and the newest tokens says what the model says: answers of 96 "
        "tokens to questions about long documents, fp32, without an engine.",
        windowed,
    ),
    Section(
        "Windows in the engines",
        ("windowed-vllm-cpu.json", "windowed-vllm-cpu-bf16.json", "windowed-sglang-cpu.json"),
        "`window: auto` over plain decoding, in turns of four steps within the same requests, on vLLM's CPU build (V1) "
        "and SGLang's CPU platform: questions about long documents. Beside it what the measured times allow: the best "
        "of all draft lengths and windows, drafting nothing among them.",
        windowed_speed,
    ),
    Section(
        "Both together",
        ("composed-vllm-cpu.json",),
        "Over plain, quarters in brackets; vLLM, bf16.",
        composed,
    ),
    Section(
        "How far to draft",
        ("lookahead.json",),
        "Recorded drafts of SmolLM2 with 12 of 60 sublayers skipped, held-out answers; tokens per time in units "
        "of plain decoding, for draft passes that cost c of a whole one.",
        lookahead,
    ),
    Section(
        "Which layers, on streams of prompts",
        ("selection-streams.json", "selection.json"),
        "Expected speed over plain from measured acceptance and pass times.",
        selection,
    ),
    Section(
        "Which layers, by context length",
        ("selection-contexts.json",),
        "The knapsack's set and draft length of most tokens per time, with the acceptance that was calibrated: "
        "predicted from the times of attention, MLPs and a verification, and with passes that are timed as a whole. "
        "OFF where plain decoding is predicted to be as fast.",
        skipped_by_context,
    ),
    # What bench/gpu.sh writes, for when somebody has run it.
    Section(
        f"{ON_A_GPU}vLLM",
        ("serve-vllm.json",),
        "Throughput over plain vLLM with 95 % intervals over blocks of questions, prefill included, by `bench/gpu.sh`.",
        gpu_serve,
    ),
    Section(
        f"{ON_A_GPU}SGLang",
        ("serve-sglang.json",),
        "The same over plain SGLang.",
        gpu_serve,
    ),
    Section(
        f"{ON_A_GPU}kernels",
        ("kernels.json",),
        "Each Triton kernel against its reference in PyTorch, and against the bytes that it must move at least.",
        gpu_kernels,
    ),
    Section(
        f"{ON_A_GPU}forward times",
        ("forward-times.json",),
        "A step of a decoder with random weights, in CUDA graphs: milliseconds with the fewest query tokens, and how "
        "many times that with more, all requests together; in brackets what the roofline says that `auto` starts from.",
        gpu_forward_times,
    ),
)


EARLIER = """\
## Measured before

Scripts and files of these are in the history, at commit 4323d4f.

- **Recycled logits**, Spec-Bench questions, policy `fixed`, over the same drafts without: through SGLang, trees of 16,
  32 and 64 nodes +10.2 %, +18.5 % and +24.6 % tokens per step, 1.05, 1.11 and 1.12 times the speed with one request at
  a time; 8 nodes with 32 at a time +7.8 % and 0.99; through vLLM's model runner V1, chains of 9, +1.9 % and 1.03.
- **Calibration in vLLM** (bf16) against transformers (fp32): Spearman's rank correlation over 24 random sets and 64
  tokens .998 for agreement and 1.000 for cosines; of the knapsack search's sets of 13 sizes 13 are the same.
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
        blocks = [f"## {section.title}", section.text, body, "\n".join(sources)]
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
