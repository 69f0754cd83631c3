"""Draft quality without an engine: replay recorded answers and count the tokens that each step would have produced.

    python bench/replay.py --trace FILE --tokenizer DIR --budget 4 8 16 32 --drafter sssd paper suffix lookup --json OUT
    python bench/replay.py --long --tokenizer DIR --drafter sssd suffix --json OUT
    python bench/replay.py --edits --tokenizer DIR --shape chain --json OUT
    python bench/replay.py --sessions FILE --tokenizer DIR --drafter sssd suffix --shape chain tree --json OUT
    python bench/replay.py --times --trace FILE --tokenizer DIR --drafter sssd suffix --shape chain --json OUT

Rivals: prompt lookup; ArcticInference's suffix decoding (built by `bench/arctic.sh`) with opened limits (`suffix`) and
with the settings of vLLM's method of that name, which drafts chains (`suffix-vllm`). `sssd-alone` and `paper-alone`
have no datastore; `paper-store` sees only the last four tokens of a request.

Greedy verification accepts exactly the draft tokens that equal the target's own continuation, so a recorded answer of
any model determines what is accepted. A step yields the longest drafted path that equals the continuation, plus one
token; the budget includes the root. The outputs of the first 605 rows are the datastore; the other rows are replayed,
up to 512 tokens. --long replays answers that copy, or edit, 600 tokens of a prompt from Python's library. --edits
replays answers that are a file of it with one to five lines changed, by what the prompt shows and what the client sends
as `prediction`. --times steps through the answers by all drafters in turns, and times their calls. --sessions replays
every assistant turn after all text before it; drafters start empty and learn each turn.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.results import write_json
from bench.lib.rivals import CHAINS_ONLY, LIMITS, Cell, DraftFunction, Tokens, lookup, suffix
from bench.lib.tables import pivot
from bench.lib.trace import STORE_ROWS, Row, Sessions, Trace, store_of
from bench.scorer.long_contexts import COPY_KINDS, copies, edited_files, python_sources
from freedraft.draft import DraftBatch
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.drafter import Drafter
from sssd_plugin.method import LEADING, to_learn

COPIES, EDITS, ARCTIC = 4, 20, "build/arctic"  # per kind and length; files; built by bench/arctic.sh
PAPER = ("paper", "paper-alone", "paper-store")
SCORINGS = dict.fromkeys(("sssd", "sssd-alone"), "learned") | dict.fromkeys(PAPER, "paper")


def accepted_length(batch: DraftBatch, continuation: Tokens) -> int:
    """Return the number of tokens of the longest drafted path that equals the continuation, without the root."""
    children = {(int(batch.parents[0, i]), int(batch.tokens[0, i])): i for i in range(1, int(batch.counts[0]))}
    node = 0
    for length, token in enumerate(continuation.tolist()):
        if (node, token) not in children:
            return length
        node = children[node, token]
    return len(continuation)


def drafting(drafter: Drafter, budget: int, shape: Any = "tree", newest: int = 0) -> DraftFunction:
    """Return the draft function of a drafter. newest: number of newest tokens of a request that it sees; 0 for all."""
    current, known = "", 0

    def draft(request: str, tokens: Tokens, n: int) -> DraftBatch:
        nonlocal current, known
        if request != current or newest:
            drafter.finish([current])
            drafter.replace(request, tokens[:n][-newest:])
        else:
            drafter.update([request], tokens, np.array([known]), np.array([n]), np.array([n], np.int32))
        current, known = request, n
        return drafter.draft([request], max_nodes=budget, shape=shape)

    return draft


def make(
    cell: Cell, documents: Sequence[Tokens], vocab_size: int, weights: Path | None, live: LiveStore | None = None
) -> DraftFunction:
    """Return a drafter with the datastore `documents`, which learns if `live` is given. Raises ImportError: see
    `suffix`."""
    if cell.drafter == "lookup":
        return lookup(cell.budget)
    if cell.drafter in LIMITS:
        return suffix(documents, cell, live is not None)
    options: dict[str, Any] = {"scoring": SCORINGS[cell.drafter], "weights": weights, "live": live}
    if documents and not cell.drafter.endswith("-alone"):
        options["snapshot"] = store_of(documents, vocab_size)
    drafter = Drafter(vocab_size=vocab_size, max_nodes=cell.budget, **options)
    return drafting(drafter, cell.budget, cell.shape, 4 if cell.drafter == "paper-store" else 0)


def replay(
    rows: list[Row],
    draft: DraftFunction,
    *,
    name: str = "",
    finished: Callable[[Tokens, Tokens], object] = lambda prompt, answer: None,
) -> dict[str, Any]:
    """Replay rows. name: unique among the calls for this drafter; finished: called with each prompt and answer."""
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
    """Yield all valid combinations of drafter, shape and budget."""
    for cell in map(Cell._make, product(arguments.drafter, arguments.shape, arguments.budget)):
        if cell.drafter not in CHAINS_ONLY:
            yield cell
        elif cell.shape == arguments.shape[0]:
            yield cell._replace(shape="chain")


def of_trace(path: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trace = Trace.load(path, arguments.tokenizer)
    rows = trace.test_rows
    if not rows:
        raise ValueError(f"{path} has no row to replay after its first {STORE_ROWS}")
    for cell in cells(arguments):
        row = replay(rows, make(cell, trace.documents, trace.vocab_size, arguments.weights))
        stored = cell.drafter != "lookup" and not cell.drafter.endswith("-alone")
        row["store_tokens"] = sum(len(d) + 1 for d in trace.documents) if stored else 0
        scoring = SCORINGS.get(cell.drafter)
        row |= {"rows": len(rows), "trace": path.name, "drafter": "sssd" if scoring else cell.drafter}
        yield row | {"scoring": scoring, "shape": cell.shape, "budget": cell.budget, "arm": cell.drafter}


def of_times(path: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the times of each cell's calls that draft, in microseconds."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    if "lookup" in arguments.drafter:
        raise ValueError("--times is of drafters, which lookup is not: leave it out")
    trace, seconds = Trace.load(path, arguments.tokenizer), list[float]()

    def watch(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **kwargs)
            seconds.append(time.perf_counter() - started)
            return result

        setattr(kind, name, watched)

    watch(Drafter, "draft")
    watch(SuffixDecodingCache, "speculate")
    drafts = {cell: make(cell, trace.documents, trace.vocab_size, arguments.weights) for cell in cells(arguments)}
    times = {cell: list[float]() for cell in drafts}
    for number, (prompt, output) in enumerate(trace.test_rows):
        tokens, at = np.concatenate([prompt, output]).astype(np.int32), dict.fromkeys(drafts, len(prompt))
        while at:
            for cell in [*at]:
                batch = drafts[cell](f"{number}", tokens, at[cell])
                times[cell].append(seconds.pop() * 1e6)
                at[cell] += accepted_length(batch, tokens[at[cell] :]) + 1
                if at[cell] >= len(tokens):
                    del at[cell]
    produced = sum(len(output) for _, output in trace.test_rows)
    for cell, us in times.items():
        values = zip(("us", "us_p5", "us_p95"), np.percentile(us, [50, 5, 95]).round(2).tolist(), strict=True)
        row = {"tokens_per_step": round(produced / len(us), 4), "steps": len(us), "trace": path.name}
        row |= {"arm": cell.drafter, "store_tokens": sum(len(d) + 1 for d in trace.documents)}
        yield row | {"shape": cell.shape, "budget": cell.budget} | dict(values)


def of_copies(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per drafter, shape, kind of copy and prompt length."""
    encoder = tokenizer.load(arguments.tokenizer)
    text = python_sources(encoder, 2 * max(arguments.lengths))
    for cell, kind, length in product(cells(arguments), COPY_KINDS, arguments.lengths):
        draft = make(cell, [], encoder.get_vocab_size(), arguments.weights)
        yield cell._asdict() | {"kind": kind, "context": length} | replay(copies(text, length, kind, COPIES), draft)


