"""Stores that somebody has tampered with: each must be refused in one line, or draft harmlessly; none may crash.

    python bench/fuzz_datastore.py [--stores 1000] [--seed 0] [--json OUT]

Bytes, sizes, numbers and manifests are changed at random, mostly with checksums that are right again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from bench.lib.results import write_json
from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.disk.checksum import write_array
from sssd_plugin.datastore.disk.format import MANIFEST, ROLES, Role, checksum, file_name
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.drafter import Drafter, Shape
from sssd_plugin.options import Scoring

VOCAB = 200
_EXTREMES = [-(1 << 31), -33, -2, -1, 0, 1, VOCAB - 1, VOCAB, 70_000, 1 << 20, (1 << 31) - 33, (1 << 31) - 1]
_STRANGE = [-1, 0, 1, 7, 1 << 31, 1 << 63, "", "../..", "/", "\0", None, [], {}, 1.5, True]
_BATCH = 500


def build(target: Path) -> None:  # of two sub-indices
    rng = np.random.default_rng(1)
    with StoreBuilder(target, vocab_size=VOCAB, sub_index_tokens=3000) as builder:
        for _ in range(40):
            builder.append(np.append(rng.zipf(1.4, 120) % (VOCAB - 1), -1))
        builder.finish()


def mutate(store: Path, rng: np.random.Generator) -> str:
    """Change a store as an attacker would, and return how."""
    kind = str(rng.choice(["bytes", "size", "swap", *["numbers"] * 3, *["manifest"] * 2]))
    content = json.loads((store / MANIFEST).read_bytes())
    sub = content["sub_indices"][int(rng.integers(2))]
    role = cast(Role, str(rng.choice(ROLES)))
    path = store / sub["name"] / file_name(role)
    if kind == "bytes":
        target = path if rng.random() < 0.7 else store / MANIFEST
        data = bytearray(target.read_bytes())
        for at in rng.integers(0, len(data), int(rng.integers(1, 9))).tolist():
            data[at] = int(rng.integers(256))
        target.write_bytes(data)
        return kind
    if kind == "size":
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(max(0, size + int(rng.integers(-size, 4096))))
        return kind
    if kind == "manifest":
        node: Any = content
        while isinstance(node, (dict, list)) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = keys[int(rng.integers(len(keys)))]
            if not isinstance(node[key], (dict, list)) or rng.random() < 0.2:
                node[key] = _STRANGE[int(rng.integers(len(_STRANGE)))]
                break
            node = node[key]
    else:
        array = np.fromfile(path, np.int32)
        if kind == "swap":
            array = array[rng.permutation(len(array))]
        else:
            places = rng.integers(0, len(array), int(rng.choice([1, 3, 50, 2000])))
            wild = rng.choice(np.array(_EXTREMES, np.int64), len(places))
            array[places] = np.where(rng.random(len(places)) < 0.5, wild, rng.integers(0, len(array), len(places)))
        path.unlink()
        entry = write_array(path, array)
        sub["files"][role] = entry.model_dump(mode="json")
        if role == "tokens":  # what the manifest says of them agrees
            sub["max_token"] = int(array.max()) if rng.random() < 0.5 else sub["max_token"]
            kind = "tokens"
    content.pop("checksum", None)
    (store / MANIFEST).write_text(json.dumps(content | {"checksum": checksum(content)}))
    return kind


def attempt(store: Path, rng: np.random.Generator, drafters: list[Drafter]) -> str:
    """Open a store and draft from it: "refused", "harmless", or what is wrong."""
    try:
        opened = Datastore.open(store, vocab_size=VOCAB)
    except DatastoreError as error:
        return "refused" if "\n" not in str(error) else f"more than a line: {error}"
    for drafter in drafters:
        drafter.use(opened.snapshot)
    for prompt in (rng.zipf(1.4, (6, 30)) % VOCAB).astype(np.int32):
        for drafter, shape in itertools.product(drafters, get_args(Shape)):
            drafter.replace("r", prompt)
            draft = drafter.draft(["r"], max_nodes=24, shape=shape)
            n = int(draft.counts[0])
            tokens, parents = draft.tokens[0, :n], draft.parents[0, 1:n]
            if not ((tokens >= 0) & (tokens < VOCAB)).all() or not (parents < np.arange(1, n)).all():
                return f"a draft of {tokens.tolist()} under {parents.tolist()}"
    return "harmless"


def _attempts(whole: Path, seeds: list[int], log: Path) -> None:
    drafters = [Drafter(vocab_size=VOCAB, max_nodes=24, scoring=scoring) for scoring in get_args(Scoring)]
    with log.open("a", buffering=1) as out:
        for seed in seeds:
            print(json.dumps([seed, "crashed"]), file=out)  # unless something else is reported
            rng = np.random.default_rng(seed)
            with tempfile.TemporaryDirectory() as name:
                store = Path(shutil.copytree(whole, Path(name) / "store"))
                kind = mutate(store, rng)
                try:
                    state = f"{kind} {attempt(store, rng, drafters)}"
                except Exception as error:
                    state = f"{kind} raised {error!r}"
            print(json.dumps([seed, state]), file=out)


def fuzz(stores: int, first_seed: int = 0) -> tuple[dict[str, int], list[str]]:
    """Tamper with `stores` stores, in processes that may crash: how many ended how, and what went wrong."""
    ended: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as name:
        whole, log = Path(name) / "whole", Path(name) / "log"
        build(whole)
        while left := [seed for seed in range(first_seed, first_seed + stores) if seed not in ended]:
            arguments, before = (whole, left[:_BATCH], log), len(ended)
            process = multiprocessing.get_context("spawn").Process(target=_attempts, args=arguments)
            process.start()
            process.join()
            ended |= dict(map(json.loads, log.read_text().splitlines())) if log.exists() else {}
            if len(ended) == before:
                raise RuntimeError("the process that opens the stores did not start")
    wrong = {seed: state for seed, state in ended.items() if not state.endswith((" refused", " harmless"))}
    counts = Counter(state for seed, state in ended.items() if seed not in wrong)
    return dict(sorted(counts.items())), [f"seed {seed}: {state}" for seed, state in wrong.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stores", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts, wrong = fuzz(arguments.stores, arguments.seed)
    result = {"stores": arguments.stores, "seed": arguments.seed, "ended": counts, "wrong": wrong}
    print(json.dumps(result, indent=1))
    write_json(arguments.json, result)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
