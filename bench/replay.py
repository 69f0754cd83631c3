"""Draft quality without an engine: replay recorded answers and count the tokens that each step would have produced.

    python bench/replay.py --trace FILE --tokenizer DIR --budget 16 --shape tree --drafter sssd --json OUT
    python bench/replay.py --trace FILE --tokenizer DIR --budget 4 8 16 32 --drafter sssd paper suffix lookup --json OUT
    python bench/replay.py --long --tokenizer DIR --drafter sssd suffix --json OUT
    python bench/replay.py --sessions FILE --tokenizer DIR --drafter sssd suffix --shape chain tree --json OUT

Several budgets or drafters print a table. Rivals: prompt lookup; `suffix`, ArcticInference's suffix decoding
(`bench/arctic.py` builds it). One that cannot be imported is named, and the others go on.

Greedy verification accepts exactly the drafted tokens that equal the target's own continuation, so a recorded answer
of any model tells what would have been accepted: the same figure on every machine. Protocol: the outputs of the first
605 rows are the datastore; the other rows are replayed, outputs cut at 512 tokens, rows with a prompt under 4 or an
output under 9 tokens left out; a step yields the longest drafted path that equals the continuation, plus one token.
The budget counts the root.

--long replays answers that copy, or edit, 600 tokens of a prompt of 1 k to 128 k tokens of Python's library, without a
datastore, as chains and as trees.

--sessions replays every turn of the assistant in recorded sessions of agents (`bench/lib/sessions.py`), whose prompt is
all before it. Drafters begin empty and learn each finished turn. With --suffix-defaults, `suffix` has the settings of
vLLM's method of that name, which drafts chains, in place of opened limits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lib.results import earlier_figures, write_json
from bench.lib.sessions import Sessions
from bench.lib.tables import pivot
from bench.lib.trace import Row, Trace, replayed, store_of
from bench.scorer.long_contexts import KINDS as COPY_KINDS
from bench.scorer.long_contexts import copies, python_sources
from freedraft.draft import DraftBatch
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.drafter import Drafter
from sssd_plugin.method import LEADING, to_learn

STORE_ROWS = 605
COPIES = 4
"""Of each kind and length."""
DEPTHS = 8
"""By which predictions are compared with what is accepted; deeper nodes count as the last."""
DRAFTERS = ("sssd", "paper", "suffix", "lookup")
SHAPES = {"lookup": "chain"}
"""Drafters that know one shape only."""

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


def accepted_length(batch: DraftBatch, continuation: NDArray[np.int32]) -> int:
    """Tokens of the longest drafted path that equals the continuation, root left out."""
    children = {(int(batch.parents[0, i]), int(batch.tokens[0, i])): i for i in range(1, int(batch.counts[0]))}
    node = 0
    for length, token in enumerate(continuation.tolist()):
        if (node, token) not in children:
            return length
        node = children[node, token]
    return len(continuation)


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


class SuffixLimits(NamedTuple):
    """Limits of ArcticInference's suffix decoding, opened as is best for it here: tokens of a match; drafted tokens for
    each one matched; least probability of a drafted token."""

    depth: int = 64
    factor: float = 4.0
    probability: float = 0.0


OPENED, VLLM_DEFAULTS = SuffixLimits(), SuffixLimits(24, 1.0, 0.1)


def suffix(
    documents: Sequence[NDArray[np.int32]], budget: int, shape: str, limits: SuffixLimits = OPENED, learns: bool = False
) -> DraftFunction:
    """ArcticInference's suffix decoding: a tree over the request, one over all answers, the better of both.

    Where there are `documents`, or it `learns`, its tree grows by the answers replayed so far, as when it serves;
    freedraft's datastore stays what it was.

    Raises ImportError: it is not installed.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=limits.depth, max_cached_requests=-1 if len(documents) or learns else 0)
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
        newest = tokens[max(0, n - limits.depth) : n].tolist()
        options = {"max_spec_factor": limits.factor, "min_token_prob": limits.probability}
        options |= {"max_spec_tokens": budget - 1, "use_tree_spec": shape == "tree"}
        found = cache.speculate(request, newest, **options)
        return tree(out, int(tokens[n - 1]), found.token_ids, [parent + 1 for parent in found.parents])

    return draft


def tree(out: DraftBatch, root: int, tokens: Sequence[int], parents: Sequence[int]) -> DraftBatch:
    """A tree of others as a `DraftBatch`; `parents` count the root as 0 and come before their children."""
    out.tokens[0, 0], out.parents[0, 0], out.depths[0, 0] = root, -1, 0
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        out.tokens[0, i], out.parents[0, i], out.depths[0, i] = token, parent, out.depths[0, parent] + 1
    out.counts[0] = 1 + len(tokens)
    return out


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