def of_edits(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per drafter, prompt and prediction."""
    encoder = tokenizer.load(arguments.tokenizer)

    def encoded(text: str) -> Tokens:
        return np.array(encoder.encode(text, add_special_tokens=False).ids, np.int32)

    edits = [tuple(map(encoded, edit)) for edit in edited_files(EDITS)]
    asks = {"task": "Change this file.\n", "task and file": "Change this file.\n```\n{}\n```\n"}
    for cell, shown, given in product(cells(arguments), asks, ("none", "file", "another file")):
        drafter = Drafter(vocab_size=encoder.get_vocab_size(), max_nodes=cell.budget, weights=arguments.weights)
        draft, steps, produced = drafting(drafter, cell.budget, cell.shape), 0, 0
        for number, (file, answer) in enumerate(edits):
            before, after = map(encoded, (*asks[shown].split("{}"), "")[:2])
            prompt = np.concatenate([before, file, after] if "{}" in asks[shown] else [before])
            sent = {"none": file[:0], "file": file, "another file": edits[number - 1][0]}[given]
            drafter.predict(f"{number} 0", prompt, sent)
            found = replay([(prompt, answer)], draft, name=str(number))
            steps, produced = steps + found["steps"], produced + found["output_tokens"]
        row = cell._asdict() | {"prompt": shown, "prediction": given, "tokens_per_step": round(produced / steps, 4)}
        yield row | {"edits": len(edits), "output_tokens": produced, "steps": steps}


def learning(vocab_size: int) -> tuple[LiveStore, Callable[[Tokens, Tokens], None]]:
    """Return an empty store, and the function that lets it learn a prompt with its answer."""
    live = LiveStore(vocab_size, isolation="shared")

    def learn(prompt: Tokens, answer: Tokens) -> None:
        live.insert(to_learn(prompt, answer, LEADING))
        live.runs.settle()

    return live, learn


def of_sessions(path: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sessions = Sessions.load(path, arguments.tokenizer)
    if unable := {*arguments.drafter} - {"sssd", *LIMITS}:
        raise ValueError(f"--sessions is for drafters that learn, which {', '.join(unable)} does not")
    for cell in cells(arguments):
        live, learn = learning(sessions.vocab_size)
        draft = make(cell, [], sessions.vocab_size, arguments.weights, live)
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
    what.add_argument("--edits", action="store_true", help="files with a few lines changed, and predictions")
    what.add_argument("--long", action="store_true", help="copies and edits of long prompts")
    parser.add_argument(
        "--times", action="store_true", help="of --trace: microseconds of a draft, all drafters in turns"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 8_000, 32_000, 128_000], help="of --long")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--budget", type=int, nargs="+", default=[16], help="nodes per step, root included")
    parser.add_argument("--shape", choices=("tree", "chain"), nargs="+", default=["tree"])
    parser.add_argument("--drafter", choices=(*SCORINGS, *LIMITS, "lookup"), nargs="+", default=["sssd"])
    parser.add_argument("--weights", type=Path, help="scorer weights; default: the shipped ones")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if min(arguments.budget) < 1:
        parser.error("--budget must be at least 1 (the root)")
    sys.path.append(ARCTIC)
    data = arguments.trace or arguments.sessions or []
    across = "context" if arguments.long else "prediction" if arguments.edits else "budget"
    try:
        if arguments.long:
            form, results = "drafter={drafter} | shape={shape} | kind={kind}", list(of_copies(arguments))
        elif arguments.edits:
            form, results = "drafter={drafter} | shape={shape} | prompt={prompt}", list(of_edits(arguments))
        elif arguments.sessions:
            form = "sessions={file} | drafter={drafter} | limits={limits} | shape={shape}"
            results = [row for path in data for row in of_sessions(path, arguments)]
        else:
            form = "answers={trace} | drafter={arm} | store tokens={store_tokens} | shape={shape}"
            results = [row for path in data for row in (of_times if arguments.times else of_trace)(path, arguments)]
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(pivot(results, form, across, "{us:.1f}" if arguments.times else "{tokens_per_step:.3f}"))
    write_json(arguments.json, results, data=data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
