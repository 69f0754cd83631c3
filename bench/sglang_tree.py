"""Tokens per step through SGLang: the best tree of 16 nodes against the best chain of 16, and the tokens of both.

No times are taken: the figures are the same on every machine, as far as greedy decoding in fp32 is. Without
`--questions` the demo's twelve prompts are asked, without `--corpus` there is no datastore.

    python bench/sglang_tree.py --model build/model --questions spec_bench.jsonl --every 5 \
        --corpus answers.jsonl --field output --json build/sglang-tree.json

Further questions are added to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.machine import machine, versions
from bench.lib.prompts import BY_KIND, chats
from bench.lib.results import earlier_figures, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--questions", type=Path, help="JSONL with `turns` (Spec-Bench), `question` or `prompt`")
    parser.add_argument("--every", type=int, default=1, help="ask every so many-th question")
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="JSONL files for the datastore")
    parser.add_argument("--field", default="text", help="of the corpus")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["SGLANG_PLATFORM"] = "freedraft_cpu"

    from tests.sglang.conftest import read_counts, sglang_engine

    texts = questions(args.questions)[:: args.every] if args.questions else BY_KIND
    prompts = chats(args.model, texts, tokenize=False)
    sampling = {"temperature": 0, "max_new_tokens": args.tokens}
    result: dict[str, object] = {"model": args.model.name, "nodes": args.nodes, "prompts": len(prompts), "corpus": []}
    every = f", every {args.every}th" if args.every > 1 else ""
    result["questions"] = args.questions.name + every if args.questions else "the demo's twelve prompts"
    answers = {}
    store = tempfile.TemporaryDirectory()
    env = {"FREEDRAFT_SCORING": "learned"}
    if args.corpus:
        env["FREEDRAFT_DATASTORE"] = build_store(Path(store.name) / "store", args.corpus, args.model, args.field)
        result["corpus"] = [path.name for path in args.corpus]
    for name in ("tree", "chain"):
        with tempfile.TemporaryDirectory() as folder:
            counts = Path(folder) / "counts.json"
            options = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": args.nodes}
            with sglang_engine(args.model, counts, env=env | {"FREEDRAFT_SHAPE": name}, **options) as engine:
                answers[name] = [o["output_ids"] for o in engine.generate(prompts, sampling)]
            done = read_counts(counts)
        result[name] = done["tokens"] / done["request_steps"]
        print(f"{name}: {result[name]:.3f} tokens per step over {done['request_steps']} steps")
    result["gain"] = result["tree"] / result["chain"] - 1  # type: ignore[operator]
    result["same answers"] = answers["tree"] == answers["chain"]
    print(f"tree over chain: {result['gain']:+.1%}; same answers: {result['same answers']}")
    if args.json:
        before = earlier_figures(args.json) or {"runs": []}
        runs = [run for run in before["runs"] if run["questions"] != result["questions"]] + [result]
        made = {"machine": machine(), "versions": versions("sglang", "torch"), "runs": runs}
        data = [*args.corpus, *([args.questions] if args.questions else [])]
        write_json(args.json, made, data=data, earlier=bool(before["runs"]))


def questions(path: Path) -> list[str]:
    """The first turn of every question."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row.get("question") or row["prompt"] for row in rows]


def build_store(folder: Path, corpus: list[Path], model: Path, field: str) -> str:
    command = ["freedraft", "datastore", "build", folder, *corpus, "--tokenizer", model, "--field", field]
    command[0] = str(Path(sys.executable).with_name("freedraft"))
    subprocess.run([str(part) for part in command], check=True)
    return str(folder)


if __name__ == "__main__":
    main()
