"""Train the weights of SSSD's learned scorer, for its option "weights", from recorded answers of any models.

    python -m bench.scorer --tokenizer MODEL_DIR --trace trace.jsonl --sessions agents.jsonl --recorded logits.jsonl \\
        --out weights.json

A trace has an object with "prompt" and "output" in each line; sessions are what `bench/replay.py --sessions` reads;
answers with logits are recorded by `bench.scorer.record`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.lib.results import command_line, sha256
from bench.lib.trace import Sessions, Trace, replayed
from bench.scorer.record import load_recordings
from bench.scorer.training import train
from bench.scorer.weights import save
from sssd_plugin.datastore import tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--rows", type=int, help="number of first rows of each trace (default: all)")
    parser.add_argument("--sessions", type=Path, nargs="*", default=[])
    parser.add_argument("--recorded", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    traces = [replayed(Trace.load(path, options.tokenizer).rows[: options.rows]) for path in options.trace]
    sessions = [Sessions.load(path, options.tokenizer) for path in options.sessions]
    recordings = [load_recordings(path) for path in options.recorded]
    weights = train(traces, sessions, recordings, tokenizer.load(options.tokenizer).get_vocab_size())
    files = {path.name: sha256(path) for path in (*options.trace, *options.sessions, *options.recorded)}
    save(replace(weights, trained_on=files, recipe=command_line(sys.orig_argv[1:])), options.out)
    print(f"wrote {options.out}: trained on {', '.join(files)}")


if __name__ == "__main__":
    main()
