"""Every store that cannot be used is refused with one line that names the file and the remedy; one that somebody has
tampered with, mostly with checksums that are right again, is refused or drafts harmlessly."""

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest

from sssd_plugin.datastore.disk import checksum
from sssd_plugin.datastore.disk.checksum import Bounds, check, write_array
from sssd_plugin.datastore.disk.format import MANIFEST, ROLES, Role, TokenizerEntry, digest, file_name, read_manifest
from sssd_plugin.datastore.disk.store import Datastore, audit
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.drafter import Drafter, Shape
from sssd_plugin.options import Scoring
from tests.support.stores import build_store, edit_manifest, refused, replace_array

FINGERPRINT = "ab" * 32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    target = tmp_path_factory.mktemp("whole") / "store"
    documents = [rng.integers(0, 90, 700).tolist() for _ in range(6)]
    entry = TokenizerEntry(name="some-model", fingerprint=FINGERPRINT)
    build_store(target, documents, 100, sub_index_tokens=2_500, tokenizer=entry)
    return target


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def refusal(path: Path, **expected: Any) -> str:
    """The message with which `path` is refused."""
    with refused(re.escape(str(path))) as caught:
        Datastore.open(path, **expected)
    return str(caught.value)


def array_files(store: Path) -> list[Path]:
    return sorted(store.rglob("*.i32"))


def test_not_a_store(tmp_path: Path) -> None:
    assert "no datastore at" in (message := refusal(tmp_path / "nowhere")) and "freedraft datastore build" in message
    assert "is not a datastore" in refusal(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is a file, not a datastore" in refusal(tmp_path / "file")
    for content in ('{"name": "something else"}', "[]"):
        (tmp_path / MANIFEST).write_text(content)
        assert "does not describe a freedraft datastore" in refusal(tmp_path)


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("change", "complaint", "verify"),
    [
        (lambda content: None, "missing", False),
        (lambda content: content[:-1], "truncated", False),
        (lambda content: content + b"\0", "corrupted (too long)", False),
        (lambda content: flip(content, len(content) - 1), "corrupted: checksum", True),
    ],
)
def test_damaged_arrays(store: Path, change: Callable[[bytes], bytes | None], complaint: str, verify: bool) -> None:
    assert len(array_files(store)) == 8, "two sub-indices"
    for file in array_files(store):
        content = file.read_bytes()
        damaged = change(content)
        file.unlink() if damaged is None else file.write_bytes(damaged)
        for checked in (True, verify):
            message = refusal(store, verify=checked)
            assert f"{file} is {complaint}" in message and "build it again" in message
        file.write_bytes(content)


def test_a_damaged_manifest(whole: Path, tmp_path: Path) -> None:
    """Truncated, or with a flipped bit in any third byte."""
    target, content = tmp_path / MANIFEST, (whole / MANIFEST).read_bytes()
    right = read_manifest(whole)
    for length in (0, 1, len(content) // 2, len(content) - 3):
        target.write_bytes(content[:length])
        assert f"{target} is corrupted" in refusal(tmp_path)
    refused = 0
    for position in range(0, len(content), 3):
        target.write_bytes(flip(content, position))
        try:
            assert read_manifest(tmp_path) == right, f"byte {position}"
        except DatastoreError as error:
            assert str(target) in str(error)
            refused += 1
    assert refused > 0.99 * len(content) / 3


def test_another_model(store: Path) -> None:
    audit(Datastore.open(store, vocab_size=90, fingerprint=FINGERPRINT))
    message = refusal(store, fingerprint="cd" * 32)
    assert "another tokenizer (some-model" in message and "freedraft datastore build" in message
    message = refusal(store, vocab_size=89)
    assert "token ids up to 89" in message and "only 89" in message and "freedraft datastore build" in message


INVALID = ["is not a valid manifest"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 2}, ["format version 2", "upgrade freedraft"]),
        ({"format_version": 99, "checksum": "0" * 8}, ["format version 99", "upgrade freedraft"]),
        *(({key: value}, INVALID) for key, value in {"vocab_size": "many", "sub_indices": {}}.items()),
        ({"vocab_size": 2**31 + 1}, INVALID),
        *(({"first": {"name": name}}, INVALID) for name in ("../elsewhere", "a/b", "..")),
        *(({"first": {"n_tokens": number}}, INVALID) for number in (-1, 5)),
        *(({"first": change}, INVALID) for change in ({"max_token": 100}, {"files": {}})),
    ],
)
def test_manifests_that_are_newer_or_wrong(store: Path, changes: dict[str, Any], words: list[str]) -> None:
    """`first` changes what it says of the first sub-index."""

    def change(content: dict[str, Any]) -> None:
        content["sub_indices"][0].update(changes.get("first", {}))
        content.update({key: value for key, value in changes.items() if key != "first"})

    edit_manifest(store, change, valid_checksum="checksum" not in changes)
    assert all(word in refusal(store) for word in words)


