from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.disk import checksum
from sssd_plugin.datastore.disk.checksum import Bounds, NewFile, check, record, write_array
from sssd_plugin.datastore.errors import DatastoreError


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("length", [0, 1, 24, 25, 26, 75, 80])
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, older: bool) -> None:
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 100)
    monkeypatch.setattr(checksum, "_STEP_BYTES", 28)
    array = np.arange(length, dtype=np.int32)
    with NewFile(tmp_path / "a") as file:
        for a in range(0, length, 7):
            file.append(array[a : a + 7])
    entry = record(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    assert content == array.tobytes()
    assert entry.size == 4 * length
    parts = [content[a : a + 100] for a in range(0, len(content), 100)]
    assert entry.sha256 == tuple(hashlib.sha256(part).hexdigest() for part in parts)
    assert entry.crc32 == tuple(f"{zlib.crc32(content[a : a + 100]):08x}" for a in range(0, len(content), 100))
    entry = entry.model_copy(update={"sha256": ()}) if older else entry
    check([(tmp_path / "a", entry, Bounds(0, 1000, rising=True))])
    for position in range(0, len(content), 9):
        damaged = bytearray(content)
        damaged[position] ^= 16
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(DatastoreError, match=f"block at byte {position // 100 * 100} is"):
            check([(tmp_path / "a", entry, Bounds(0, 1000, rising=True))])


@pytest.mark.parametrize("wrong", [-1, 11, 2])
def test_numbers_that_compiled_code_could_not_read_are_refused(tmp_path: Path, monkeypatch, wrong: int) -> None:
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
