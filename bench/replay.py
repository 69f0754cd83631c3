"""Draft quality without an engine: replay recorded answers and count the tokens that each step would have produced.

    python bench/replay.py --trace FILE --tokenizer DIR --budget 4 8 16 32 --drafter sssd paper suffix lookup --json OUT
    python bench/replay.py --long --tokenizer DIR --drafter sssd suffix --json OUT

Rivals: prompt lookup; `suffix`, ArcticInference's suffix decoding (`bench/arctic.py build/arctic` builds it). One that
cannot be imported is named, and the others go on.

Greedy verification accepts exactly the drafted tokens that equal the target's own continuation, so a recorded answer
of any model tells what would have been accepted: the same figure on every machine. Protocol: the outputs of the first
605 rows are the datastore; the other rows are replayed, outputs cut at 512 tokens, rows with a prompt under 4 or an
output under 9 tokens left out; a step yields the longest drafted path that equals the continuation, plus one token.
The budget counts the root.

--long replays answers that copy, or edit, 600 tokens of a prompt of 1 k to 128 k tokens of Python's library, without a
datastore, as chains and as trees.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.results import ROOT, earlier_figures, write_json
from bench.lib.tables import pivot
from bench.lib.trace import Row, Trace, replayed, store_of
from bench.scorer.long_contexts import KINDS, copies, python_sources
from freedraft.draft import DraftBatch
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.drafter import Drafter
from sssd_plugin.scoring.weights import BINS, Weights

STORE_ROWS = 605
SHIPPED = ROOT / "sssd_plugin" / "scoring" / "weights"
COPIES = 4
"""Of each kind and length."""
DRAFTERS = ("sssd", "paper", "suffix", "lookup")
SCORINGS = {"sssd": "learned", "paper": "paper"}
SHAPES = {"lookup": "chain"}
"""Drafters that know one shape only."""
SOURCES = ("request", "datastore", "both alike", "neither")

# Draft for the first n tokens of a row; called with n rising within a request, and with a fresh id per request, first
# with the length of its prompt.
DraftFunction = Callable[[str, NDArray[np.int32], int], DraftBatch]


def store_documents(trace: Trace) -> list[NDArray[np.int32]]:
    """What drafters may learn from beforehand: the outputs of the first 605 rows."""
    return [output for _, output in trace.rows[:STORE_ROWS]]


def build_store(trace: Trace) -> Snapshot:
    return store_of(store_documents(trace), trace.vocab_size)


def test_rows(trace: Trace) -> list[Row]:
    return replayed(trace.rows[STORE_ROWS:])


def accepted_path(batch: DraftBatch, continuation: NDArray[np.int32]) -> list[int]:
    """Nodes of the longest drafted path that equals the continuation, root left out."""
    n = int(batch.counts[0])
    children = {(int(batch.parents[0, i]), int(batch.tokens[0, i])): i for i in range(1, n)}
    path: list[int] = []
    node = 0
    for token in continuation.tolist():
        if (node, token) not in children:
            break
        node = children[node, token]
        path.append(node)
    return path


def source_of(kind: int) -> str:
    """Where the learned scorer found the longer context of a node: its kind is its weight set."""
    store, request = divmod(kind, BINS)
    if not (store or request):
        return "neither"
    if store == request:
        return "both alike"
    return "request" if request > store else "datastore"


def drafting(drafter: Drafter, budget: int, shape: Any = "tree") -> DraftFunction:
    current, known = "", 0

    def draft(request: str, tokens: NDArray[np.int32], n: int) -> DraftBatch:
        nonlocal current, known
        if request != current:
            drafter.finish([current])
            drafter.replace(request, tokens[:n])
        else:
            drafter.update([request], tokens, np.array([known]), np.array([n]), np.array([n], np.int32))
        current, known = request, n
        return drafter.draft([request], max_nodes=budget, shape=shape)

    return draft


def suffix(documents: Sequence[NDArray[np.int32]], budget: int, shape: str) -> DraftFunction:
    """ArcticInference's suffix decoding: a tree over the request, one over all answers, the better of both.

    Its limits are opened (4 tokens for each one matched, no least probability), which is best for it here, and its tree
    grows by the answers replayed so far, as when it serves; freedraft's datastore stays what it was. Raises
    ImportError: it is not installed."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1 if documents else 0)
    for number, document in enumerate(documents):
        cache.start_request(("store", number), [])
        cache.add_active_response(("store", number), document.tolist())
        cache.stop_request(("store", number))
    out = DraftBatch.empty(1, budget)
    out.scores[0] = 1.0
    current, known = "", 0

    def draft(request: str, tokens: NDArray[np.int32], n: int) -> DraftBatch:
        nonlocal current, known
        if request != current:
            if current:
                cache.stop_request(current)
            cache.start_request(request, tokens[:n].tolist())
            current, known = request, n
        if n > known:
            cache.add_active_response(request, tokens[known:n].tolist())
            known = n
        end = tokens[max(0, n - 64) : n].tolist()
        limits = {"max_spec_tokens": budget - 1, "max_spec_factor": 4.0, "min_token_prob": 0.0}
        found = cache.speculate(request, end, use_tree_spec=shape == "tree", **limits)
        # A tree whose parents count the root as 0 and come before their children.
        out.tokens[0, 0], out.parents[0, 0], out.depths[0, 0] = tokens[n - 1], -1, 0
        for i, (token, parent) in enumerate(zip(found.token_ids, found.parents, strict=True), 1):
            out.tokens[0, i], out.parents[0, i], out.depths[0, i] = token, parent + 1, out.depths[0, parent + 1] + 1
        out.counts[0] = 1 + len(found.token_ids)
        return out

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