def replay(
    rows: list[Row],
    draft: DraftFunction,
    *,
    name: str = "",
    finished: Callable[[NDArray[np.int32], NDArray[np.int32]], object] = lambda prompt, answer: None,
) -> dict[str, Any]:
    """Replay the rows.

    Args:
        name: that no other rows of this drafter have.
        finished: called with each prompt and answer at the end of the answer.
    """
    steps = produced = 0
    predicted, accepted = np.zeros(DEPTHS + 1), np.zeros(DEPTHS + 1)
    for number, (prompt, output) in enumerate(rows):
        tokens = np.concatenate([prompt, output]).astype(np.int32)
        position = len(prompt)
        while position < len(tokens):
            batch = draft(f"{name} {number}", tokens, position)
            length = accepted_length(batch, tokens[position:])
            depths, scores = (part[0, 1 : batch.counts[0]] for part in (batch.depths, batch.scores))
            inside = depths <= len(tokens) - position
            predicted += np.bincount(np.minimum(depths[inside], DEPTHS), scores[inside], DEPTHS + 1)
            accepted += np.bincount(np.minimum(np.arange(1, length + 1), DEPTHS), minlength=DEPTHS + 1)
            position, steps = position + length + 1, steps + 1
        produced += len(output)
        finished(prompt, output)
    row: dict[str, Any] = {"tokens_per_step": round(produced / steps, 4), "output_tokens": produced, "steps": steps}
    row["accepted_by_depth"] = accepted[1:].astype(int).tolist()
    return row | {"predicted_by_depth": predicted[1:].round(1).tolist()} if predicted.any() else row


def drafter(name: str, store: Trace, budget: int, shape: Any, scoring: str, weights: Path | None) -> DraftFunction:
    """Make a drafter that knows the first 605 rows' outputs of `store`. Raises ImportError: a rival that is not
    installed."""
    if name == "lookup":
        return lookup(budget)
    if name == "suffix":
        return suffix(store_documents(store), budget, shape)
    options: dict[str, Any] = {"scoring": "paper" if name == "paper" else scoring, "weights": weights}
    options |= {"snapshot": build_store(store), "vocab_size": store.vocab_size}
    return drafting(Drafter(max_nodes=budget, **options), budget, shape)


def long_contexts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Replay answers that copy or edit a part of a long prompt: a row per drafter, shape, kind and length. Raises
    ImportError: a rival that is not installed; ValueError: no tokenizer."""
    encoder = tokenizer.load(arguments.tokenizer)
    text = python_sources(encoder, 2 * max(arguments.lengths))
    store, budget, results = Trace([], "", encoder.get_vocab_size()), arguments.budget[0], []
    shapes = [(name, shape) for name in arguments.drafter for shape in ("chain", "tree")]
    shapes = [(name, shape) for name, shape in shapes if shape == SHAPES.get(name, shape)]
    for (name, shape), kind, length in itertools.product(shapes, COPY_KINDS, arguments.lengths):
        draft = drafter(name, store, budget, shape, arguments.scoring, arguments.weights)
        found = replay(copies(text, length, kind, COPIES), draft)
        results.append({"drafter": name, "shape": shape, "kind": kind, "context": length, "budget": budget} | found)
    return results


def run(
    trace: Trace, rows: list[Row], name: str, shape: str, budget: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Replay one drafter with one budget. Raises ImportError: a rival that is not installed."""
    scoring = {"sssd": arguments.scoring, "paper": "paper"}.get(name)
    shape = SHAPES.get(name, shape)
    store = replace(trace, rows=[]) if arguments.no_store else trace
    draft = drafter(name, store, budget, shape, arguments.scoring, arguments.weights)
    row = replay(rows, draft)
    row["store_tokens"] = sum(len(d) + 1 for d in store_documents(store)) if name != "lookup" else 0
    row |= {"rows": len(rows), "trace": arguments.trace.name, "drafter": "sssd" if scoring else name}
    return row | {"scoring": scoring, "shape": shape, "budget": budget}


