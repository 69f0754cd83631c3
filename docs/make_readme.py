"""Writes the figures in README.md from bench/results, between pairs of marks.

python docs/make_readme.py            # --check only reports whether they are up to date
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from make_results import DEMOS, ENGINES, cells, over_machines
from pages import FOLDER, ROOT, between, result

PAGE = ROOT / "README.md"
SERVED = "serve-vllm-cpu.json"
BY = "written by docs/make_readme.py"
MARKS = {name: (f"<!-- {name}: {BY} -->\n", f"<!-- end of {name} -->") for name in ("figures", "worst")}


def served() -> list[dict[str, Any]]:
    """Return the rows of the benchmark over HTTP; empty if it has not been run."""
    rows: list[dict[str, Any]] = result(SERVED)["rows"] if (FOLDER / SERVED).is_file() else []
    return rows


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table, one value a cell."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def bullet(text: str) -> str:
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"


def demo() -> str:
    """Return the figures of the demo, each the range of all machines if they differ."""
    results = [*map(result, DEMOS)]
    rows = []
    for title, figure in (("tokens per step, {}", "tokens_per_step"), ("speed-up, {}", "ratio")):
        by_kind = over_machines(results, figure)
        for engine in ENGINES.values():
            spans = [dict.fromkeys(f"{end:.1f}" for end in found[engine].span()) for found in by_kind.values()]
            rows.append([title.format(engine), *("-".join(span) for span in spans)])
    return table(["one request at a time, with a datastore", *by_kind], rows)


def rivals() -> str:
    whole = {
        (row["concurrency"], row["arm"]): row["ratio"] for row in served() if row["group"] == "all" and "ratio" in row
    }
    arms = ("ngram", "suffix", "sssd")
    rows = [
        [f"{at} concurrent request{'s' if at > 1 else ''}", *(f"{whole[at, arm]:.2f}" for arm in arms)]
        for at in sorted({at for at, _ in whole})
    ]
    return table(["speed-up of throughput, vLLM, no datastore", *(f"`{arm}`" for arm in arms)], rows)


def against_suffix() -> str:
    (whole,) = (row for row in served() if (row["group"], row["concurrency"], row["arm"]) == ("all", 1, "sssd"))
    level, low, high = whole["over"]["suffix"]
    return bullet(
        f"**Against `suffix`** (ArcticInference): level. Per token it is {level:.2f} times as fast (95 %: {low:.2f} to "
        f"{high:.2f}) with one request."
    )


def on_a_gpu() -> str:
    hour = result("first-hour.json")

    def same(arms: Iterable[str]) -> str:
        asked = ("greedy", "one", "seeded")
        shares = [row[kind] for row in hour["identical"] if row["arm"] in arms for kind in asked]
        return " of ".join(str(sum(share[i] for share in shares)) for i in (0, 1))

    fp32 = [row["arm"] for row in hour["identical"] if "bf16" not in row["arm"]]
    return bullet(
        f"**On an H200**, vLLM with CUDA graphs, random weights: in fp32 {same(fp32)} answers are identical. In bf16 "
        f"{same(['auto-bf16'])} are, and {same(['tree-bf16'])} with `shape: tree`. No control was run."
    )


def figures() -> str:
    skipping = result("layer-skip-vllm-cpu.json")
    deep, small = (skipping[f"{model} model, bf16, compiled"]["batch 1"]["ratio"] for model in ("deep", "demo"))
    layers = bullet(
        f"**`layerskip`**: {small:.2f} with SmolLM2, which has no layers to spare, and {deep:.2f} with a model that "
        "was built to have them. In bf16 some answers differ."
    )
    return f"{demo()}\n{rivals()}\n{against_suffix()}{layers}{on_a_gpu()}"


def worst() -> str:
    slowest: dict[str, tuple[float, str]] = {}
    for cell, value, kind in cells():
        where, _, requests = cell.rpartition(", ")
        place = "on a GPU" if cell.startswith("H200") else "elsewhere"
        name = {"sssd": f"`sssd` {place}", "layerskip": "`layerskip`"}.get(kind)
        if name is not None:
            span = f", {value.low:.2f} to {value.high:.2f}" if value.low is not None else ""
            found = value.at, f"{where}, {requests} request{'s' if requests != '1' else ''}{span}"
            slowest[name] = min(slowest.get(name, found), found)
    return "".join(f"  - {name}: {ratio:.2f} ({cell}).\n" for name, (ratio, cell) in slowest.items()) + "  "


def page() -> str:
    """Return README.md with current figures. Raises ValueError: a mark is missing."""
    text = PAGE.read_text(encoding="utf-8")
    for name, write in (("figures", figures), ("worst", worst)):
        text = between(text, *MARKS[name], write())
    return text


def main() -> int:
    try:
        text = page()
    except (ValueError, KeyError, TypeError, IndexError) as error:
        print(f"error: README.md: {error!r}", file=sys.stderr)
        return 2
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print("README.md is out of date: run python docs/make_readme.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
