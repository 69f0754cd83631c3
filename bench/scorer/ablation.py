"""What groups of the scorer's inputs are worth: tokens per step of networks that were trained without them.

    python -m bench.scorer.ablation --tokenizer MODEL_DIR --trace trace.jsonl other.jsonl --sessions agents.jsonl \\
        --json OUT

Trains on the first rows of the first trace and on the sessions, from drafts by the shipped weights, and replays the
last rows of all traces, the sessions and edits of long prompts. Recycled logits have no part in a replay.
"""

import argparse
from itertools import chain
from pathlib import Path
from typing import Any

from bench.lib.results import write_json
from bench.lib.rivals import Cell
from bench.lib.trace import Sessions, Trace, replayed
from bench.replay import make, replay
from bench.scorer.long_contexts import copies, python_sources
from bench.scorer.training import collect, fit, lessons_of_rows, lessons_of_sessions
from bench.scorer.weights import save
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.method import LEADING, to_learn
from sssd_plugin.scoring.weights import Weights

GROUPS = {
    "none": (),
    "contexts without their last token": ("skip_store_counts", "skip_request_counts"),
    "variety of followers": ("store_variety", "request_variety"),
    "longest contexts": ("below_root", "store_order", "request_order"),
    "counts by context": ("store_counts", "request_counts"),
    "store contexts of many tokens": ("many", "many_counts"),
    "matches of many tokens": ("long_counts", "match", "longest", "newest"),
    "alignments": ("aligned", "since", "run", "edit", "evidence"),
    "newest in the store": ("follower", "learnt"),
    "surplus in the request": ("surplus",),
}
TRAINED, CELL = 240, Cell("sssd", "tree", 16)  # rows of a trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--trace", type=Path, nargs="+", required=True)
    parser.add_argument("--sessions", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    encoder = tokenizer.load(options.tokenizer)
    vocab_size, edits = encoder.get_vocab_size(), python_sources(encoder, 16_000)
    traces = {path.name: Trace.load(path, options.tokenizer) for path in options.trace}
    sessions = {path.name: Sessions.load(path, options.tokenizer) for path in options.sessions}
    first = next(iter(traces.values()))
    lessons = [
        lessons_of_rows(replayed(first.rows[:TRAINED]), vocab_size),
        *map(lessons_of_sessions, sessions.values()),
    ]
    examples, weights = collect(chain.from_iterable(lessons), Weights.load()), options.json.with_suffix(".weights")
    results: list[dict[str, Any]] = []
    for group, names in GROUPS.items():
        save(fit(examples, without=names), weights)
        row: dict[str, Any] = {"without": group, "inputs": " ".join(names)}
        for name, trace in traces.items():
            row[name] = replay(trace.test_rows, make(CELL, trace.documents, vocab_size, weights))["tokens_per_step"]
        for name, each in sessions.items():
            live = LiveStore(vocab_size, isolation="shared")

            def learn(prompt: Any, answer: Any, live: LiveStore = live) -> None:
                live.insert(to_learn(prompt, answer, LEADING))
                live.runs.settle()

            turns = list(chain.from_iterable(each.turns.values()))
            draft = make(CELL, [], vocab_size, weights, live)
            row[name] = replay(turns, draft, finished=learn)["tokens_per_step"]
            live.close()
        for kind in ("copy", "insert", "delete"):
            row[kind] = replay(copies(edits, 8_000, kind, 4), make(CELL, [], vocab_size, weights))["tokens_per_step"]
        results.append(row)
        print(row, flush=True)
        write_json(options.json, results, data=[*options.trace, *options.sessions])
    weights.unlink()


if __name__ == "__main__":
    main()
