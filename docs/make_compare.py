"""Writes compare.md from bench/results/compare-*.json, which it measures first where it is told which.

python docs/make_compare.py                       # write the page
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

from bench.lib.results import checked, write_json
from freedraft.compare import run

PAGE = Path(__file__).with_name("compare.md")
FOLDER = Path(__file__).resolve().parents[1] / "bench" / "results"
ARMS = {"vllm": "vLLM", "vllm-v2": "vLLM, model runner V2", "sglang": "SGLang"}
OUTCOMES = {run.SAME: "same", run.BOTH: "refused", run.DIFFERS: "**differs**", run.ONE: "**refused by one**"}
OUTCOMES[run.ITSELF] = "plain differs from itself"

HEAD = """\
# Is it lossless here?

<!-- Written by docs/make_compare.py from bench/results/compare-*.json: `make compare` measures and writes it. -->

`freedraft compare` sends some hundred kinds of request to a plain and to a drafting server of the same model, of vLLM or of
SGLang, and compares texts, token ids, finish reasons, usage and logprobs. So you can see on your own model and GPU whether
drafts change an answer.

```
vllm serve MODEL --port 8000 --dtype float32 --enforce-eager
vllm serve MODEL --port 8001 --dtype float32 --enforce-eager --speculative-config '{"method": "sssd"}'

freedraft compare http://127.0.0.1:8000 http://127.0.0.1:8001 --json compare.json
```

- Every kind is asked twice of each server, in turns. The second time, `sssd` drafts from what it has learnt of the first
  answer, so that nearly all of an answer comes from accepted drafts. Plain's two answers are the control: a request to which
  they differ is not compared, and its kind is shown as `plain differs from itself`. With sampling that is so unless seeds
  are heeded: SGLang needs `--enable-deterministic-inference` for that.
- Both servers need the same flags, except for those of speculation: `--enable-auto-tool-choice`, parsers, and room for
  eight requests at a time. The control does not see what depends on the shape of a batch, which drafts change. So use
  float32 and no CUDA graphs to be exact; in bf16, near ties and logprobs differ (`--tolerance`).
- Prompts of some kinds fill the whole context: with a `--max-model-len` of 2048 or less it takes a few minutes.
- `--only '*stop*'` sends the kinds with such names; it may be repeated. `--api-key`, or the variable `OPENAI_API_KEY`, is
  sent to both servers.

| exit code | meaning |
|---|---|
| 0 | no kind differs; refusals by both with the same status count as equal |
| 1 | a kind differs, or one server alone refuses it; the line below it says where |
| 2 | nothing was compared, one line says why: a server is down, models, dtypes, versions or context lengths differ, the first server drafts or the second does not, or no draft token was accepted |

Seen by the command: model, context length and engine; of SGLang and, with `VLLM_SERVER_DEV_MODE=1`, of vLLM dtype and
quantization, too. The number of accepted draft tokens is read from `/metrics` (SGLang: `--enable-metrics`).

"""


def result(arm: str) -> dict[str, Any]:
    name = FOLDER / f"compare-{arm}-cpu.json"
    checked(name)
    found: dict[str, Any] = json.loads(name.read_text(encoding="utf-8"))
    return found


def page() -> str:
    """Return compare.md. Raises ValueError: a result is missing, or is not as it was written."""
    arms = {arm: result(arm) for arm in ARMS}
    rows = {arm: {row["kind"]: row for row in found["rows"]} for arm, found in arms.items()}
    text = HEAD + "## The demo model on a CPU\n\n"
    text += "fp32, eager, seeds heeded, `sssd` with up to 8 draft tokens. In brackets: draft tokens accepted.\n\n"
    for arm, found in arms.items():
        counts = ", ".join(f"{n} {OUTCOMES[name].strip('*')}" for name, n in found["outcomes"].items())
        text += (
            f"- {ARMS[arm]} {found['about'].get('version', '')}: {sum(found['outcomes'].values())} kinds: {counts}\n"
        )
    text += f"\n| kind of request | {' | '.join(ARMS.values())} |\n|---|{'---|' * len(ARMS)}\n"

    def cell(row: dict[str, Any] | None) -> str:
        return f"{OUTCOMES[row['outcome']]} ({row['accepted']})" if row else ""

    for kind in dict.fromkeys(kind.name for kind in run.load({})):
        text += f"| {kind} | {' | '.join(cell(of.get(kind)) for of in rows.values())} |\n"
    return text


def measure(arm: str, model: Path) -> None:
    """Start both servers and compare them."""
    from tests.support.compared import ROOM, compared

    with tempfile.TemporaryDirectory() as folder, compared(arm, model, Path(folder), ROOM.get(arm, 512)) as servers:
        rows = []
        for row in run.compare(*servers):
            rows.append(vars(row))
            print(row.kind, row.outcome, row.difference or "", flush=True)
        about = servers[0].about | {"model": model.name}
    done = {"about": about, "outcomes": Counter(row["outcome"] for row in rows), "rows": rows}
    write_json(FOLDER / f"compare-{arm}-cpu.json", done)


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
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print("compare.md is out of date: run python docs/make_compare.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
