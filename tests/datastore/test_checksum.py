from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.disk import checksum
from sssd_plugin.datastore.disk.checksum import ChecksummedFile, check_contents
from sssd_plugin.datastore.errors import DatastoreError


@pytest.mark.parametrize("length", [0, 1, 24, 25, 26, 75, 80])
def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 100)
    monkeypatch.setattr(checksum, "_READ_BYTES", 30)
    array = np.arange(length, dtype=np.int32)
    with ChecksummedFile(tmp_path / "a") as file:
        for a in range(0, length, 7):
            file.write(array[a : a + 7])
        entry = file.close()
    content = (tmp_path / "a").read_bytes()
    assert content == array.tobytes()
    assert entry.size == 4 * length
    assert entry.crc32 == tuple(f"{zlib.crc32(content[a : a + 100]):08x}" for a in range(0, len(content), 100))
    check_contents([(tmp_path / "a", entry)])
    for position in range(0, len(content), 9):
        damaged = bytearray(content)
        damaged[position] ^= 16
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(DatastoreError, match=f"block at byte {position // 100 * 100} is"):
            check_contents([(tmp_path / "a", entry)])


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(DatastoreError, match=r"cannot write .*File exists"):
        ChecksummedFile(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"
