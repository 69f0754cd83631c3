"""What a datastore costs to build, to store and to open.

    python bench/datastore.py --json OUT --tokenizer DIR [--tokens 8000000]

Builds from token ids in a process of its own: microseconds per token; peak memory per token beyond what the process
held before; bytes per token on disk; seconds to open. The ids are drawn from a Zipf law with copied passages, for
vocabularies whose ids take two and three bytes, and come from Python's standard library.

    python bench/datastore.py --json OUT --tokenizer DIR --large 64000000

instead runs `freedraft datastore build --resume --workers N --memory 2GiB` on text of so many tokens, one worker for
each core: killed halfway through reading, then run again to its end. The text is shuffled from passages of Python's
standard library (bench/demo/store.py), 6 to 14 lines each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.demo.store import documents
from bench.lib.machine import cpu, in_fresh_process
from bench.lib.results import earlier_figures, write_json
from sssd_plugin.datastore import tokenizer
from sssd_plugin.datastore.build import sources
from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.build.memory import format_size, peak_resident_bytes, resident_bytes
from sssd_plugin.datastore.disk.store import Datastore


def zipf_tokens(n_tokens: int, vocab_size: int) -> NDArray[np.int32]:
    """Documents of 500 tokens; every id occurs; a third of the text is copied from elsewhere in it."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.15, n_tokens), vocab_size - 1).astype(np.int32)
    tokens[:vocab_size] = rng.permutation(vocab_size)
    for _ in range(n_tokens // 900):
        source, target = rng.integers(vocab_size, n_tokens - 600, 2)
        length = rng.integers(10, 600)
        tokens[target : target + length] = tokens[source : source + length]
    tokens[499::500] = -1
    return tokens


def real_tokens(loaded: Tokenizer, n_tokens: int) -> NDArray[np.int32]:
    """At most `n_tokens` of Python's library."""
    pieces = sources.read_pieces(sources.find_inputs([Path(os.__file__).parent], "**/*.py"))
    blocks: list[NDArray[np.int32]] = []
    for block in sources.tokenize(pieces, loaded):
        if sum(map(len, blocks)) >= n_tokens:
            break
        blocks.append(block.tokens.astype(np.int32))
    return np.concatenate(blocks)[:n_tokens]


def build(file: Path, target: Path, vocab_size: int) -> dict[str, float]:
    """Build from the .npy `file`; runs in a fresh process, so that the peak is the build's."""
    before = resident_bytes()
    start = time.perf_counter()
    with StoreBuilder(target, vocab_size=vocab_size, memory=1 << 40) as builder:
        for piece in sources.read_pieces(sources.find_inputs([file])):
            builder.append(piece.content)  # type: ignore[arg-type]
        manifest = builder.finish()
    seconds, n = time.perf_counter() - start, manifest.n_tokens
    peak = (peak_resident_bytes() - before) / n
    row = {"store_tokens": n, "build_us_per_token": seconds / n * 1e6, "peak_bytes_per_token": peak}
    return row | {"disk_bytes_per_token": manifest.size / n}


def measure(name: str, tokens: NDArray[np.int32], vocab_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file, target = Path(folder) / "tokens.npy", Path(folder) / "store"
        np.save(file, tokens)
        row = {"name": name, "vocab_size": vocab_size} | in_fresh_process(build, file, target, vocab_size)
        start = time.perf_counter()
        Datastore.open(target, vocab_size=vocab_size).close()
        return row | {"open_seconds": time.perf_counter() - start}


def shuffled_text(path: Path, loaded: Tokenizer, n_tokens: int) -> None:
    """JSON lines of passages in random order, of at least `n_tokens`."""
    rng = np.random.default_rng(0)
    lines = [line for document in documents() for line in document.splitlines()]
    lengths, starts = rng.integers(6, 15, len(lines)), rng.integers(0, len(lines) - 15, len(lines))
    rows = ["\n".join(lines[s : s + n]) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    sample = sum(len(e.ids) for e in loaded.encode_batch(rows[:2000], add_special_tokens=False))
    missing = n_tokens * 1.03 * sum(map(len, rows[:2000])) / sample  # characters
    with path.open("w") as file:
        while missing > 0:
            text = "\n".join(rows[i] for i in rng.integers(0, len(rows), 40))
            file.write(json.dumps({"text": text}) + "\n")
            missing -= len(text)


def large(tokenizer_folder: Path, n_tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        text, target = Path(name) / "text.jsonl", Path(name) / "store"
        shuffled_text(text, tokenizer.load(tokenizer_folder), n_tokens)
        flags = ["--resume", "--memory", "2GiB", "--workers", str(len(os.sched_getaffinity(0)))]
        command = [sys.executable, "-m", "freedraft.cli", "datastore", "build", str(target), str(text)]
        command += ["--tokenizer", str(tokenizer_folder), *flags, "--quiet"]
        size = text.stat().st_size
        progress = target.parent / f".{target.name}.resume" / "progress.json"
        peak, log, started = 0, "", time.perf_counter()
        for attempt in range(2):
            env = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
            process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            while process.poll() is None:
                with contextlib.suppress(OSError, IndexError):  # it ends
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]) << 10)
                done = json.loads(progress.read_text()) if attempt == 0 and progress.exists() else {"n_bytes": 0}
                if done["n_bytes"] > size / 2:
                    process.kill()
                time.sleep(0.05)
            log += "".join(process.communicate())
        seconds = time.perf_counter() - started
        if process.returncode:
            raise RuntimeError(log)
        with Datastore.open(target) as store:
            manifest = store.manifest
    command_of_user = "freedraft datastore build STORE text.jsonl --tokenizer MODEL " + " ".join(flags)
    row = {"command": command_of_user, "store_tokens": manifest.n_tokens, "resumed": "going on after" in log}
    return row | {"seconds_of_both_runs": round(seconds, 1), "peak_memory": format_size(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens per store")
    parser.add_argument("--large", type=int, metavar="N", help="only: a build of N tokens, killed once and resumed")
    options = parser.parse_args()

    before = earlier_figures(options.json) or {}
    if options.large:
        figures: dict[str, Any] = {"large": large(options.tokenizer, options.large)}
    else:
        measure("so that all is compiled", zipf_tokens(10_000, 1000), 1000)
        rows = [measure(f"zipf, {v} ids", zipf_tokens(options.tokens, v), v) for v in (49_152, 150_000)]
        loaded = tokenizer.load(options.tokenizer)
        rows.append(measure("text", real_tokens(loaded, options.tokens), tokenizer.vocab_size(loaded)))
        figures = {"cpu": cpu(), "cores": os.cpu_count(), "rows": rows}
    write_json(options.json, before | figures, indent=2, earlier=bool(before))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
