"""Draft quality without an engine: replay recorded answers and count the tokens that each step would have produced.

    python bench/replay.py --trace FILE --tokenizer DIR --budget 16 --shape tree --drafter sssd --json OUT

Greedy verification accepts exactly the drafted tokens that equal the target's own continuation, so a recorded answer
of any model tells what would have been accepted: the same figure on every machine. Protocol: the outputs of the first
605 rows are the datastore; the other rows are replayed, outputs cut at 512 tokens, rows with a prompt under 4 or an
output under 9 tokens left out; a step yields the longest drafted path that equals the continuation, plus one token.
The budget counts the root.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from sssd_plugin.datastore.sub_index import SEPARATOR, Snapshot, SubIndex
from sssd_plugin.drafter import Drafter
from sssd_plugin.learned import Weights
from sssd_plugin.trace import Row, Trace

STORE_ROWS, MAX_OUTPUT, MIN_PROMPT, MIN_OUTPUT = 605, 512, 4, 9
SHIPPED = Path(__file__).resolve().parent.parent / "sssd_plugin" / "weights"

# Draft for the first n tokens of a row; called with n rising within a request, and with a fresh id per request.
DraftFunction = Callable[[str, NDArray[np.int32], int], DraftBatch]


def build_store(trace: Trace) -> Snapshot:
    """The outputs of the first 605 rows, a separator after each."""
    documents = [np.append(output, SEPARATOR) for _, output in trace.rows[:STORE_ROWS]]
    if not documents:
        return Snapshot.empty()
    return Snapshot.of([SubIndex.build(np.concatenate(documents).astype(np.int32), trace.vocab_size)])


def test_rows(trace: Trace) -> list[Row]:
    rows = [(prompt, output[:MAX_OUTPUT]) for prompt, output in trace.rows[STORE_ROWS:]]
    return [(p, o) for p, o in rows if len(p) >= MIN_PROMPT and len(o) >= MIN_OUTPUT]


def accepted(batch: DraftBatch, continuation: NDArray[np.int32]) -> int:
    """Length of the longest drafted path that equals the continuation."""
    n = int(batch.counts[0])
    children = {(int(batch.parents[0, i]), int(batch.tokens[0, i])): i for i in range(1, n)}
    node = depth = 0
    for token in continuation.tolist():
        if (node, token) not in children:
            break
        node = children[node, token]
        depth += 1
    return depth


def sssd(snapshot: Snapshot, arguments: argparse.Namespace, vocab_size: int, weights: Path | None) -> DraftFunction:
    drafter = Drafter(
        vocab_size=vocab_size, max_nodes=arguments.budget, scoring=arguments.scoring, weights=weights, snapshot=snapshot
    )
    row = np.zeros(1, np.int32)

    def draft(request: str, tokens: NDArray[np.int32], n: int) -> DraftBatch:
        drafter.extend([request], tokens[None], row, np.array([n], np.int32))
        batch = drafter.draft([request], max_nodes=arguments.budget, shape=arguments.shape)
        if len(drafter) > 1:
            drafter.finish(r for r in drafter.request_ids() if r != request)
        return batch

    return draft


def lookup(budget: int) -> DraftFunction:
    """Prompt lookup: what followed the first occurrence of the longest suffix of 4, 3, 2 tokens."""
    out = DraftBatch.empty(1, budget)
    out.parents[0] = np.arange(-1, budget - 1)
    out.depths[0] = np.arange(budget)
    out.scores[0] = 1.0

    def draft(request: str, tokens: NDArray[np.int32], n: int) -> DraftBatch:
        found: NDArray[np.int32] = tokens[:0]
        for size in (4, 3, 2):
            if n <= size:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(tokens[: n - 1], size)
            hits = np.flatnonzero((windows == tokens[n - size : n]).all(1))
            if len(hits):
                start = int(hits[0]) + size
                found = tokens[start : min(start + budget - 1, n)]
                break
        out.tokens[0, 0] = tokens[n - 1]
        out.tokens[0, 1 : 1 + len(found)] = found
        out.counts[0] = 1 + len(found)
        return out

    return draft


def replay(rows: list[Row], draft: DraftFunction) -> dict[str, float]:
    steps = produced = nodes = 0
    seconds = 0.0
    for number, (prompt, output) in enumerate(rows):
        tokens = np.concatenate([prompt, output]).astype(np.int32)
        position = len(prompt)
        while position < len(tokens):
            started = time.perf_counter()
            batch = draft(str(number), tokens, position)
            seconds += time.perf_counter() - started
            advance = min(accepted(batch, tokens[position:]) + 1, len(tokens) - position)
            position += advance
            produced += advance
            nodes += int(batch.counts[0])
            steps += 1
    return {
        "tokens_per_step": round(produced / steps, 4),
        "draft_us_per_step": round(seconds / steps * 1e6, 2),
        "nodes_per_step": round(nodes / steps, 2),
        "output_tokens": produced,
        "steps": steps,
    }


def untainted_weights(trace: Trace) -> Path:
    """The shipped weights that were not trained on this trace."""
    for path in sorted(SHIPPED.glob("*.json")):
        if Weights.load(path).trace_sha256 != trace.sha256:
            return path
    raise ValueError(f"all weights in {SHIPPED} were trained on this trace; give --weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help='JSONL with "prompt" and "output"')
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, default=16, help="nodes per step, root included")
    parser.add_argument("--shape", choices=("tree", "chain"), default="tree")
    parser.add_argument("--drafter", choices=("sssd", "lookup"), default="sssd")
    parser.add_argument("--scoring", choices=("learned", "paper"), default="learned")
    parser.add_argument("--weights", type=Path, help="scorer weights; default: shipped ones trained on another trace")
    parser.add_argument("--no-store", action="store_true", help="draft from prompt and output only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.budget < 1:
            raise ValueError("--budget must be at least 1 (the root)")
        trace = Trace.load(arguments.trace, arguments.tokenizer)
        rows = test_rows(trace)
        if not rows:
            raise ValueError(f"trace: {arguments.trace} has no row to replay after its first {STORE_ROWS}")
        learned = arguments.drafter == "sssd" and arguments.scoring == "learned"
        weights = (arguments.weights or untainted_weights(trace)) if learned else None
        snapshot = Snapshot.empty() if arguments.no_store else build_store(trace)
        if arguments.drafter == "lookup":
            draft = lookup(arguments.budget)
        else:
            draft = sssd(snapshot, arguments, trace.vocab_size, weights)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    used = Weights.load(weights) if weights else None
    result = {
        **replay(rows, draft),
        "store_tokens": snapshot.n_tokens,
        "rows": len(rows),
        "trace": arguments.trace.name,
        "drafter": arguments.drafter,
        "scoring": arguments.scoring if arguments.drafter == "sssd" else None,
        "shape": arguments.shape if arguments.drafter == "sssd" else "chain",
        "budget": arguments.budget,
        "weights_trained_on": used.trained_on if used else None,
        "weights_saw_this_trace": used.trace_sha256 == trace.sha256 if used else None,
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
