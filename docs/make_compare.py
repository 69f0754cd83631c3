"""Writes the table of compare.md from bench/results/compare-*.json, or measures one of these.

python docs/make_compare.py                       # write the table
python docs/make_compare.py --check               # exit code 1 when it is out of date
python docs/make_compare.py vllm build/model      # ask a plain and a drafting server; also: vllm-v2, sglang
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import freedraft.compare as run
from bench.lib.results import checked, write_json

PAGE = Path(__file__).with_name("compare.md")
FOLDER = Path(__file__).resolve().parents[1] / "bench" / "results"
ARMS = {"vllm": "vLLM", "vllm-v2": "vLLM, model runner V2", "sglang": "SGLang"}
OUTCOMES = {run.SAME: "same", run.BOTH: "refused", run.DIFFERS: "**differs**", run.ONE: "**refused by one**"}
OUTCOMES[run.ITSELF] = "plain differs from itself"

MARKS = "<!-- table: written by docs/make_compare.py -->\n", "<!-- end of table -->"


def result(arm: str) -> dict[str, Any]:
    name = FOLDER / f"compare-{arm}-cpu.json"
    checked(name)
    found: dict[str, Any] = json.loads(name.read_text(encoding="utf-8"))
    return found


def table() -> str:
    arms = {arm: result(arm) for arm in ARMS if (FOLDER / f"compare-{arm}-cpu.json").exists()}
    rows = {arm: {row["kind"]: row for row in found["rows"]} for arm, found in arms.items()}
    text = ""
    for arm, found in arms.items():
        counts = ", ".join(f"{n} {OUTCOMES[name].strip('*')}" for name, n in found["outcomes"].items())
        text += f"- {ARMS[arm]}: {len(found['rows'])} kinds: {counts}\n"
    text += f"\n| kind of request | {' | '.join(ARMS[arm] for arm in arms)} |\n|---|{'---|' * len(arms)}\n"

    def cell(row: dict[str, Any] | None) -> str:
        return f"{OUTCOMES[row['outcome']]} ({row['accepted']})" if row else ""

    for kind in dict.fromkeys(kind["kind"] for kind in run.load({})):
        if any(kind in of for of in rows.values()):
            text += f"| {kind} | {' | '.join(cell(of.get(kind)) for of in rows.values())} |\n"
    return text


def page() -> str:
    """Return compare.md. Raises ValueError: a result is not as it was written, or the marks are gone."""
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    _, closed, after = rest.partition(MARKS[1])
    if not (found and closed):
        raise ValueError("the marks around the table are gone")
    return before + found + table() + closed + after


def measure(arm: str, model: Path) -> None:
    """Start both servers and compare them; model runner V2, which is slow here, with a random model of bytes."""
    from tests.support.compared import RECORDED, byte_model, compared, patterns

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served = byte_model(folder / "bytes", model) if arm == "vllm-v2" else model
        rows = []
        with compared(arm, served, folder) as servers:
            for row in run.compare(*servers, patterns(RECORDED) if arm == "vllm-v2" else []):
                rows.append(row)
                print(row["kind"], row["outcome"], row["difference"] or "", flush=True)
    done = {"about": servers[0].about | {"model": served.name}, "outcomes": Counter(row["outcome"] for row in rows)}
    write_json(FOLDER / f"compare-{arm}-cpu.json", done | {"rows": rows})


def main() -> int:
    arguments = [word for word in sys.argv[1:] if word != "--check"]
    try:
        if arguments:
            measure(arguments[0], Path(arguments[1]))
            return 0
        text = page()
    except (ValueError, OSError, KeyError, TypeError, IndexError) as error:
        print(f"error: compare.md: {error!r}", file=sys.stderr)
        return 2
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print("compare.md is out of date: run python docs/make_compare.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
