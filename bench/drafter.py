"""CPU cost of drafting: per request, per batch (on the drafter's own threads), ingest, memory, and building the store,
as one sub-index and as eight.

    python bench/drafter.py --json OUT [--tokenizer DIR]

Stores of 1 M and 8 M real tokens (Python sources of this environment). The requests are held-out documents: each step
appends the next tokens of one, as if the engine had generated them, and drafts through the calls of the engine's
plugin. Figures are medians over all steps, arms interleaved within a run.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.machine import rounded, timed
from bench.lib.results import ROOT, write_json
from sssd_plugin.datastore import tokenizer as tokenizers
from sssd_plugin.datastore.build.builder import peak_resident_bytes, resident_bytes
from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex
from sssd_plugin.drafter import Drafter, Scoring, Shape
from sssd_plugin.request_index import RequestIndex

PROMPT, STEPS, ADVANCE, ROUNDS = 600, 120, 2, 3  # tokens, steps per request, tokens per step, repeats
BATCH, LARGE, HELD_OUT = 32, 256, 64
STORES = 1_000_000, 8_000_000  # tokens
NODES = 16
SHAPES: list[tuple[Scoring, Shape]] = [("paper", "tree"), ("learned", "chain"), ("learned", "tree")]
Tokens = NDArray[np.int32]


def corpus(tokenizer: Path, want: int) -> tuple[list[Tokens], int]:
    """Return shuffled Python sources of this environment as token arrays that end with a separator, `want` tokens or
    more; and the vocabulary size."""
    encoder = tokenizers.load(tokenizer)
    paths = sysconfig.get_paths()
    files = sorted({p for root in ("stdlib", "purelib") for p in Path(paths[root]).rglob("*.py")})
    files = [p for p in files if 4_000 < p.stat().st_size < 400_000]
    random.Random(1).shuffle(files)
    documents = list[Tokens]()
    for path in files:
        if sum(map(len, documents)) > want * 1.15:
            return documents, encoder.get_vocab_size()
        ids = encoder.encode(path.read_text(errors="replace"), add_special_tokens=False).ids
        documents.append(np.array([*ids, SEPARATOR], np.int32))
    raise SystemExit(f"error: this environment holds too few tokens of Python sources, {want} are needed")


def snapshot_of(tokens: Tokens, parts: int, vocab: int) -> Snapshot:
    """Build a store of `parts` sub-indices of equal size."""
    pieces = np.array_split(tokens, parts)
    for piece in pieces:
        piece[-1] = SEPARATOR
    return tuple(SubIndex.build(piece, vocab) for piece in pieces)


class Arm:
    """A drafter that steps through the held-out requests."""

    def __init__(self, store: str, snapshot: Snapshot, vocab: int, kind: tuple[Scoring, Shape], batch: int) -> None:
        scoring, self.shape = kind
        self.name, self.batch = f"{store}, {scoring}, {self.shape} of {NODES}, batch {batch}", batch
        self.drafter = Drafter(vocab_size=vocab, max_nodes=NODES, scoring=scoring, snapshot=snapshot)
        self.draft_us: list[float] = []
        self.append_us: list[float] = []

    def run(self, rows: Tokens, timed: bool) -> None:
        """Run all steps of a batch of requests. rows: int32 [batch, PROMPT + STEPS * ADVANCE]."""
        ids = [str(i) for i in range(len(rows))]
        for name, row in zip(ids, rows, strict=True):
            self.drafter.replace(name, row[: PROMPT - ADVANCE])
        flat, first = np.ascontiguousarray(rows.reshape(-1)), np.arange(len(rows)) * rows.shape[1]
        for step in range(STEPS):
            length = np.full(len(rows), PROMPT + step * ADVANCE, np.int32)
            ends = first + length
            started = time.perf_counter()
            self.drafter.update(ids, flat, ends - ADVANCE, ends, length)
            middle = time.perf_counter()
            self.drafter.draft(ids, max_nodes=NODES, shape=self.shape)
            ended = time.perf_counter()
            if timed and step:
                self.append_us.append((middle - started) * 1e6 / (len(rows) * ADVANCE))
                self.draft_us.append((ended - middle) * 1e6)
        self.drafter.finish(ids)


def build_cost(tokens: Tokens, vocab: int) -> dict[str, float]:
    """Measure time and peak memory of `SubIndex.build` in a fresh process, without the input array."""
    SubIndex.build(np.array([1, 2, SEPARATOR], np.int32), 8)
    tokens[-1] = SEPARATOR
    before = resident_bytes()
    seconds = timed(lambda: SubIndex.build(tokens, vocab))[1]
    peak, n = peak_resident_bytes() - before, len(tokens)
    return {"us_per_token": seconds / n * 1e6, "peak_bytes_per_token": peak / n}


def context_cost(documents: list[Tokens]) -> dict[str, dict[str, float]]:
    """Measure ingest time and bytes of a request, by prompt length."""
    text = np.concatenate(documents)
    text = text[text != SEPARATOR]
    result = {}
    for length in (1024, 8192, 32768, 131072):
        indices = [RequestIndex() for _ in range(15)]
        prompts = [text[repeat * 1000 :][:length] for repeat in range(15)]
        each = [timed(partial(index.replace, "r", p))[1] for index, p in zip(indices, prompts, strict=True)]
        nanoseconds = statistics.median(each) * 1e9
        result[str(length)] = {"ns_per_token": nanoseconds / length, "bytes_per_token": indices[0].nbytes() / length}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "build" / "model", help="model folder")
    arguments = parser.parse_args()
    documents, vocab = corpus(arguments.tokenizer, max(STORES))
    need = PROMPT + STEPS * ADVANCE
    taken = [i for i, d in enumerate(documents) if len(d) > need][:HELD_OUT]
    stored = np.concatenate([d for i, d in enumerate(documents) if i not in taken])
    rows = np.stack([documents[i][:need] for i in taken])
    requests: dict[int, Any] = {1: rows[:16, None], BATCH: np.split(rows, 2), LARGE: [np.resize(rows, (LARGE, need))]}

    arms = [Arm("input only", (), vocab, shape, 1) for shape in SHAPES]
    snapshots = {f"{size / 1e6:g} M": snapshot_of(stored[:size], 1, vocab) for size in STORES}
    for label, whole in snapshots.items():
        for batch, shapes in ((1, SHAPES), (BATCH, SHAPES), (LARGE, SHAPES[1:])):
            arms += [Arm(label, whole, vocab, shape, batch) for shape in shapes]
    in_8 = {size: snapshot_of(stored[:size], 8, vocab) for size in STORES}
    arms += [Arm(f"{n / 1e6:g} M in 8", store, vocab, shape, 1) for n, store in in_8.items() for shape in SHAPES]
    for turn in range(ROUNDS + 1):
        for arm in arms:
            for of_batch in requests[arm.batch]:
                arm.run(of_batch, timed=turn > 0)
    quantiles = {arm.name: np.percentile(arm.draft_us, [50, 5, 95]).tolist() for arm in arms}
    result: dict[str, Any] = {
        "draft_us_per_call": {n: dict(zip(("median", "p5", "p95"), q, strict=True)) for n, q in quantiles.items()},
        "append_us_per_token": {arm.name: statistics.median(arm.append_us) for arm in arms if arm.batch == 1},
        "store_bytes_per_token": {label: whole[0].nbytes / whole[0].n for label, whole in snapshots.items()},
    }
    result["prompt"] = context_cost(documents)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a new process, with its own peak of memory
        result["store_build"] = pool.apply(build_cost, (stored[: max(STORES)], vocab))
    result = rounded(result, 2)
    print(json.dumps(result, indent=1))
    write_json(arguments.json, result)


if __name__ == "__main__":
    main()
