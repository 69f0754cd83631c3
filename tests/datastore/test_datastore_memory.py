from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sssd_plugin.datastore.build.memory import format_size, parse_size, resident_bytes, sub_index_memory
from sssd_plugin.datastore.errors import DatastoreError

BUILD = """
import sys
import numpy as np
from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.build.memory import peak_resident_bytes

target, memory, vocab_size, n = sys.argv[1], *map(int, sys.argv[2:])
rng = np.random.default_rng(0)
with StoreBuilder(target, vocab_size=vocab_size, memory=memory) as builder:
    for _ in range(n // 500_000):
        block = (rng.random(500_000) ** 4 * vocab_size).astype(np.int32)
        block[::vocab_size // 100] = -1
        builder.append(block)
    manifest = builder.finish()
print(peak_resident_bytes(), len(manifest.sub_indices))
"""


@pytest.mark.parametrize(("vocab_size", "n_tokens"), [(49_152, 12_000_000), (250_000, 8_000_000)])
def test_a_build_stays_within_its_memory(tmp_path: Path, vocab_size: int, n_tokens: int) -> None:
    bound = parse_size("320MiB")
    args = [sys.executable, "-c", BUILD, str(tmp_path / "store"), str(bound), str(vocab_size), str(n_tokens)]
    output = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    peak, sub_indices = map(int, output.split())
    assert peak <= bound
    assert 2 <= sub_indices <= 8, "the memory is used"


def test_sorting_gets_what_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sssd_plugin.datastore.build.memory.resident_bytes", lambda: 100 << 20)
    assert 1_600_000_000 < sub_index_memory(2 << 30) < 2 << 30
    assert sub_index_memory(4 << 30, sorts=4) <= sub_index_memory(4 << 30) / 4
    assert sub_index_memory(1 << 30, sorts=0) == (1024 - 192) << 20, "nothing of it is this process's"
    with pytest.raises(DatastoreError, match=r"--memory 50.0 MiB is too little: give at least"):
        sub_index_memory(50 << 20)
    with pytest.raises(DatastoreError, match="too little: give at least"):
        sub_index_memory(300 << 20, sorts=32)


def test_sizes() -> None:
    assert parse_size("2GiB") == parse_size("2g") == parse_size(" 2 GiB ") == 2 << 30
    assert parse_size("1.5MB") == 1_500_000
    assert parse_size("123") == parse_size("123b") == 123
    for wrong in ("", "two", "-1", "2XB", "GiB", "1e9"):
        with pytest.raises(DatastoreError, match="is not a size"):
            parse_size(wrong)
    assert format_size(1536) == "1.5 KiB"
    assert resident_bytes() > 10 << 20
