"""What was learnt on disk: it comes back, whatever stops the writer; damage is left out and said; forgetting erases."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.live import segments
from sssd_plugin.datastore.live.folder import LiveManifest
from sssd_plugin.datastore.live.records import Record, scan_segment
from sssd_plugin.datastore.live.segments import SegmentLog, check_live, forget
from sssd_plugin.datastore.live.store import open_live
from sssd_plugin.datastore.live.tenants import tenant_digest
from tests.support.stores import read_only_folder

VOCAB = 1000

LEARN_FOREVER = """
import sys, time
import numpy as np
from sssd_plugin.datastore.live import segments, store as live
from sssd_plugin.datastore.live.store import open_live

live.MEMTABLE_TOKENS, segments.SEGMENT_TOKENS, segments.FLUSH_SECONDS = 64, 500, 0.02
store = open_live(sys.argv[1], 1000, max_tokens=1 << 15)
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    text = np.array([number // 1000, number % 1000, *([number % 7] * (number % 50))], np.int32)
    while not store.insert(text):  # faster than the background can drop the oldest
        time.sleep(0.001)
    number += 1
    if number % 20 == 0:
        store.flush()
        print(number, flush=True)
"""


def log_of(directory: Path, **settings) -> SegmentLog:
    return SegmentLog.open(directory, vocab_size=VOCAB, **({"max_tokens": 1 << 20} | settings))


def write(directory: Path, texts: list[list[int]], tenant: bytes = b"", **settings) -> None:
    log = log_of(directory, **settings)
    for text in texts:
        log.append(tenant, np.array(text, np.int32))
    log.close()


def read(directory: Path, **settings) -> list[list[int]]:
    log = log_of(directory, **settings)
    records = log.take_recovered()
    log.close()
    return [record.tokens.tolist() for record in records]


def segment_files(directory: Path) -> list[Path]:
    return sorted((directory / "live").glob("*.seg"))


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    texts = [[i, i + 1, 5] for i in range(50)]
    write(tmp_path, texts[:20])
    write(tmp_path, texts[20:])
    assert read(tmp_path) == texts
    assert read(tmp_path, writer=False) == texts


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2]])
    for path in (tmp_path / "live").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "live").stat().st_mode) == 0o700


def test_segments_are_bounded_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", 100)
    log = log_of(tmp_path, max_tokens=1 << 14)
    for number in range(3000):
        log.append(b"", np.array([number // 1000, number % 1000, *[1] * 8], np.int32))
        if number % 30 == 29:
            log.flush()
    log.close()
    texts = read(tmp_path, max_tokens=1 << 14)
    numbers = [text[0] * 1000 + text[1] for text in texts]
    assert numbers == list(range(3000))[-len(numbers) :]
    assert (1 << 14) <= 11 * len(numbers) <= (1 << 14) + 200
    assert sum(path.stat().st_size for path in segment_files(tmp_path)) < 8 * (1 << 14)


def test_many_restarts_leave_few_segments(tmp_path: Path) -> None:
    for number in range(110):
        write(tmp_path, [[number]])
    assert read(tmp_path) == [[number] for number in range(110)]
    assert len(segment_files(tmp_path)) < 20


def test_a_torn_tail_is_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut the file at every byte of its last document, as a crash would."""
    log = log_of(tmp_path)
    for text in ([1, 2, 3], [4, 5], [6, 7, 8]):
        log.append(b"", np.array(text, np.int32))
    log.flush()
    log._lock.release()  # as if killed: nothing is sealed
    log.writable = False
    (path,) = segment_files(tmp_path)
    manifest = (tmp_path / "live" / "manifest.json").read_bytes()
    whole = path.read_bytes()
    two = len(whole) - len(Record(b"" or bytes(16), 0, np.array([6, 7, 8], np.int32)).to_bytes())
    for size in range(two, len(whole)):
        path.write_bytes(whole[:size])
        (tmp_path / "live" / "manifest.json").write_bytes(manifest)
        caplog.clear()
        assert read(tmp_path) == [[1, 2, 3], [4, 5]]
        said = [record.message for record in caplog.records if "are dropped" in record.message]
        assert len(said) == (size > two)
        assert path.stat().st_size == two


def test_a_flipped_bit_costs_one_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [[i, i + 1, i + 2, 900] for i in range(12)]
    write(tmp_path, texts)
    (path,) = segment_files(tmp_path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.choice(np.arange(8, len(whole)), 60, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        caplog.clear()
        found = read(tmp_path)
        assert len(found) == 11 and all(text in texts for text in found)
        assert any("damaged" in record.message or "truncated" in record.message for record in caplog.records)
        assert path.read_bytes() == damaged, "nothing that is stored is thrown away"


@pytest.mark.parametrize("what", ["missing", "other", "short"])
def test_a_segment_that_is_gone_costs_its_documents_only(tmp_path: Path, what: str, caplog) -> None:
    write(tmp_path, [[1]])
    write(tmp_path, [[2]])
    first = segment_files(tmp_path)[0]
    if what == "missing":
        first.unlink()
    else:
        first.write_bytes(b"something else entirely" if what == "other" else first.read_bytes()[:9])
    assert read(tmp_path) == [[2]]
    assert any(str(first) in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"{", "not JSON"),
        (b'{"format": "other"}', "does not describe"),
        (b'{"format": "freedraft-live", "format_version": 2}', "newer"),
        (b'{"format": "freedraft-live", "format_version": 1}', "checksum"),
    ],
)
def test_a_bad_manifest_stops_the_start_and_loses_nothing(tmp_path: Path, change: bytes, words: str) -> None:
    write(tmp_path, [[1, 2]])
    (path,) = segment_files(tmp_path)
    content = path.read_bytes()
    (tmp_path / "live" / "manifest.json").write_bytes(change)
    with pytest.raises(DatastoreError, match=words) as error:
        log_of(tmp_path)
    assert "\n" not in str(error.value) and "manifest.json" in str(error.value)
    with pytest.raises(DatastoreError, match=words):
        check_live(tmp_path, vocab_size=VOCAB, fingerprint=None, second_writer="refuse")
    assert path.read_bytes() == content


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    log_of(tmp_path, fingerprint="a" * 64).close()
    for settings in ({"fingerprint": "b" * 64}, {"vocab_size": VOCAB - 1}):
        with pytest.raises(DatastoreError, match="another model's tokenizer"):
            SegmentLog.open(tmp_path, **({"vocab_size": VOCAB, "max_tokens": 1 << 20} | settings))
    assert log_of(tmp_path, fingerprint="a" * 64).writable


def test_one_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = log_of(tmp_path)
    first.append(b"", np.array([1, 2], np.int32))
    first.flush()
    with pytest.raises(DatastoreError, match="another server writes"):
        log_of(tmp_path)
    with pytest.raises(DatastoreError, match="another server writes"):
        check_live(tmp_path, vocab_size=VOCAB, fingerprint=None, second_writer="refuse")
    check_live(tmp_path, vocab_size=VOCAB, fingerprint=None, second_writer="read")
    second = log_of(tmp_path, second_writer="read")
    assert [r.tokens.tolist() for r in second.take_recovered()] == [[1, 2]] and not second.writable
    second.append(b"", np.array([3], np.int32))
    second.close()
    first.append(b"", np.array([4], np.int32))
    first.close()
    assert read(tmp_path) == [[1, 2], [4]]


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for attempt in (lambda: log_of(file), lambda: check_live(file, vocab_size=1, fingerprint=None,
                                                             second_writer="refuse")):  # fmt: skip
        with pytest.raises(DatastoreError) as error:
            attempt()
        assert "\n" not in str(error.value)
    assert file.read_text() == "x"


def test_a_folder_that_may_not_be_written_is_refused_and_may_be_read() -> None:
    with read_only_folder() as folder:
        for attempt in (
            lambda: log_of(folder),
            lambda: check_live(folder, vocab_size=VOCAB, fingerprint=None, second_writer="refuse"),
        ):
            with pytest.raises(DatastoreError, match=r"cannot write .* give this user access") as error:
                attempt()
            assert "\n" not in str(error.value)
        assert log_of(folder, writer=False).take_recovered() == []


def test_a_disk_that_turns_read_only_stops_nothing(tmp_path: Path, monkeypatch, caplog) -> None:
    """A new segment cannot even be begun."""
    store = open_live(tmp_path, VOCAB)
    store.insert(np.array([1, 2], np.int32))
    store.flush()
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *rest)

    store._log._segment_tokens = 1
    monkeypatch.setattr(os, "open", refuse)
    assert store.insert(np.array([3, 4], np.int32)), "serving goes on"
    store.flush()
    assert "Read-only file system" in caplog.text and store.stats().documents == 2
    monkeypatch.setattr(os, "open", opened)
    store.close()
    assert read(tmp_path) == [[1, 2], [3, 4]]


def test_a_second_server_reads_and_learns_in_memory(tmp_path: Path, caplog) -> None:
    first = open_live(tmp_path, VOCAB)
    first.insert(np.array([1, 2, 3], np.int32))
    first.flush()
    with pytest.raises(DatastoreError, match="another server writes"):
        open_live(tmp_path, VOCAB)
    second = open_live(tmp_path, VOCAB, second_writer="read")
    assert "reading only" in caplog.text and second.stats().tokens == 4
    assert second.insert(np.array([4, 5], np.int32)) and second.stats().tokens == 7
    second.close()
    first.close()
    assert read(tmp_path) == [[1, 2, 3]]


def test_a_full_disk_stops_nothing_and_writing_is_tried_again(tmp_path: Path, monkeypatch, caplog) -> None:
    store = open_live(tmp_path, VOCAB)
    store.insert(np.array([1, 2], np.int32))
    store.flush()
    write_all = segments.write_all

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments, "write_all", full)
    for number in range(3, 6):
        assert store.insert(np.array([number], np.int32)), "serving goes on"
        store.flush()
    said = [r.message for r in caplog.records if "No space left" in r.message]
    assert len(said) == 1
    monkeypatch.setattr(segments, "write_all", write_all)
    store.flush()
    assert any("works again" in record.message for record in caplog.records)
    store.close()
    assert read(tmp_path) == [[1, 2], [3], [4], [5]]


