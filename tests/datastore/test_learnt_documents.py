"""What was learnt on disk: it comes back, whatever stops the writer; damage is left out and said; all may write."""

import fcntl
import stat
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.live import folder as folder_module
from sssd_plugin.datastore.live import log as log_module
from sssd_plugin.datastore.live.folder import LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.store import LiveStore, check_live
from sssd_plugin.datastore.records import Changes, Erasure, Record
from tests.support.disks import full_disk
from tests.support.stores import number_in, read_only_folder, refused

VOCAB = 1000


def log_of(directory: Path, **settings) -> Log:
    return Log.open(directory, LiveManifest(**({"vocab_size": VOCAB, "isolation": "strict"} | settings)), 1 << 20)


def record(text: list[int], tenant: int = 0, milliseconds: int = 1) -> Record:
    return Record(tenant, milliseconds, np.array(text, np.int32))


def write(directory: Path, texts: list[list[int]], **settings) -> None:
    log = log_of(directory, **settings)
    sync(log, *map(record, texts))
    log.close()


def read(directory: Path, **settings) -> list[list[int]]:
    log = log_of(directory, **settings)
    records = log.load()
    log.close()
    return [record.tokens.tolist() for record in records]


def sync(log: Log, *records: Record) -> Changes:
    changes = Changes()
    for one in records:
        log.pending.append(one)
    log.sync(changes)
    return changes


def file_of(directory: Path) -> Path:
    return directory / "live" / "learnt.sqlite"


def check(directory: Path, **settings) -> None:
    check_live(directory, **({"vocab_size": VOCAB, "fingerprint": None, "isolation": "strict"} | settings))


def no_start(directory: Path, words: str, **settings) -> None:
    """Refused by the start and by what looks beforehand, in one line."""
    for attempt in (log_of, check):
        with refused(words):
            attempt(directory, **settings)


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    sync(log, record([1, 2]))
    for path in (tmp_path / "live").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "live").stat().st_mode) == 0o700
    log.close()


def test_random_damage_is_never_taken_for_text(tmp_path: Path) -> None:
    texts = [[i, *[(7 * i) % 900] * (i % 90)] for i in range(200)]
    write(tmp_path, texts)
    path = file_of(tmp_path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(60):
        content = bytearray(whole)
        for at in rng.integers(0, len(content), int(rng.integers(1, 20))).tolist():
            content[at] ^= int(rng.integers(1, 256))
        path.write_bytes(content)
        try:
            found = read(tmp_path)
        except DatastoreError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            continue
        assert all(text in texts for text in found)
        kept.append(len(found))
    assert len(kept) > 40 and np.mean(kept) > 150


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"{", "not JSON"),
        (b'{"format": "other"}', "does not describe"),
        (b'{"format": "freedraft-live", "format_version": 2}', "newer"),
        (b'{"format": "freedraft-live", "format_version": 1}', "checksum"),
        (None, "is missing though learnt.sqlite is there"),
    ],
)
def test_a_bad_manifest_stops_the_start_and_loses_nothing(tmp_path: Path, change: bytes | None, words: str) -> None:
    write(tmp_path, [[1, 2]])
    content = file_of(tmp_path).read_bytes()
    manifest = tmp_path / "live" / "manifest.json"
    manifest.unlink()
    if change is not None:
        manifest.write_bytes(change)
    no_start(tmp_path, f"manifest.json.*{words}")
    assert file_of(tmp_path).read_bytes() == content