def session_rows(sessions: Sessions, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Replay recorded sessions: a row per drafter, shape and budget. Raises ImportError: a rival that is not installed;
    ValueError: a drafter that learns nothing."""
    if not sessions.turns:
        raise ValueError(f"sessions: {arguments.sessions} has no answer of an assistant")
    results = []
    for name, shape, budget in itertools.product(arguments.drafter, arguments.shape, arguments.budget):
        limits = VLLM_DEFAULTS if arguments.suffix_defaults else OPENED
        if name == "suffix" and arguments.suffix_defaults:
            if shape != arguments.shape[0]:
                continue
            shape = "chain"
        live = LiveStore(sessions.vocab_size, isolation="shared")
        match name:
            case "suffix":
                draft = suffix([], budget, shape, limits, learns=True)
            case "sssd":
                options: dict[str, Any] = {"scoring": arguments.scoring, "weights": arguments.weights, "live": live}
                draft = drafting(Drafter(vocab_size=sessions.vocab_size, max_nodes=budget, **options), budget, shape)
            case _:
                raise ValueError(f"--sessions is for drafters that learn, which '{name}' does not")

        def learn(prompt: NDArray[np.int32], answer: NDArray[np.int32], live: LiveStore = live) -> None:
            live.insert(to_learn(prompt, answer, LEADING))
            live.settle()

        found = {
            session: {"turns": len(turns)} | replay(turns, draft, name=session, finished=learn)
            for session, turns in sessions.turns.items()
        }
        turns, steps, produced = (sum(r[key] for r in found.values()) for key in ("turns", "steps", "output_tokens"))
        row: dict[str, Any] = {"file": arguments.sessions.name, "drafter": name, "shape": shape, "budget": budget}
        row["limits"] = None if name != "suffix" else "vLLM's" if arguments.suffix_defaults else "opened"
        row |= {"tokens_per_step": round(produced / steps, 4), "turns": turns, "steps": steps}
        results.append(row | {"output_tokens": produced, "sessions": found})
        live.close()
    return results


KEY = ("trace", "drafter", "scoring", "shape", "budget", "store_tokens")
SESSION_KEY = ("file", "drafter", "limits", "shape", "budget")
"""What two results of one file do not share."""


def save(arguments: argparse.Namespace, results: list[dict[str, Any]], key: Sequence[str], data: Path) -> None:
    """Add results to the file that --json names, in place of those of before with the same key."""
    before = earlier_figures(arguments.json) or []
    mine = {tuple(map(r.get, key)) for r in results}
    kept = [r for r in before if tuple(map(r.get, key)) not in mine]
    write_json(arguments.json, kept + results, data=[data], earlier=bool(before))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help='JSONL with "prompt" and "output"')
    parser.add_argument("--sessions", type=Path, help='JSONL with "session" and "messages", in place of a trace')
    parser.add_argument("--suffix-defaults", action="store_true", help="suffix with vLLM's settings, in --sessions")
    parser.add_argument("--long", action="store_true", help="copies and edits of long prompts, in place of a trace")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 8_000, 32_000, 128_000], help="of --long")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, nargs="+", default=[16], help="nodes per step, root included")
    parser.add_argument("--shape", choices=("tree", "chain"), nargs="+", default=["tree"])
    parser.add_argument("--drafter", choices=DRAFTERS, nargs="+", default=["sssd"])
    parser.add_argument("--scoring", choices=("learned", "paper"), default="learned")
    parser.add_argument("--weights", type=Path, help="scorer weights; default: the shipped ones")
    parser.add_argument("--no-store", action="store_true", help="draft from prompt and output only")
    parser.add_argument("--arctic", type=Path, default=Path("build/arctic"), help="what bench/arctic.py built")
    parser.add_argument("--json", type=Path, help="results are added to those of before, of the same code and machine")
    arguments = parser.parse_args()
    sys.path.append(str(arguments.arctic))
    results, missing = [], []
    try:
        if min(arguments.budget) < 1:
            raise ValueError("--budget must be at least 1 (the root)")
        if arguments.long:
            results = long_contexts(arguments)
            print(pivot(results, "drafter={drafter} | shape={shape} | kind={kind}", "context", "{tokens_per_step:.2f}"))
            write_json(arguments.json, results)
            return 0
        if arguments.sessions is not None:
            results = session_rows(Sessions.load(arguments.sessions, arguments.tokenizer), arguments)
            form = "drafter={drafter} | limits={limits} | shape={shape}"
            print(pivot(results, form, "budget", "{tokens_per_step:.3f}"))
            save(arguments, results, SESSION_KEY, arguments.sessions)
            return 0
        if arguments.trace is None:
            raise ValueError("give --trace, --sessions or --long")
        trace = Trace.load(arguments.trace, arguments.tokenizer)
        rows = test_rows(trace)
        if not rows:
            raise ValueError(f"trace: {arguments.trace} has no row to replay after its first {STORE_ROWS}")
        for name in arguments.drafter:
            try:
                cells = itertools.product(arguments.shape, arguments.budget)
                results += [run(trace, rows, name, shape, budget, arguments) for shape, budget in cells]
            except ImportError as error:
                missing.append(name)
                print(f"left out: {name} is not installed here ({error})", file=sys.stderr)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(results) > 1:
        form = "answers={trace} | drafter={drafter} | scoring={scoring} | shape={shape}"
        print(pivot(results, form, "budget", "{tokens_per_step:.3f}"))
    elif results:
        print(json.dumps(results[0], indent=1))
    if results:
        save(arguments, results, KEY, arguments.trace)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
