"""Draft quality without an engine: replay recorded answers and count the tokens that each step would have produced.

    python bench/replay.py --trace FILE --tokenizer DIR --budget 4 8 16 32 --drafter sssd paper suffix lookup --json OUT
    python bench/replay.py --long --tokenizer DIR --drafter sssd suffix --json OUT
    python bench/replay.py --sessions FILE --tokenizer DIR --drafter sssd suffix --shape chain tree --json OUT

Rivals: prompt lookup; ArcticInference's suffix decoding (`bench/arctic.py` builds it) with opened limits (`suffix`)
and with the settings of vLLM's method of that name, which drafts chains (`suffix-vllm`). `sssd-alone` and `paper-alone`
have no datastore, `paper-store` of the request no more than its last four tokens.

Greedy verification accepts exactly the drafted tokens that equal the target's own continuation, so a recorded answer
of any model tells what would have been accepted: the same figure on every machine. The outputs of the first 605 rows
are the datastore; the other rows are replayed, outputs cut at 512 tokens, rows with a prompt under 4 or an output under
9 tokens left out. A step yields the longest drafted path that equals the continuation, plus one token. The budget
counts the root.

--long replays answers that copy, or edit, 600 tokens of a prompt of 1 k to 128 k tokens of Python's library, without a
datastore. --sessions replays every turn of the assistant in recorded sessions of agents;
all text before a turn is its prompt, drafters begin empty and learn each finished turn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lib.results import write_json
from bench.lib.tables import pivot
from bench.lib.trace import STORE_ROWS, Row, Sessions, Trace, store_of
from bench.scorer.long_contexts import KINDS as COPY_KINDS
from bench.scorer.long_contexts import copies, python_sources
from freedraft.draft import DraftBatch
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.drafter import Drafter
from sssd_plugin.method import LEADING, to_learn

COPIES = 4  # of each kind and length
SCORINGS = {
    "sssd": "learned",
    "sssd-alone": "learned",
    "paper": "paper",
    "paper-alone": "paper",
    "paper-store": "paper",
}

# Draft for the first n tokens of a row; called with n rising within a request, and with a fresh id per request, first
# with the length of its prompt.
DraftFunction = Callable[[str, NDArray[np.int32], int], DraftBatch]


def accepted_length(batch: DraftBatch, continuation: NDArray[np.int32]) -> int:
    """Tokens of the longest drafted path that equals the continuation, root left out."""
    children = {(int(batch.parents[0, i]), int(batch.tokens[0, i])): i for i in range(1, int(batch.counts[0]))}
    node = 0
    for length, token in enumerate(continuation.tolist()):
        if (node, token) not in children:
            return length
        node = children[node, token]
    return len(continuation)


def drafting(drafter: Drafter, budget: int, shape: Any = "tree", newest: int = 0) -> DraftFunction:
    """newest: how many tokens of a request the drafter may see; 0 for all."""
    current, known = "", 0

    def draft(request: str, tokens: NDArray[np.int32], n: int) -> DraftBatch:
        nonlocal current, known
        if request != current or newest:
            drafter.finish([current])
            drafter.replace(request, tokens[:n][-newest:])
        else:
            drafter.update([request], tokens, np.array([known]), np.array([n]), np.array([n], np.int32))
        current, known = request, n
        return drafter.draft([request], max_nodes=budget, shape=shape)

    return draft


class SuffixLimits(NamedTuple):
    """Limits of ArcticInference's suffix decoding."""

    depth: int  # tokens of a match
    factor: float  # drafted tokens for each one matched
    probability: float  # of a drafted token, at least


LIMITS = {"suffix": SuffixLimits(64, 4.0, 0.0), "suffix-vllm": SuffixLimits(24, 1.0, 0.1)}
DRAFTERS = (*SCORINGS, *LIMITS, "lookup")
CHAINS_ONLY = ("suffix-vllm", "lookup")


def suffix(
    documents: Sequence[NDArray[np.int32]], budget: int, shape: str, limits: SuffixLimits, learns: bool
) -> DraftFunction:
    """ArcticInference's suffix decoding: a tree over the request, one over all answers, the better of both. With
    `documents`, or if it `learns`, its tree grows by the answers replayed so far, as when it serves; freedraft's
    datastore stays what it was. Raises ImportError: it is not installed."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=limits.depth, max_cached_requests=-1 if len(documents) or learns else 0)
    for number, document in enumerate(documents):
        cache.start_request(("store", number), [])
        cache.add_active_response(("store", number), document.tolist())
        cache.stop_request(("store", number))
    out = DraftBatch.empty(1, budget)
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
        count = 1 + len(found.token_ids)
        out.tokens[0, :count] = [tokens[n - 1], *found.token_ids]
        out.parents[0, :count] = [-1, *(parent + 1 for parent in found.parents)]
        out.counts[0] = count
        return out

    return draft


def lookup(budget: int) -> DraftFunction:
    """Prompt lookup: what followed the first occurrence of the longest suffix of 4, 3, 2 tokens."""
    out = DraftBatch.empty(1, budget)
    out.parents[0] = np.arange(-1, budget - 1)

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


class Cell(NamedTuple):
    """What drafts, within which budget."""

    drafter: str
    shape: Any
    budget: int

    def make(
        self,
        documents: Sequence[NDArray[np.int32]],
        vocab_size: int,
        weights: Path | None,
        live: LiveStore | None = None,
    ) -> DraftFunction:
        """A drafter that knows `documents`, and learns where `live` is given. Raises ImportError: see `suffix`."""
        if self.drafter == "lookup":
            return lookup(self.budget)
        if self.drafter in LIMITS:
            return suffix(documents, self.budget, self.shape, LIMITS[self.drafter], live is not None)
        options: dict[str, Any] = {"scoring": SCORINGS[self.drafter], "weights": weights, "live": live}
        if documents and not self.drafter.endswith("-alone"):
            options["snapshot"] = store_of(documents, vocab_size)
        drafter = Drafter(vocab_size=vocab_size, max_nodes=self.budget, **options)
        return drafting(drafter, self.budget, self.shape, 4 if self.drafter == "paper-store" else 0)


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
    for number, (prompt, output) in enumerate(rows):
        tokens = np.concatenate([prompt, output]).astype(np.int32)
        position = len(prompt)
        while position < len(tokens):
            batch = draft(f"{name} {number}", tokens, position)
            position, steps = position + accepted_length(batch, tokens[position:]) + 1, steps + 1
        produced += len(output)
        finished(prompt, output)
    return {"tokens_per_step": round(produced / steps, 4), "output_tokens": produced, "steps": steps}


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All combinations that there are."""
    for name in arguments.drafter:
        shapes = ["chain"] if name in CHAINS_ONLY else arguments.shape
        yield from itertools.starmap(Cell, itertools.product([name], shapes, arguments.budget))