def test_unknown_keys_are_ignored(store: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["notes"] = {"a": 1}
        content["sub_indices"][0]["tier"] = "cold"
        content["sub_indices"][0]["files"]["tokens"]["blake3"] = "x"

    edit_manifest(store, change)
    Datastore.open(store)


def put(place: Any, values: Any) -> Callable[[np.ndarray], None]:
    """Changes an array: numbers, or a function of those that are there."""
    return lambda array: array.__setitem__(place, values(array[place]) if callable(values) else values)


SWAP = put([500, 501], lambda numbers: numbers[::-1])


@pytest.mark.parametrize(
    ("role", "change", "complaint"),
    [
        ("suffix_array", SWAP, "not sorted at entry"),
        ("suffix_array", put([500, 501], lambda numbers: numbers[[1, 1]]), "not a permutation"),
        ("tokens", put(500, lambda number: (number + 1) % 89), "bucket_starts.i32 is wrong"),
        ("bucket_starts", put(50, lambda number: number + 1), "does not agree with the tokens"),
        ("sparse_index", put(50, lambda number: number + 1), "does not agree with the tokens and the suffix array"),
    ],
)
def test_an_audit_finds_what_checksums_cannot(store: Path, role: str, change: Any, complaint: str) -> None:
    file = replace_array(store, role, change)
    opened = Datastore.open(store)
    with refused(complaint) as caught:
        audit(opened)
    assert str(file.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("role", "change"),
    [("suffix_array", put(500, 2**31 - 1)), ("tokens", put(500, 100)), ("bucket_starts", put(50, 0))],
)
def test_what_compiled_code_could_not_read_is_refused(store: Path, role: str, change: Any) -> None:
    """Though checksums match."""
    file = replace_array(store, role, change)
    assert f"{file} holds numbers" in (message := refusal(store)) and "from whom you trust" in message


def test_a_pinned_store_is_that_one(store: Path) -> None:
    pinned = digest(store)
    Datastore.open(store, sha256=pinned)
    replace_array(store, "suffix_array", SWAP)
    Datastore.open(store)
    assert f"not {pinned}" in refusal(store, sha256=pinned)
    file = array_files(store)[0]
    file.write_bytes(flip(file.read_bytes(), 100))
    assert "checksum of the block" in refusal(store, sha256=digest(store))
    edit_manifest(store, lambda manifest: manifest["sub_indices"][0]["files"][file.stem].pop("sha256"))
    assert "not a valid manifest" in refusal(store)


@pytest.mark.parametrize("wrong", [-1, 11, 2])
def test_numbers_out_of_bounds_are_found_at_every_place(tmp_path: Path, monkeypatch, wrong: int) -> None:
    """At every place, also where a block or a read begins."""
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 40)
    monkeypatch.setattr(checksum, "_STEP_BYTES", 12)
    for place in range(4, 25):
        array = np.minimum(np.arange(25, dtype=np.int32), 10)
        array[place] = wrong
        path = tmp_path / str(place)
        entry = write_array(path, array)
        with pytest.raises(DatastoreError, match=r"holds numbers .* in the block at byte .* whom you trust"):
            check([(path, entry, Bounds(0, 10, rising=True))])


FUZZED_VOCAB = 200
EXTREMES = [-(1 << 31), -33, -2, -1, 0, 1, FUZZED_VOCAB - 1, FUZZED_VOCAB, 70_000, 1 << 20, 2**31 - 33, 2**31 - 1]
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
        opened = Datastore.open(store, vocab_size=FUZZED_VOCAB)
    except DatastoreError as error:
        return "refused" if "\n" not in str(error) else f"more than a line: {error}"
    for drafter in drafters:
        drafter.use(opened.snapshot)
    for prompt in (rng.zipf(1.4, (6, 30)) % FUZZED_VOCAB).astype(np.int32):
        for drafter, shape in itertools.product(drafters, get_args(Shape)):
            drafter.replace("r", prompt)
            draft = drafter.draft(["r"], max_nodes=24, shape=shape)
            n = int(draft.counts[0])
            tokens, parents = draft.tokens[0, :n], draft.parents[0, 1:n]
            if not ((tokens >= 0) & (tokens < FUZZED_VOCAB)).all() or not (parents < np.arange(1, n)).all():
                return f"a draft of {tokens.tolist()} under {parents.tolist()}"
    return "harmless"


@pytest.mark.extended
def test_each_is_refused_in_one_line_or_harmless(tmp_path: Path, stores: int = 300) -> None:
    """A crash ends the test run."""
    whole, store, rng = tmp_path / "whole", tmp_path / "store", np.random.default_rng(1)
    build_store(
        whole, [rng.zipf(1.4, 120) % (FUZZED_VOCAB - 1) for _ in range(40)], FUZZED_VOCAB, sub_index_tokens=3000
    )
    drafters = [Drafter(vocab_size=FUZZED_VOCAB, max_nodes=24, scoring=scoring) for scoring in get_args(Scoring)]
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
