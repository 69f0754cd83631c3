"""Markdown page and plots from the results of bench/serve.py.

    python bench/report.py bench/results --out build/report.md

Plots are written next to the page as PNGs. Other result files are ignored.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.lib import plots, summary, tables
from bench.lib.plots import Plot, Rows, names, nice
from bench.lib.results import checked

METHODS = ("sssd", "layerskip", "hybrid")
COLUMNS = (
    "group={name} | at a time={concurrency} | arm={arm} | tokens/s={?tokens_per_second:.1f} | by pass={by_pass}",
    "over plain={?ratio:.2f} | 95 %={interval} | ms/token={ms_per_token:.1f} | TTFT p50={?ttft_ms:.0f}",
    "TTFT p99={?ttft_ms_p99:.0f} | TPOT p50={?decode_ms_per_token:.1f} | TPOT p99={?decode_ms_per_token_p99:.1f}",
    "tokens/pass={?tokens_per_step:.2f} | accepted={?acceptance:.0%} | identical={?identical:.1%}",
)
NOTE = (
    "Answers are compared with plain's as text, special tokens included. Servers start with nothing learnt or cached "
    "at each concurrency. Tokens per second are measured under full load, their ratio is the median over blocks of "
    "questions; ratios of a group are of the time per token of a request after its first token."
)


def bounds(low: float, high: float) -> str:
    """Format an interval; empty if it comes from one block alone, which has no spread."""
    return f" ({low:.2f}-{high:.2f})" if high > low else ""


def below_plain(result: dict[str, Any]) -> str:
    """Return one sentence with each arm's number of cells below plain; empty without comparisons."""
    ratios: dict[str, list[float]] = {}
    for row in result["rows"]:
        if "ratio" in row:
            ratios.setdefault(row["arm"], []).append(row["ratio"])
    counts = ", ".join(f"{arm} {sum(r < 0.99 for r in each)} of {len(each)}" for arm, each in ratios.items())
    return f"Cells of group and requests at a time that lie more than 1 % below plain: {counts}." if counts else ""


def near_the_best(result: dict[str, Any]) -> str:
    """Return one sentence with the number of cells that reach the best fixed draft length; empty without these."""
    shares = summary.of_best_length(result["rows"], result["settings"]["arms"])
    near = sum(share >= 0.99 for share in shares)
    said = f"{near} of {len(shares)} cells reach 99 % of the best fixed draft length, plain decoding among them."
    return said if shares else ""


def cells_of(rows: Rows) -> Iterator[tuple[int, str, dict[str, dict[str, Any]]]]:
    """Yield concurrency, group, and the rows of the arms by name."""
    for concurrency in names(rows, "concurrency"):
        for group in names(rows, "group"):
            if here := {r["arm"]: r for r in rows if (r["concurrency"], r["group"]) == (concurrency, group)}:
                yield concurrency, group, here


def markdown(result: dict[str, Any]) -> str:
    """Return a table of speed over plain by group (per token of a request) and over all questions; intervals: 95 %."""
    rows, settings = result["rows"], result["settings"]["arms"]
    # The plain arm; the first one if there are two engines.
    plain = next((name for name, arm in settings.items() if arm["speculative"] is None), None)
    arms = [arm for arm in names(rows, "arm") if any("ratio" in r for r in rows if r["arm"] == arm)]
    said = ["| at a time | questions | plain | " + " | ".join(arms) + " |", "|---" * (3 + len(arms)) + "|"]
    for concurrency, group, here in cells_of(rows):
        best = max((here[a]["ratio"] for a in arms if "ratio" in here.get(a, {})), default=0.0)
        form = "{?tokens_per_second:.1f} tokens/s" if group == summary.ALL else "{decode_ms_per_token:.1f} ms/token"
        cells = [tables.cell(form, (), here[plain]) if plain in here else ""]
        for arm in arms:
            r = here.get(arm, {})
            bold = "**" if r.get("ratio") == best else ""
            cells.append(f"{bold}{r['ratio']:.2f}{bold}{bounds(*r['ratio_interval'])}" if "ratio" in r else "")
        said.append(f"| {concurrency} | {nice(group)} | " + " | ".join(cells) + " |")
    return "\n".join(said)


