"""Stores that somebody has tampered with: each is refused in one line, or drafts harmlessly; none crashes.

Bytes, sizes, numbers and manifests are changed at random, mostly with checksums that are right again.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest

from sssd_plugin.datastore.disk.format import MANIFEST, ROLES, Role, file_name, read_manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.drafter import Drafter, Shape
from sssd_plugin.options import Scoring
from tests.support.stores import build_store, edit_manifest, replace_array

VOCAB = 200
EXTREMES = [-(1 << 31), -33, -2, -1, 0, 1, VOCAB - 1, VOCAB, 70_000, 1 << 20, (1 << 31) - 33, (1 << 31) - 1]
STRANGE = [-1, 0, 1, 7, 1 << 31, 1 << 63, "", "../..", "/", "\0", None, [], {}, 1.5, True]


def mutate(store: Path, rng: np.random.Generator) -> str:
    """Change a store as an attacker would, and return how."""
    kind = str(rng.choice(["bytes", "size", "swap", *["numbers"] * 3, *["manifest"] * 2]))
    sub = int(rng.integers(2))
    role = cast(Role, str(rng.choice(ROLES)))
    path = store / read_manifest(store).sub_indices[sub].name / file_name(role)
    if kind == "bytes":
        target = path if rng.random() < 0.7 else store / MANIFEST
        data = bytearray(target.read_bytes())
        for at in rng.integers(0, len(data), int(rng.integers(1, 9))).tolist():
            data[at] = int(rng.integers(256))
        target.write_bytes(data)
    elif kind == "size":
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(max(0, size + int(rng.integers(-size, 4096))))
    elif kind == "manifest":
        edit_manifest(store, lambda content: make_strange(content, rng))
    else:
        replace_array(store, role, rng.shuffle if kind == "swap" else lambda array: scatter(array, rng), sub)
        if role == "tokens":
            kind = "tokens"
            if rng.random() < 0.5:  # what the manifest says of them agrees
                largest = int(np.fromfile(path, np.int32).max())
                edit_manifest(store, lambda content: content["sub_indices"][sub].update(max_token=largest))
    return kind


def make_strange(content: Any, rng: np.random.Generator) -> None:
    """Change one value of a manifest."""
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[int(rng.integers(len(keys)))]
    if isinstance(content[key], (dict, list)) and content[key] and rng.random() < 0.8:
        make_strange(content[key], rng)
    else:
        content[key] = STRANGE[int(rng.integers(len(STRANGE)))]


def scatter(array: np.ndarray, rng: np.random.Generator) -> None:
    """Change some numbers of an array."""
    places = rng.integers(0, len(array), int(rng.choice([1, 3, 50, 2000])))
    wild = rng.choice(np.array(EXTREMES, np.int64), len(places))
    array[places] = np.where(rng.random(len(places)) < 0.5, wild, rng.integers(0, len(array), len(places)))


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


@pytest.mark.extended
def test_each_is_refused_in_one_line_or_harmless(tmp_path: Path, stores: int = 300) -> None:
    """A crash ends the test run."""
    whole, store, rng = tmp_path / "whole", tmp_path / "store", np.random.default_rng(1)
    build_store(whole, [rng.zipf(1.4, 120) % (VOCAB - 1) for _ in range(40)], VOCAB, sub_index_tokens=3000)
    drafters = [Drafter(vocab_size=VOCAB, max_nodes=24, scoring=scoring) for scoring in get_args(Scoring)]
    ended: Counter[str] = Counter()
    for seed in range(stores):
        rng = np.random.default_rng(seed)
        shutil.copytree(whole, store)
        kind = mutate(store, rng)
        state = attempt(store, rng, drafters)
        assert state in ("refused", "harmless"), (seed, kind, state)
        ended[f"{kind} {state}"] += 1
        shutil.rmtree(store)
    assert ended["numbers refused"] > 25 and ended["numbers harmless"] > 0 < ended["swap harmless"]
