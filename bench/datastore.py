"""What a datastore costs to build, to store and to open.

    python bench/datastore.py --json OUT [--tokens 8000000] [--tokenizer DIR --text FOLDER [--glob '**/*.py']]

Builds from token ids, without tokenising, in a process of its own: microseconds per token, wall and CPU; peak memory
per token beyond what the process held before; bytes per token on disk; seconds to open with and without checksums. The
ids are drawn from a Zipf law with copied passages, for vocabularies whose sorting takes two and three bytes per token,
and, with --tokenizer, come from real text, whose tokenising is timed too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore import sources, tokenizer
from sssd_plugin.datastore.builder import StoreBuilder
from sssd_plugin.datastore.memory import format_size, peak_resident_bytes, resident_bytes
from sssd_plugin.datastore.store import Datastore

BARS = {"build_us_per_token": 0.5, "peak_bytes_per_token": 45.0, "disk_bytes_per_token": 9.0}


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


def real_tokens(folder: Path, glob: str, tokenizer_folder: Path, n_tokens: int) -> tuple[NDArray[np.int32], float]:
    """At most `n_tokens` of the text in `folder`, and the seconds that tokenising took."""
    loaded = tokenizer.load(tokenizer_folder)
    pieces = sources.read_pieces(sources.find_inputs([folder], glob))
    blocks: list[NDArray[np.int32]] = []
    start = time.perf_counter()
    for block in sources.tokenize(pieces, loaded):
        blocks.append(block.astype(np.int32))
        if sum(map(len, blocks)) >= n_tokens:
            break
    return np.concatenate(blocks)[:n_tokens], time.perf_counter() - start


def build(file: Path, target: Path, vocab_size: int) -> dict[str, float]:
    """Build from the .npy `file`; runs in a fresh process, so that the peak is the build's."""
    import pydivsufsort  # noqa: F401 - its memory is not the build's

    before = resident_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    with StoreBuilder(target, vocab_size=vocab_size, memory=1 << 40) as builder:
        for piece in sources.read_pieces(sources.find_inputs([file])):
            builder.append(piece.content)  # type: ignore[arg-type]
        manifest = builder.finish()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    n = manifest.n_tokens
    return {
        "store_tokens": n,
        "build_us_per_token": seconds / n * 1e6,
        "build_cpu_us_per_token": cpu_seconds / n * 1e6,
        "peak_bytes_per_token": (peak_resident_bytes() - before) / n,
        "disk_bytes_per_token": manifest.size / n,
        "sub_indices": len(manifest.sub_indices),
    }


def measure(name: str, tokens: NDArray[np.int32], vocab_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file, target = Path(folder) / "tokens.npy", Path(folder) / "store"
        np.save(file, tokens)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            row: dict[str, Any] = {"name": name, "vocab_size": vocab_size}
            row |= pool.submit(build, file, target, vocab_size).result()
        for key, verify in (("open_seconds", True), ("open_unverified_seconds", False)):
            start = time.perf_counter()
            Datastore.open(target, vocab_size=vocab_size, verify=verify).close()
            row[key] = time.perf_counter() - start
    row["within_bars"] = all(row[key] <= bar for key, bar in BARS.items())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens per store")
    parser.add_argument("--tokenizer", type=Path, help="model folder; also build from the text in --text")
    parser.add_argument("--text", type=Path, default=Path(os.__file__).parent, help="folder [Python's library]")
    parser.add_argument("--glob", default="**/*.py", help="files of --text")
    options = parser.parse_args()

    rows = [measure(f"zipf, {v} ids", zipf_tokens(options.tokens, v), v) for v in (49_152, 150_000)]
    if options.tokenizer:
        tokens, seconds = real_tokens(options.text, options.glob, options.tokenizer, options.tokens)
        row = measure("text", tokens, tokenizer.vocab_size(tokenizer.load(options.tokenizer)))
        rows.append(row | {"tokenize_us_per_token": seconds / len(tokens) * 1e6})
    result = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "bars": BARS, "rows": rows}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(
            f"{row['name']}: {row['store_tokens']:,} tokens, build {row['build_us_per_token']:.3f} us/token "
            f"({row['build_cpu_us_per_token']:.3f} CPU), "
            f"peak {row['peak_bytes_per_token']:.1f} bytes/token, disk {row['disk_bytes_per_token']:.2f} bytes/token "
            f"({format_size(row['disk_bytes_per_token'] * row['store_tokens'])}), open {row['open_seconds']:.3f} s "
            f"({row['open_unverified_seconds']:.3f} s unverified)"
        )


if __name__ == "__main__":
    main()
