"""Plots of the results page."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from bench.lib.summary import ALL

Rows = Sequence[dict[str, Any]]

# Okabe and Ito's colours, safe for the colour-blind; freedraft's first.
COLOURS = {"sssd": "#0072B2", "plain": "#555555", "ngram": "#E69F00", "suffix": "#D55E00", "layerskip": "#009E73"}
COLOURS |= {"sglang": "#999999", "sglang-sssd": "#56B4E9", "sglang-ngram": "#CC79A7"}
SPARE = ("#CC79A7", "#F0E442", "#56B4E9", "#000000")
GROUPS = {"mt_bench": "MT-Bench", "qa": "QA", "rag": "RAG", "math_reasoning": "math", "summarization": "summaries"}
STYLE: dict[Any, Any] = {"figure.dpi": 100, "savefig.dpi": 160, "font.size": 11, "legend.frameon": False}
STYLE |= {
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
plt.rcParams.update(STYLE)


class Plot(NamedTuple):
    """A picture on the page, also written as `name`.png."""

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


def bars_of_ratios(axis: Any, rows: Rows, arms: Sequence[str]) -> None:
    groups, width = names(rows, "group"), 0.8 / len(arms)
    for i, arm in enumerate(arms):
        mine = [r for r in rows if r["arm"] == arm]
        at = [groups.index(r["group"]) + (i - (len(arms) - 1) / 2) * width for r in mine]
        bounds = [(r["ratio"] - r["ratio_interval"][0], r["ratio_interval"][1] - r["ratio"]) for r in mine]
        errors = np.maximum(bounds, 0).T if mine else None
        values, shade = [r["ratio"] for r in mine], colour(arm, arms)
        axis.bar(at, values, width, color=shade, label=arm, yerr=errors, capsize=2, ecolor="#333333")
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right"} if len(groups) > 6 else {}
    axis.set_xticks(range(len(groups)), [nice(g) for g in groups], **slanted)


def ratios(name: str, rows: Rows) -> Plot | None:
    compared = [r for r in rows if "ratio" in r]
    if not compared:
        return None
    arms, panels = names(compared, "arm"), list[tuple[str, Rows]]()
    for concurrency in names(compared, "concurrency"):
        here = [r for r in compared if r["concurrency"] == concurrency and r["group"] != ALL]
        panels.append((f"{concurrency} at a time, tokens of a request", here))
    every = [r | {"group": f"{r['concurrency']} at a time"} for r in compared if r["group"] == ALL]
    panels.append(("throughput of all questions", every))
    columns = 1 if len(panels) < 3 else 2
    count = -(-len(panels) // columns)
    size = 7.0 * columns, 0.6 + 2.4 * count
    figure, axes = plt.subplots(count, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, shown) in zip(axes.flat, panels, strict=False):
        bars_of_ratios(axis, shown, arms)
        axis.axhline(1, color="#555555", linewidth=1.2)
        axis.set_ylabel("over plain")
        axis.set_title(title, loc="left", fontsize=11)
    axes[0, 0].set_ylim(0, 1.5 * max(row["ratio"] for row in compared))  # intervals of few questions may go beyond
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=len(arms), loc="outside upper right")
    caption = (
        "Speed over plain decoding on the same questions; 1 is plain. By group: time of a request for each token "
        "after the first; bars are 95 % intervals, bootstrapped over questions. Of all: throughput under full load, "
        "prefill included, median over blocks of questions; intervals over blocks."
    )
    return Plot(f"{name}-ratios", figure, caption)
