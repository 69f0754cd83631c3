"""Every store that cannot be used is refused with one line that names the file and the remedy."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sssd_plugin.datastore.disk.audit import audit
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, TokenizerEntry, digest, read_manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from tests.support.stores import build_store, edit_manifest, replace_array

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
    with pytest.raises(DatastoreError) as caught:
        Datastore.open(path, **expected)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def array_files(store: Path) -> list[Path]:
    return sorted(store.rglob("*.i32"))


def test_a_whole_store_opens(store: Path) -> None:
    with Datastore.open(store, vocab_size=100, fingerprint=FINGERPRINT) as opened:
        assert len(opened.snapshot.sub_indices) == 2
        audit(opened)


def test_missing_store(tmp_path: Path) -> None:
    assert "no datastore at" in (message := refusal(tmp_path / "nowhere"))
    assert "freedraft datastore build" in message


def test_not_a_store(tmp_path: Path) -> None:
    assert "is not a datastore" in refusal(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is a file, not a datastore" in refusal(tmp_path / "file")
    (tmp_path / "manifest.json").write_text('{"name": "something else"}')
    assert "does not describe a freedraft datastore" in refusal(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    assert "does not describe a freedraft datastore" in refusal(tmp_path)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("which", range(8))
def test_missing_file(store: Path, which: int, verify: bool) -> None:
    file = array_files(store)[which]
    file.unlink()
    message = refusal(store, verify=verify)
    assert f"{file} is missing" in message and "build it again" in message


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("which", range(8))
def test_truncated_file(store: Path, which: int, verify: bool) -> None:
    file = array_files(store)[which]
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    message = refusal(store, verify=verify)
    assert f"{file} is truncated" in message and "build it again" in message


def test_truncated_manifest(store: Path) -> None:
    manifest = store / "manifest.json"
    content = manifest.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 3):
        manifest.write_bytes(content[:length])
        assert f"{manifest} is corrupted" in refusal(store)


def test_a_file_that_is_too_long(store: Path) -> None:
    file = array_files(store)[0]
    with file.open("ab") as handle:
        handle.write(b"\0")
    assert f"{file} is corrupted (too long)" in refusal(store)


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_anywhere_in_the_arrays(store: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    file = array_files(store)[seed % 8]
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    message = refusal(store)
    assert f"{file} is corrupted: checksum" in message and "build it again" in message


def test_a_flipped_bit_anywhere_in_the_manifest(whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    content = (whole / "manifest.json").read_bytes()
    right = read_manifest(whole)
    refused = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (5 * position % 8)
        target.write_bytes(damaged)
        try:
            assert read_manifest(tmp_path) == right, f"byte {position}"
        except DatastoreError as error:
            assert str(target) in str(error)
            refused += 1
    assert refused > 0.99 * len(content)


def test_foreign_tokenizer(store: Path) -> None:
    message = refusal(store, fingerprint="cd" * 32)
    assert "another tokenizer (some-model" in message and "freedraft datastore build" in message


def test_vocabulary_too_small(store: Path) -> None:
    Datastore.open(store, vocab_size=90).close()
    message = refusal(store, vocab_size=89)
    assert "token ids up to 89" in message and "only 89" in message and "freedraft datastore build" in message


def test_a_store_without_sparse_indices_opens(store: Path) -> None:
    """As they were written before."""
    with Datastore.open(store) as new:
        expected = [sub.sparse_index.tolist() for sub in new.snapshot.sub_indices]
    for sub in read_manifest(store).sub_indices:
        (store / sub.name / "sparse_index.i32").unlink()
    edit_manifest(store, lambda content: [sub["files"].pop("sparse_index") for sub in content["sub_indices"]])
    with Datastore.open(store) as old:
        assert [sub.sparse_index.tolist() for sub in old.snapshot.sub_indices] == expected


def test_newer_format(store: Path) -> None:
    edit_manifest(store, lambda content: content.update(format_version=2))
    message = refusal(store)
    assert "format version 2" in message and "upgrade freedraft" in message


def test_newer_format_whose_checksum_is_made_otherwise(store: Path) -> None:
    edit_manifest(store, lambda content: content.update(format_version=99), valid_checksum=False)
    assert "format version 99" in refusal(store)


def test_a_required_feature_that_we_lack(store: Path) -> None:
    edit_manifest(store, lambda content: content.update(requires=["tenants"]))
    message = refusal(store)
    assert "requires tenants" in message and "upgrade freedraft" in message


def test_unknown_keys_are_ignored(store: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["notes"] = {"a": 1}
        content["sub_indices"][0]["tier"] = "cold"
        content["sub_indices"][0]["files"]["tokens"]["blake3"] = "x"

    edit_manifest(store, change)
    Datastore.open(store).close()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../elsewhere"},
        {"name": "a/b"},
        {"name": ".."},
        {"n_tokens": -1},
        {"n_tokens": 5},
        {"max_token": 100},
        {"files": {}},
    ],
)
def test_a_manifest_that_contradicts_itself(store: Path, change: dict[str, Any]) -> None:
    edit_manifest(store, lambda content: content["sub_indices"][0].update(change))
    assert "is not a valid manifest" in refusal(store)


def test_a_manifest_of_wrong_types(store: Path) -> None:
    for key, value in [("vocab_size", "many"), ("sub_indices", {}), ("vocab_size", 2**31 + 1), ("requires", 5)]:
        copy = store.with_name(f"{key}-{value}")
        shutil.copytree(store, copy)
        edit_manifest(copy, lambda content, key=key, value=value: content.update({key: value}))
        assert "is not a valid manifest" in refusal(copy)


def test_unreadable_file(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = array_files(store)[0]
    plain = Path.open

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == file:
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    message = refusal(store)
    assert f"cannot read {file}: Permission denied" in message and "give this user access" in message


def test_an_empty_store_opens(tmp_path: Path) -> None:
    Manifest(vocab_size=10, sub_indices=()).write(tmp_path / MANIFEST)
    with Datastore.open(tmp_path, vocab_size=1) as store:
        assert store.n_tokens == 0 and store.snapshot.sub_indices == ()
        audit(store)


def _swap(array: np.ndarray) -> None:
    array[[500, 501]] = array[[501, 500]]


def _repeat(array: np.ndarray) -> None:
    array[500] = array[501]


def _outside(array: np.ndarray) -> None:
    array[500] = 2**31 - 1


def _other_token(array: np.ndarray) -> None:
    array[500] = (array[500] + 1) % 89


def _beyond_vocabulary(array: np.ndarray) -> None:
    array[500] = 100


def _shift_down(array: np.ndarray) -> None:
    array[50] = 0


def _shift(array: np.ndarray) -> None:
    array[50] += 1


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("role", "change", "complaint"),
    [
        ("suffix_array", _swap, "not sorted at entry"),
        ("suffix_array", _repeat, "no permutation"),
        ("tokens", _other_token, "bucket_starts.i32 is wrong"),
        ("bucket_starts", _shift, "does not agree with the tokens"),
        ("sparse_index", _shift, "does not agree with the tokens and the suffix array"),
    ],
)
def test_an_audit_finds_what_checksums_cannot(store: Path, role: str, change: Any, complaint: str, full: bool) -> None:
    file = replace_array(store, role, change)
    with Datastore.open(store) as opened, pytest.raises(DatastoreError) as caught:
        audit(opened, full=full)
    assert complaint in str(caught.value) and str(file.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("role", "change"), [("suffix_array", _outside), ("tokens", _beyond_vocabulary), ("bucket_starts", _shift_down)]
)
def test_what_compiled_code_could_not_read_is_refused(store: Path, role: str, change: Any) -> None:
    """Though checksums match."""
    file = replace_array(store, role, change)
    assert f"{file} holds numbers" in (message := refusal(store)) and "from whom you trust" in message


def test_a_pinned_store_is_that_one(store: Path) -> None:
    pinned = digest(store)
    Datastore.open(store, sha256=pinned).close()
    replace_array(store, "suffix_array", _swap)
    Datastore.open(store).close()
    assert f"not {pinned}" in refusal(store, sha256=pinned)
    file = array_files(store)[0]
    content = bytearray(file.read_bytes())
    content[100] ^= 1  # with another checksum in the manifest, but no other SHA-256
    file.write_bytes(content)
    crc = f"{zlib.crc32(content):08x}"
    edit_manifest(store, lambda manifest: manifest["sub_indices"][0]["files"][file.stem].update(crc32=[crc]))
    assert "checksum of the block" in refusal(store, sha256=digest(store))


def test_a_store_without_sha256_cannot_be_pinned(store: Path) -> None:
    edit_manifest(store, lambda content: content["sub_indices"][0]["files"]["tokens"].pop("sha256"))
    Datastore.open(store).close()
    assert "has no SHA-256" in refusal(store, sha256=digest(store))
