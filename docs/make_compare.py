"""Writes the table of compare.md from bench/results/compare-*.json, or measures one of these.

python docs/make_compare.py                       # write the table
python docs/make_compare.py --check               # exit code 1 when it is out of date
python docs/make_compare.py vllm build/model      # ask a plain and a drafting server; also: vllm-v2, sglang
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import pages
from pages import FOLDER, result

import freedraft.compare as run
from bench.lib.results import write_json

PAGE = Path(__file__).with_name("compare.md")
ARMS = {"vllm": "vLLM", "vllm-v2": "vLLM, model runner V2", "sglang": "SGLang"}
OUTCOMES = {run.SAME: "same", run.BOTH: "refused by both", run.ITSELF: "plain differs from itself"}
OUTCOMES |= {run.DIFFERS: "differs", run.ONE: "refused by one"}
MARKS = "<!-- table: written by docs/make_compare.py -->\n", "<!-- end of table -->"


def table() -> str:
    """Return the number of kinds by engine and outcome, and the kinds that differ or that one server alone refuses."""
    found = {name: FOLDER / f"compare-{arm}-cpu.json" for arm, name in ARMS.items()}
    rows = {name: result(path.name)["rows"] for name, path in found.items() if path.exists()}
    text = f"| engine | kinds | {' | '.join(OUTCOMES.values())} |\n|---|{'---|' * (1 + len(OUTCOMES))}\n"
    for name, kinds in rows.items():
        counts = [sum(kind["outcome"] == outcome for kind in kinds) for outcome in OUTCOMES]
        link = f"[{name}](../bench/results/{found[name].name})"
        text += f"| {link} | {len(kinds)} | {' | '.join(map(str, counts))} |\n"
    for outcome in (run.DIFFERS, run.ONE):
        for name, kinds in rows.items():
            if those := [kind["kind"] for kind in kinds if kind["outcome"] == outcome]:
                text += f"\n{name}, {OUTCOMES[outcome]}: {', '.join(those)}.\n"
    return text


def files() -> dict[Path, str]:
    return {PAGE: pages.between(PAGE.read_text(encoding="utf-8"), *MARKS, table())}


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


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--check"]
    if arguments:
        measure(arguments[0], Path(arguments[1]))
    else:
        sys.exit(pages.main(files))