def replay(rows: list[Row], draft: DraftFunction, *, sources: bool = False) -> dict[str, Any]:
    """Replay the rows; with `sources`, count accepted tokens by where the learned scorer found their context."""
    steps = produced = nodes = 0
    seconds = 0.0
    found: Counter[str] = Counter()
    for number, (prompt, output) in enumerate(rows):
        tokens = np.concatenate([prompt, output]).astype(np.int32)
        position = len(prompt)
        while position < len(tokens):
            started = time.perf_counter()
            batch = draft(str(number), tokens, position)
            seconds += time.perf_counter() - started
            path = accepted_path(batch, tokens[position:])
            if sources:
                found.update(source_of(int(batch.kinds[0, node])) for node in path)
            advance = min(len(path) + 1, len(tokens) - position)
            position += advance
            produced += advance
            nodes += int(batch.counts[0])
            steps += 1
    row: dict[str, Any] = {"tokens_per_step": round(produced / steps, 4), "nodes_per_step": round(nodes / steps, 2)}
    row |= {"draft_us_per_step": round(seconds / steps * 1e6, 2), "output_tokens": produced, "steps": steps}
    return row | ({"accepted_from": {name: found[name] for name in SOURCES}} if sources else {})


def drafter(name: str, store: Trace, budget: int, shape: Any, weights: Path | None = None) -> DraftFunction:
    """A drafter that knows the first 605 rows' outputs of `store`. Raises ImportError: a rival that is not
    installed."""
    if name == "lookup":
        return lookup(budget)
    if name == "suffix":
        return suffix(store_documents(store), budget, shape)
    options: dict[str, Any] = {"scoring": SCORINGS[name], "weights": weights, "snapshot": build_store(store)}
    return drafting(Drafter(vocab_size=store.vocab_size, max_nodes=budget, **options), budget, shape)


def untainted_weights(trace: Trace) -> Path:
    """The shipped weights that were not trained on this trace."""
    for path in sorted(SHIPPED.glob("*.json")):
        if Weights.load(path).trace_sha256 != trace.sha256:
            return path
    raise ValueError(f"all weights in {SHIPPED} were trained on this trace")