def of_trace(path: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trace = Trace.load(path, arguments.tokenizer)
    rows, documents = trace.test_rows, trace.documents
    if not rows:
        raise ValueError(f"{path} has no row to replay after its first {STORE_ROWS}")
    for cell in cells(arguments):
        row = replay(rows, cell.make(documents, trace.vocab_size, arguments.weights))
        stored = cell.drafter != "lookup" and not cell.drafter.endswith("-alone")
        row["store_tokens"] = sum(len(d) + 1 for d in documents) if stored else 0
        scoring = SCORINGS.get(cell.drafter)
        row |= {"rows": len(rows), "trace": path.name, "drafter": "sssd" if scoring else cell.drafter}
        yield row | {"scoring": scoring, "shape": cell.shape, "budget": cell.budget, "arm": cell.drafter}


def of_copies(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per drafter, shape, kind of copy and length of the prompt."""
    encoder = tokenizer.load(arguments.tokenizer)
    text = python_sources(encoder, 2 * max(arguments.lengths))
    for cell, kind, length in itertools.product(cells(arguments), COPY_KINDS, arguments.lengths):
        found = replay(copies(text, length, kind, COPIES), cell.make([], encoder.get_vocab_size(), arguments.weights))
        yield cell._asdict() | {"kind": kind, "context": length} | found


def of_sessions(path: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sessions = Sessions.load(path, arguments.tokenizer)
    if unable := {*arguments.drafter} - {"sssd", *LIMITS}:
        raise ValueError(f"--sessions is for drafters that learn, which {', '.join(unable)} does not")
    for cell in cells(arguments):
        live = LiveStore(sessions.vocab_size, isolation="shared")

        def learn(prompt: NDArray[np.int32], answer: NDArray[np.int32], live: LiveStore = live) -> None:
            live.insert(to_learn(prompt, answer, LEADING))
            live.settle()

        draft = cell.make([], sessions.vocab_size, arguments.weights, live)
        found = {
            session: {"turns": len(turns)} | replay(turns, draft, name=session, finished=learn)
            for session, turns in sessions.turns.items()
        }
        live.close()
        turns, steps, produced = (sum(r[key] for r in found.values()) for key in ("turns", "steps", "output_tokens"))
        limits = {"suffix": "opened", "suffix-vllm": "vLLM's"}.get(cell.drafter)
        row = {"file": path.name} | cell._asdict() | {"drafter": "suffix" if limits else cell.drafter, "limits": limits}
        row |= {"tokens_per_step": round(produced / steps, 4), "turns": turns, "steps": steps}
        yield row | {"output_tokens": produced, "sessions": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, nargs="+", help='JSONL with "prompt" and "output"')
    what.add_argument("--sessions", type=Path, nargs="+", help='JSONL with "session" and "messages"')
    what.add_argument("--long", action="store_true", help="copies and edits of long prompts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 8_000, 32_000, 128_000], help="of --long")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, nargs="+", default=[16], help="nodes per step, root included")
    parser.add_argument("--shape", choices=("tree", "chain"), nargs="+", default=["tree"])
    parser.add_argument("--drafter", choices=DRAFTERS, nargs="+", default=["sssd"])
    parser.add_argument("--weights", type=Path, help="scorer weights; default: the shipped ones")
    parser.add_argument("--arctic", type=Path, default=Path("build/arctic"), help="what bench/arctic.py built")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.append(str(arguments.arctic))
    data, across, form = [], "budget", "drafter={drafter} | shape={shape} | kind={kind}"
    try:
        if min(arguments.budget) < 1:
            raise ValueError("--budget must be at least 1 (the root)")
        if arguments.long:
            across, results = "context", list(of_copies(arguments))
        elif arguments.sessions:
            data, form = arguments.sessions, "sessions={file} | drafter={drafter} | limits={limits} | shape={shape}"
            results = [row for path in data for row in of_sessions(path, arguments)]
        else:
            data = arguments.trace
            form = "answers={trace} | drafter={arm} | store={store_tokens} | shape={shape}"
            results = [row for path in data for row in of_trace(path, arguments)]
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(pivot(results, form, across, "{tokens_per_step:.3f}"))
    write_json(arguments.json, results, data=data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