def test_nothing_is_logged_of_texts_or_tenants(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    store = open_live(tmp_path, VOCAB)
    store.insert(np.array([777, 778, 779], np.int32), store.tenant("secret name"))
    store.close()
    open_live(tmp_path, VOCAB).close()
    assert not any("777" in record.getMessage() or "secret" in record.getMessage() for record in caplog.records)
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "live").iterdir())


def test_forgetting_erases_from_the_disk(tmp_path: Path) -> None:
    store = open_live(tmp_path, VOCAB)
    for number in range(10):
        store.insert(np.array([number, 500 + number], np.int32), store.tenant("a" if number % 2 else None))
    with pytest.raises(DatastoreError, match="stop it first"):
        forget(tmp_path, ["a"])
    store.close()
    manifest = LiveManifest.of(tmp_path / "live")
    assert manifest is not None
    digest = tenant_digest(bytes.fromhex(manifest.key), "a")
    assert forget(tmp_path, ["a"]) == (5, 10)
    assert read(tmp_path) == [[n, 500 + n] for n in range(0, 10, 2)]
    content = b"".join(path.read_bytes() for path in (tmp_path / "live").iterdir())
    assert struct.pack("<2i", 3, 503) not in content and digest not in content
    assert forget(tmp_path, before=(datetime.now(UTC) + timedelta(seconds=1)).isoformat()) == (5, 10)
    assert read(tmp_path) == [] and segment_files(tmp_path) == []


def test_a_kill_at_any_moment_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    """A process that appends, rotates segments, drops old ones and merges, killed at random moments."""
    rng = np.random.default_rng()
    confirmed = number = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", LEARN_FOREVER, str(tmp_path), str(number)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(float(rng.random()) * 0.25)
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")
        process.wait()
        confirmed = max([confirmed, *(int(line) for line in lines[:-1])])
        texts = read(tmp_path, max_tokens=1 << 15)
        found = [text[0] * 1000 + text[1] for text in texts]
        assert all(t[2:] == [n % 7] * (n % 50) for t, n in zip(texts, found, strict=True)), "never wrong data"
        assert found == list(range(found[0], found[0] + len(found))) if found else confirmed == 0
        assert not found or found[-1] + 1 >= confirmed
        number = found[-1] + 1 if found else 0
        assert scan_total(tmp_path) <= (1 << 15) + (1 << 12)
    assert confirmed > 100


def scan_total(directory: Path) -> int:
    return sum(record.size for path in segment_files(directory) for record in scan_segment(path).records)
