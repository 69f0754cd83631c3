"""Writes the figures in README.md from bench/results, between pairs of marks.

python docs/make_readme.py            # --check only reports whether they are up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pages import FOLDER, ROOT, nice, result

PAGE = ROOT / "README.md"
SERVED = "serve-vllm-cpu.json"
BY = "written by docs/make_readme.py"
MARKS = {name: (f"<!-- {name}: {BY} -->\n", f"<!-- end of {name} -->") for name in ("figures", "worst")}


def served() -> list[dict[str, Any]]:
    """Return the rows of the benchmark over HTTP; empty if it has not been run."""
    rows: list[dict[str, Any]] = result(SERVED)["rows"] if (FOLDER / SERVED).is_file() else []
    return rows


def served_figures() -> dict[str, str]:
    def ratios(arm: str, mine: list[dict[str, Any]]) -> str:
        return " / ".join(f"{row['ratio']:.2f}" for row in mine if row["arm"] == arm)

    rows = served()
    if not rows:
        return {}
    at = sorted({row["concurrency"] for row in rows})
    whole = [row for row in rows if row["group"] == "all"]
    groups = [row for row in rows if row["group"] != "all" and row["concurrency"] == at[0]]
    said, names = (" / ".join(dict.fromkeys(texts)) for texts in (map(str, at), (nice(row["group"]) for row in groups)))
    rivals = "".join(f"; `{arm}`: {ratios(arm, whole)}" for arm in ("ngram", "suffix") if ratios(arm, whole))
    return {
        f"the one flag over HTTP, vLLM, {said} at a time, throughput{rivals}": ratios("sssd", whole),
        f"the same, {at[0]} at a time, tokens of a request: {names}": ratios("sssd", groups),
    }


def figures() -> str:
    rows_of = {engine: result(f"demo-{engine}-cpu.json")["rows"] for engine in ("vllm", "sglang")}
    demo, demo_sglang = (" / ".join(f"{row['ratio']:.1f}" for row in rows) for rows in rows_of.values())
    kinds = " / ".join(row["kind"] for row in rows_of["vllm"])
    deep = result("layer-skip-vllm-cpu.json")["deep model, bf16, compiled"]["batch 1"]
    deep_sglang = result("layer-skip-sglang-cpu.json")["batches"][0]
    by_engine = ((deep["ratio"], *deep["ratio_quarters"]), (deep_sglang["ratio"], *deep_sglang["ratio_spread"]))
    windows = " / ".join(
        f"{row['ratio']:.2f}"
        for engine in ("vllm", "sglang")
        for row in result(f"windowed-{engine}-cpu.json")["rows"]
        if (row["batch"], row["context"]) == (8, 7500)
    )
    rows = {
        f"`make demo`, vLLM, one request at a time: {kinds}": demo,
        "`make demo-sglang`, trees: the same prompts": demo_sglang,
        **served_figures(),
        "`layerskip`, deep synthetic model, bf16 (some answers part at near ties), batch 1, vLLM / SGLang (spread)": (
            " / ".join("{:.2f} ({:.2f}-{:.2f})".format(*three) for three in by_engine)
        ),
        "`layerskip`, `window: auto`, 8 requests of 7,500 tokens, fp32, vLLM / SGLang": windows,
    }
    shared = result("exchange.json")["vllm"]
    by_drafter = {
        row["drafter"]: row["tokens_per_step"]
        for row in result("replay.json")
        if row["trace"] == "replay_llama31_8b.jsonl"
        and (row["shape"], row["budget"]) == ("tree", 16)
        and row["scoring"] in ("learned", None)
        and row["store_tokens"]
    }
    return (
        "| | over plain |\n|---|---|\n"
        + "".join(f"| {what} | {value} |\n" for what, value in rows.items())
        + f"\nWhat one server answered, another one drafts from {shared['wait_seconds']:.0f} seconds later (two vLLM "
        f"servers and an S3 bucket, over HTTP):\n{shared['other_server']:.1f} tokens per step instead of "
        f"{shared['first_answer']:.1f}. Draft quality, the same on every machine: {by_drafter['sssd']:.2f} tokens per "
        f"step from trees of 16\non recorded Llama-3.1-8B answers, suffix decoding {by_drafter['suffix']:.2f}.\n"
    )


def of_sssd() -> Iterator[tuple[float, str]]:
    for row in result("budget-replay.json")["rows"]:
        yield row["ratio"]["auto"], f"replayed traffic, {row['batch']} at a time"
    for row in served():
        if row["arm"] == "sssd":
            yield row["ratio"], f"{nice(row['group'])}, {row['concurrency']} at a time"


def of_layerskip() -> Iterator[tuple[float, str]]:
    for engine, name in (("vLLM", "vllm-cpu"), ("vLLM, bf16", "vllm-cpu-bf16"), ("SGLang", "sglang-cpu")):
        if (FOLDER / f"windowed-{name}.json").is_file():
            for row in result(f"windowed-{name}.json")["rows"]:
                yield row["ratio"], f"windows, {engine}, {row['batch']} of {row['context']:,} tokens"
    for model, cells in result("layer-skip-vllm-cpu.json").items():
        if isinstance(cells, dict) and "fp32" not in model:
            for cell, row in (cells if model != "mixed_sets" else {"four sets in a batch": cells}).items():
                yield row["ratio"], f"{model.partition(',')[0].replace('_', ' ')}, {cell}"


def worst() -> str:
    said = [
        "`{}` {:.2f} ({})".format(method, *min(rows))
        for method, rows in (("sssd", of_sssd()), ("layerskip", of_layerskip()))
    ]
    return f"  The worst of the [results](docs/results.md) with `auto`, times plain:\n  {', '.join(said)}.\n  "


def page() -> str:
    """Return README.md with current figures. Raises ValueError: a mark is missing."""
    text = PAGE.read_text(encoding="utf-8")
    for name, write in (("figures", figures), ("worst", worst)):
        begin, end = MARKS[name]
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"README.md: the marks around {name} are gone")
        text = before + begin + write() + end + after
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
