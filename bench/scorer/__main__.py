"""Train the weights of SSSD's learned scorer, for its option "weights", from a trace: real answers of any model.

    python -m bench.scorer trace.jsonl --tokenizer MODEL_DIR --out weights.json

The trace has an object with "prompt" and "output" in each line. Without recorded logits (`bench.scorer.record`), the
weights of recycled logits are the shipped ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bench.lib.trace import Trace, replayed
from bench.scorer.record import load_recordings
from bench.scorer.training import train, train_recycled
from sssd_plugin.scoring.weights import Weights


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recorded", type=Path, help="answers with logits, for the weights of recycled logits")
    options = parser.parse_args(arguments)
    recordings = [] if options.recorded is None else load_recordings(options.recorded)
    trace = Trace.load(options.trace, options.tokenizer)
    rows = replayed(trace.rows)
    recycled = Weights.load().recycled
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        values = train(rows, trace.vocab_size, bar)
        if recordings:
            recycled = train_recycled(values, recordings, trace.vocab_size, bar)
    Weights(values, options.trace.stem, trace.sha256, recycled).save(options.out)
    print(f"wrote {options.out}: trained on {len(rows)} answers of {options.trace}")


if __name__ == "__main__":
    main()