def rivals(result: dict[str, Any]) -> str:
    """Return a table of freedraft's arms over each other arm on the same questions; empty without comparisons."""
    settings, rows = result["settings"]["arms"], result["rows"]
    arms = names(rows, "arm")
    ours = {a for a in arms if ((settings.get(a) or {}).get("speculative") or {}).get("method") in METHODS}
    compared = {(r["arm"], other) for r in rows for other in r.get("over", {})}
    pairs = [(a, b) for a in arms for b in arms if a in ours and (a, b) in compared]
    body = []
    for concurrency, group, here in cells_of(rows):
        found = [here.get(a, {}).get("over", {}).get(b) for a, b in pairs]
        body.append([nice(group), concurrency, *(f"{f[0]:.2f}{bounds(*f[1:])}" if f else "" for f in found)])
    cells = tables.markdown(["group", "at a time", *(f"{a} over {b}" for a, b in pairs)], body)
    return f"### Over the rivals\n\nThroughput, of a group ms per token; 95 % intervals.\n\n{cells}" if pairs else ""


def conditions(result: dict[str, Any]) -> str:
    """Return a sentence for readers of a page: model, engines, machine, questions and order of the arms."""
    settings, machine, arms = result["settings"], result["machine"], result["settings"]["arms"].values()
    used = {f"{arm['engine']}{build}" for arm in arms for build in ("", "-cpu")}
    # SGLang's versions come from its own environment.
    known = result["versions"].items() | {pair for arm in arms for pair in arm.get("versions", {}).items()}
    engines = ", ".join(f"{package} {version}" for package, version in sorted(known) if package in used)
    hardware = machine.get("gpu") or f"{machine['cores']} cores of {machine['cpu']}"
    mode, template = "eager" if settings["eager"] else "compiled", settings.get("chat_template_kwargs")
    limit, asked = settings["questions"]["limit"], ", ".join(settings["questions"]["files"])
    asked += f", {limit} of each group" if limit else ""
    turns = "One server at a time, arm after arm" if settings.get("in_turns") else "Arms took turns, block by block"
    return (
        f"{settings['model']}, {settings['dtype']}, {mode}; {engines}; {hardware}; "
        f"questions of {asked}, answers of about {settings['max_tokens']} tokens, greedy"
        f"{f', chat template with {json.dumps(template)}' if template else ''}; {result['finished'][:10]}. {turns}."
    )


def serving(name: str, result: dict[str, Any]) -> tuple[list[str], list[Plot]]:
    rows = result["rows"]
    for r in rows:
        r |= {"name": nice(r["group"])}
        r["interval"] = bounds(*r.get("ratio_interval", (0, 0)))
        r["by_pass"] = " ".join(f"{rate:.1f}" for rate in r.get("tokens_per_second_by_pass", ()))
    shown = [plot] if (plot := plots.ratios(name, rows)) else []
    parts = [f"## Serving: {name}", f"{conditions(result)} {NOTE}", below_plain(result), near_the_best(result)]
    parts += [f"> problem: {text}" for text in result["problems"]]
    parts += [f"![{plot.name}]({plot.name}.png)\n\n{plot.caption}" for plot in shown]
    commands = "\n".join(f"- `{command}`" for command in result["commands"].values())
    parts += [tables.table(rows, *COLUMNS), rivals(result), f"### Commands of the servers\n\n{commands}"]
    return parts, shown


def build(folder: Path) -> tuple[str, list[Plot]]:
    """Build the page and its plots from all result files in a folder. Raises ValueError: there is none, or one was
    changed since its benchmark wrote it."""
    body, shown = ["# freedraft: measured"], list[Plot]()
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and result.get("benchmark") == "serve":
            checked(path)
            parts, drawn = serving(path.stem, result)
            body, shown = body + parts, shown + drawn
    if not shown:
        raise ValueError(f"no results in {folder}: run bench/serve.py first")
    return "\n\n".join(filter(None, body)) + "\n", shown


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("bench/results"))
    parser.add_argument("--out", type=Path, help="the page (default: report.md in the folder); plots go beside it")
    args = parser.parse_args()
    out = args.out or args.folder / "report.md"
    try:
        page, shown = build(args.folder)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    for plot in shown:
        plot.figure.savefig(out.parent / f"{plot.name}.png", bbox_inches="tight", metadata={"Software": None})
    print(f"{out} and {len(shown)} plots")