def test_what_is_something_else_stops_the_start(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2]])
    file_of(tmp_path).write_bytes(b"something else entirely " * 100)
    with refused("not a database; restore it, or remove it to start anew"):
        log_of(tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    no_start(file, str(file))
    assert file.read_text() == "x"


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    check(tmp_path)
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    log_of(tmp_path, fingerprint="a" * 64).close()
    for settings in ({"fingerprint": "b" * 64}, {"vocab_size": VOCAB - 1}):
        no_start(tmp_path, "another model's tokenizer", **settings)
    log_of(tmp_path, fingerprint="a" * 64).close()


def test_a_wider_isolation_is_refused(tmp_path: Path) -> None:
    log_of(tmp_path, isolation="shared").close()
    log_of(tmp_path, isolation="strict").close()  # from now on there may be text of one tenant only
    no_start(tmp_path, "'shared' would show it to everybody: .* shared --accept", isolation="shared")
    log_of(tmp_path).close()


def test_a_narrower_isolation_waits_until_a_wider_server_has_ended(tmp_path: Path) -> None:
    """Which would follow what is learnt of one tenant, and draft from it for everybody."""
    wide = log_of(tmp_path, isolation="shared")
    no_start(tmp_path, "a server with isolation 'shared' learns in .*: stop it first", isolation="strict")
    wide.close()
    log_of(tmp_path, isolation="strict").close()


def test_no_two_hosts_learn_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = log_of(tmp_path)
    monkeypatch.setattr(folder_module, "_host", lambda: b"1234 elsewhere")
    no_start(tmp_path, "choose a datastore of this host's own")
    here.close()
    there = log_of(tmp_path)
    monkeypatch.undo()
    with refused("a process on elsewhere learns in"):
        log_of(tmp_path)
    there.close()
    log_of(tmp_path).close()


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files cannot be locked or written; a full disk is not taken for one without locks."""

    def flock(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / "live").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        no_start(tmp_path, r"file system without locks .* choose a datastore on another disk")
    with full_disk(), refused("^(?!.*locks).*File too large"):
        log_of(tmp_path)
    log_of(tmp_path).close()
    with read_only_folder() as folder:
        no_start(folder, "cannot write .* give this user access")


def test_a_full_disk_stops_nothing_and_writing_is_tried_again(tmp_path: Path, caplog) -> None:
    """sqlite3 may not make the file larger; documents of a page each."""
    store = LiveStore(VOCAB, tmp_path, isolation="shared")
    store.insert(np.array([1, 2], np.int32))
    store.flush()
    database = store._log.file.db
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(3, 6):
        assert store.insert(np.full(2000, number, np.int32)), "serving goes on"
        store.flush()
    said = [r.message for r in caplog.records if "database or disk is full; free some space" in r.message]
    assert len(said) == 1
    database.execute("PRAGMA max_page_count = 1000000")
    store.flush()
    assert any("works again" in record.message for record in caplog.records)
    store.close()
    assert read(tmp_path, isolation="shared") == [[1, 2], *([n] * 2000 for n in (3, 4, 5))]


def test_an_erasure_is_followed_though_nothing_can_be_written(tmp_path: Path) -> None:
    log, other, erasure = log_of(tmp_path), log_of(tmp_path), Erasure(5)
    sync(log), sync(other)
    pages = log.file.db.execute("PRAGMA page_count").fetchone()[0]
    log.file.db.execute(f"PRAGMA max_page_count = {pages}")
    log.pending.append(record([1] * 9000))
    other.erase(erasure)
    changes = Changes()
    with refused("full"):
        log.sync(changes)
    assert changes.erasures == [erasure] and log.pending.take()
    log.close(), other.close()


def test_an_expiry_that_ended_long_ago_erases_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path)
    sync(log, record([1, 2], milliseconds=1))
    log.expire(10)
    sync(log)
    monkeypatch.setattr(log_module, "ANNOUNCED_SECONDS", -1.0)
    log._end_at = 0.0  # more than a minute later, in which nothing was learnt
    sync(log)
    assert sync(log, record([3, 4], milliseconds=20)).erasures == []
    log.close()
    assert read(tmp_path) == [[3, 4]]


def test_nothing_is_logged_of_texts_or_tenants(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    store = LiveStore(VOCAB, tmp_path)
    store.insert(np.array([777, 778, 779], np.int32), number_in(store, "secret name"))
    store.close()
    LiveStore(VOCAB, tmp_path).close()
    assert not any("777" in record.getMessage() or "secret" in record.getMessage() for record in caplog.records)
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "live").iterdir())