def long_contexts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Replay answers that copy or edit a part of a long prompt: a row per drafter, shape, kind and length."""
    encoder = tokenizer.load(arguments.tokenizer)
    text = python_sources(encoder, 2 * max(arguments.lengths))
    store, budget, results = Trace([], "", encoder.get_vocab_size()), arguments.budget[0], []
    shapes = [(name, shape) for name in arguments.drafter for shape in ("chain", "tree")]
    shapes = [(name, shape) for name, shape in shapes if shape == SHAPES.get(name, shape)]
    for (name, shape), kind, length in itertools.product(shapes, KINDS, arguments.lengths):
        found = replay(copies(text, length, kind, COPIES), drafter(name, store, budget, shape))
        results.append({"drafter": name, "shape": shape, "kind": kind, "context": length, "budget": budget} | found)
    return results


def run(trace: Trace, rows: list[Row], name: str, budget: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Replay one drafter with one budget."""
    scoring, shape = SCORINGS.get(name), SHAPES.get(name, arguments.shape)
    weights = untainted_weights(trace) if scoring == "learned" else None
    store = replace(trace, rows=[]) if arguments.no_store else trace
    used = Weights.load(weights) if weights else None
    row = replay(rows, drafter(name, store, budget, shape, weights), sources=scoring == "learned")
    row["store_tokens"] = sum(len(d) + 1 for d in store_documents(store)) if name != "lookup" else 0
    row |= {"rows": len(rows), "trace": arguments.trace.name, "drafter": "sssd" if scoring else name}
    row |= {"scoring": scoring, "shape": shape, "budget": budget}
    row["weights_trained_on"] = used.trained_on if used else None
    return row | {"weights_saw_this_trace": used.trace_sha256 == trace.sha256 if used else None}


def key_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """What two results of one file do not share."""
    names = ("trace", "drafter", "scoring", "shape", "budget")
    return (*(result[name] for name in names), bool(result["store_tokens"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help='JSONL with "prompt" and "output"')
    parser.add_argument("--long", action="store_true", help="copies and edits of long prompts, in place of a trace")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 8_000, 32_000, 128_000], help="of --long")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, nargs="+", default=[16], help="nodes per step, root included")
    parser.add_argument("--shape", choices=("tree", "chain"), default="tree")
    parser.add_argument("--drafter", choices=DRAFTERS, nargs="+", default=["sssd"])
    parser.add_argument("--no-store", action="store_true", help="draft from prompt and output only")
    parser.add_argument("--json", type=Path, help="results are added to those of before, of the same code and machine")
    arguments = parser.parse_args()
    sys.path.append("build/arctic")
    if arguments.long == (arguments.trace is not None) or min(arguments.budget) < 1:
        parser.error("give --trace or --long, and a --budget of 1 (the root) or more")
    results, missing = [], []
    try:
        if arguments.long:
            results = long_contexts(arguments)
            print(pivot(results, "drafter={drafter} | shape={shape} | kind={kind}", "context", "{tokens_per_step:.2f}"))
            write_json(arguments.json, results)
            return 0
        trace = Trace.load(arguments.trace, arguments.tokenizer)
        rows = test_rows(trace)
        for name in arguments.drafter:
            try:
                results += [run(trace, rows, name, budget, arguments) for budget in arguments.budget]
            except ImportError as error:
                missing.append(name)
                print(f"left out: {name} is not installed here ({error})", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if results:
        form = "answers={trace} | drafter={drafter} | scoring={scoring} | shape={shape}"
        print(pivot(results, form, "budget", "{tokens_per_step:.3f}"))
        before = earlier_figures(arguments.json) or []
        mine = {key_of(r) for r in results}
        kept = [r for r in before if key_of(r) not in mine]
        write_json(arguments.json, kept + results, data=[arguments.trace], earlier=bool(before))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
