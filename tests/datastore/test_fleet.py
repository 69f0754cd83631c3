"""What replicas learn from each other through a bucket: in a folder, in fsspec's memory, and on an S3 server."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from typer.testing import CliRunner

from bench.lib.servers import free_port
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.build.sorting import Sorter
from sssd_plugin.datastore.cli import app
from sssd_plugin.datastore.disk import bucket as buckets
from sssd_plugin.datastore.disk.bucket import Bucket
from sssd_plugin.datastore.disk.checksum import write_array
from sssd_plugin.datastore.disk.sections import learnt_sub_indices
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.fleet import compaction, maintenance, replica
from sssd_plugin.datastore.fleet.batch import seal, unseal
from sssd_plugin.datastore.index.search import find_ngram
from sssd_plugin.datastore.live.clock import SteadyClock
from sssd_plugin.datastore.live.store import LiveDatastore, check_live, open_live
from sssd_plugin.datastore.live.tenants import tenant_digest
from sssd_plugin.datastore.records import Changes, Erasure, Record
from tests.support.stores import build_store, documents_of
from tests.support.waiting import wait_until

VOCAB = 1000
MEMORY = 4 << 30
A, B = str(tenant_key("a")), str(tenant_key("b"))
SECRET = [701, 702, 703, 704, 705, 706]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server on this machine that speaks S3, in a process of its own: Flask's globals cannot be looked at from
    outside a request, which engines do with all modules that are there."""
    pytest.importorskip("s3fs")
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "the server does not start"
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREEDRAFT_CACHE", str(tmp_path / "cache"))
    for name in ("PUBLISH_SECONDS", "POLL_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(replica, name, 0.05)


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "s3":
        return f"{request.param}://{tmp_path}/bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    name = f"b-{abs(hash(tmp_path))}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}/fleet"


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def servers(url: str) -> Iterator[tuple[LiveDatastore, LiveDatastore]]:
    both = open_live(url, VOCAB), open_live(url, VOCAB)
    wait_until(lambda: all(reached(server) for server in both))
    yield both
    for server in both:
        server.close()


def reached(server: LiveDatastore) -> bool:
    return server._key is not None


def compact(url: str, **settings: object) -> compaction.Compacted | None:
    return compaction.compact(Bucket(url), Sorter(), memory=MEMORY, **settings)  # type: ignore[arg-type]


def learn(server: LiveDatastore, name: str | None, text: list[int]) -> None:
    wait_until(lambda: server.insert(np.array(text, np.int32), server.tenant(name)))


def count(server: LiveDatastore, name: str | None, text: list[int]) -> int:
    """How often a request of a tenant finds a text."""
    view, _ = server.view(np.array([server.tenant(name)]))
    query = np.array(text, np.int32)
    ranges = [find_ngram(view.table, row, query, 0, len(query)) for row in range(len(view.table))]
    return sum(high - low for low, high in ranges)


def pending(url: str) -> int:
    return len(Bucket(url).batches())


def contents(url: str) -> bytes:
    """Every byte in the bucket."""
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return b"".join(files.cat_file(path) for path in files.find(root))


def test_what_one_learns_the_other_drafts_from(url: str, servers: tuple[LiveDatastore, LiveDatastore]) -> None:
    one, other = servers
    learn(one, A, SECRET)
    learn(other, B, [1, 2, 3, 4])
    assert (count(one, A, SECRET), count(other, A, SECRET)) == (1, 0)
    wait_until(lambda: pending(url) == 2)
    assert (done := compact(url)) is not None and (done.documents, done.sub_indices) == (2, 1)
    wait_until(lambda: count(other, A, SECRET) == 1 and count(one, B, [1, 2, 3, 4]) == 1)
    wait_until(lambda: one.stats().tokens == 0)  # what is in the bucket is not held twice
    assert count(one, A, SECRET) == 1
    for server in servers:
        assert count(server, B, SECRET) == count(server, None, SECRET) == 0, "tenants are kept apart"
        assert count(server, str(tenant_key("new")), SECRET) == 0
    assert pending(url) == 0 and compact(url) is None


def test_what_is_forgotten_is_gone_everywhere(
    url: str, servers: tuple[LiveDatastore, LiveDatastore], tmp_path: Path
) -> None:
    one, other = servers
    learn(one, A, SECRET)
    learn(one, B, [1, 2, 3, 4])
    wait_until(lambda: pending(url) == 1)
    late = Bucket(url).read(next(iter(Bucket(url).batches())))
    compact(url)
    wait_until(lambda: count(other, A, SECRET) == 1)
    other._clock = SteadyClock(lambda: time.time() + 0.05)  # clocks of hosts differ
    learn(other, A, [*SECRET, 9])  # and one in a batch, or on its way into one
    erased = []
    one.on_erased = lambda: erased.append(1)
    maintenance.forget(url, [A], None, MEMORY)
    marker = np.array(SECRET, "<i4").tobytes()

    def gone() -> bool:
        compact(url)  # it leaves out what a server that was slow to look has published meanwhile
        return marker not in contents(url)

    wait_until(gone)
    wait_until(lambda: count(one, A, SECRET) == count(other, A, SECRET) == 0)
    wait_until(lambda: bool(erased))
    assert count(other, B, [1, 2, 3, 4]) == 1
    Bucket(url).write("batches/replica-that-was-away-00000000", late)  # it comes back, and what it has is old
    compact(url)
    time.sleep(0.3)
    assert count(one, A, SECRET) == count(other, A, SECRET) == 0 and marker not in contents(url)
    copies = files_below(tmp_path / "cache")
    assert copies and not any(marker in content for content in copies)
    learn(one, A, [*SECRET, 5])  # later: this one was not erased
    wait_until(lambda: pending(url) > 0)
    compact(url)
    wait_until(lambda: count(other, A, [*SECRET, 5]) == 1)


def files_below(folder: Path) -> list[bytes]:
    """Their contents; replicas remove some meanwhile."""
    contents = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                contents.append(Path(parent, name).read_bytes())
    return contents


def test_only_one_can_make_a_generation(url: str) -> None:
    first = Bucket(url)
    manifest = compaction.start(VOCAB, None, "shared", None)
    others = [compaction.start(VOCAB, None, "shared", None) for _ in range(8)]
    done: list[bool] = []
    threads = [threading.Thread(target=lambda m=m: done.append(Bucket(url).publish(m, 1))) for m in (manifest, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 1
    newest = first.newest()
    assert newest is not None and newest.number == 1
    assert not first.publish(compaction.start(VOCAB, None, "off", None), 1)
    assert first.newest() == newest


def test_two_compactions_at_once_lose_nothing(url: str) -> None:
    with_documents(url, [[i, i + 1, i + 2] for i in range(40)])
    failed: list[DatastoreError] = []

    def one() -> None:
        try:
            compact(url)
        except DatastoreError as error:
            failed.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    compact(url)
    assert sorted(text for text, _ in documents_at(url)) == [[i, i + 1, i + 2] for i in range(40)]


def test_who_compacts_next_keeps_what_it_has_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the one before is still removing what its generation does not need."""
    with_documents(url, [[i, i + 1, i + 2] for i in range(8)])
    publish, further = Bucket.publish, [[i, i + 1, i + 2] for i in range(100, 104)]

    def and_another(bucket: Bucket, *arguments: Any) -> bool:
        made = publish(bucket, *arguments)
        if made:
            monkeypatch.setattr(Bucket, "publish", publish)
            with_documents(url, further)
            compact(url)
        return made

    monkeypatch.setattr(Bucket, "publish", and_another)
    compact(url)
    shutil.rmtree(buckets.cache_folder(), ignore_errors=True)  # what another host would read
    assert sorted(text for text, _ in documents_at(url)) == [[i, i + 1, i + 2] for i in (*range(8), *range(100, 104))]


def test_two_send_the_same_at_once(folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, folder, copy = Bucket(folder_url), tmp_path / ("0" * 32), shutil.copyfile
    folder.mkdir()
    (folder / "tokens.npy").write_bytes(b"content")

    def and_another(*arguments: Any) -> Any:
        done = copy(*arguments)
        monkeypatch.setattr(shutil, "copyfile", copy)
        bucket.upload(folder)
        return done

    monkeypatch.setattr(shutil, "copyfile", and_another)
    bucket.upload(folder)
    there = Path(folder_url[7:]) / folder.name
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {"tokens.npy": b"content"}


def with_documents(url: str, texts: list[list[int]], tenants: list[str] | None = None, at: int = 10_000) -> bytes:
    """Start a fleet and publish batches of one document each; returns the key of its digests."""
    bucket = Bucket(url)
    if bucket.newest() is None:
        bucket.publish(compaction.start(VOCAB, None, "tenant" if tenants else "shared", None), 1)
    key = bytes.fromhex(compaction.newest(bucket)[3].key)
    for number, text in enumerate(texts):
        digest = tenant_digest(key, tenants[number]) if tenants else b""
        record = Record(digest, at + number, np.array(text, np.int32))
        bucket.write(f"batches/r{time.monotonic_ns()}-{number:08d}", seal([record], at + number + 1))
    return key


def documents_at(url: str) -> list[tuple[list[int], bytes]]:
    bucket = Bucket(url)
    _, path, manifest, _ = compaction.newest(bucket)
    subs = learnt_sub_indices(path, manifest)
    return [(record.tokens.tolist(), record.tenant) for sub in subs for record in sub.records()]


def test_no_batch_is_read_in_part(folder_url: str) -> None:
    """Where a compaction looks while replicas publish into a folder, and one of them was killed at it."""
    bucket = Bucket(folder_url)
    with_documents(folder_url, [[1, 2, 3]])
    part = Path(folder_url[7:]) / "batches" / ".r-00000000.17.new"
    part.write_bytes(np.array(SECRET, "<i4").tobytes())
    sealed = seal([Record(b"", 5, np.zeros(1 << 20, np.int32))], 6)
    read: list[bytes] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            read.extend(Bucket(folder_url).read(name) for name in bucket.batches() if "large" in name)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(20):
        bucket.write("batches/large-00000000", sealed)
    wait_until(lambda: len(read) > 5)
    stop.set()
    thread.join()
    assert all(content == sealed for content in read)
    assert compact(folder_url) is not None and not part.exists()
    assert sorted(len(text) for text, _ in documents_at(folder_url)) == [3, 1 << 20]


def test_merging_keeps_every_text_once(folder_url: str) -> None:
    """Over many compactions: small sub-indices are merged into larger ones."""
    rng = np.random.default_rng(0)
    texts: list[list[int]] = []
    most = 0
    for _ in range(30):
        new = [rng.integers(0, VOCAB, rng.integers(3, 60)).tolist() for _ in range(5)]
        with_documents(folder_url, [*new, texts[0] if texts else new[0]])
        texts += new
        done = compact(folder_url)
        assert done is not None
        most = max(most, done.sub_indices)
    assert most <= compaction.MAX_LEARNT + 1
    found = [text for text, _ in documents_at(folder_url)]
    assert sorted(map(str, found)).count(str(texts[0])) <= done.sub_indices
    assert {str(text) for text in found} == {str(text) for text in texts}
    with_documents(folder_url, [texts[3]])
    names = {path.name for path in Path(folder_url[7:]).iterdir()}
    assert len([name for name in names if name.startswith("manifest")]) == 1, "old ones are removed"


def test_a_thousand_tenants_in_one_sub_index(folder_url: str) -> None:
    rng = np.random.default_rng(0)
    names = [str(tenant_key(f"tenant {i}")) for i in range(1000)]
    bucket = Bucket(folder_url)
    bucket.publish(compaction.start(VOCAB, None, "tenant", None), 1)
    key = bytes.fromhex(compaction.newest(bucket)[3].key)
    texts = [rng.integers(0, VOCAB, 40).astype(np.int32) for _ in names]
    bucket.write(
        "batches/r-0", seal([Record(tenant_digest(key, n), 5, t) for n, t in zip(names, texts, strict=True)], 9)
    )
    assert compact(folder_url) is not None
    server = open_live(folder_url, VOCAB)
    wait_until(lambda: count(server, names[0], texts[0].tolist()) == 1)
    for i in range(0, 1000, 7):
        assert count(server, names[i], texts[i].tolist()) == 1
        assert count(server, names[i], texts[i - 1].tolist()) == 0
    server.close()


def test_what_is_too_old_or_too_much_is_left_out(folder_url: str) -> None:
    now = time.time_ns() // 1_000_000
    with_documents(folder_url, [[1, 2, 3]], at=now - 7_200_000)
    with_documents(folder_url, [[4, 5, 6]], at=now)
    compact(folder_url)
    assert len(documents_at(folder_url)) == 2
    compact(folder_url, max_age=3600)
    assert [text for text, _ in documents_at(folder_url)] == [[4, 5, 6]]
    with_documents(folder_url, [[7] * 50] * 9 + [[8] * 40 for _ in range(1)], at=now)
    compact(folder_url, max_tokens=100)
    assert sum(len(text) + 1 for text, _ in documents_at(folder_url)) <= 100


def test_tenants_share_the_room(folder_url: str) -> None:
    small = with_documents(folder_url, [[1, 2, 3]], [A])
    with_documents(folder_url, [[i] * 60 for i in range(20)], [B] * 20, at=20_000)
    compact(folder_url, max_tokens=400)
    kept = documents_at(folder_url)
    assert ([1, 2, 3], tenant_digest(small, A)) in kept and 3 <= len(kept) <= 7
    assert kept[-1][0] == [19] * 60 or kept[0][0] == [19] * 60 or [19] * 60 in [text for text, _ in kept]


def test_a_bucket_that_is_down_stops_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = open_live(url, VOCAB)
    wait_until(lambda: reached(one))

    def down(*args: object, **kwargs: object) -> object:
        raise ConnectionError("the bucket is down")

    files = type(fsspec.core.url_to_fs(url)[0])
    with monkeypatch.context() as broken:
        for name in ("_call_s3",) if url.startswith("s3") else ("ls", "cat_file", "pipe_file"):
            broken.setattr(files, name, down)
        time.sleep(0.3)
        check_live(url, VOCAB, None, "tenant")
        other = open_live(url, VOCAB)  # this host knows the key
        for server, text in ((one, SECRET), (other, [1, 2, 3])):
            learn(server, A, text)
            assert count(server, A, text) == 1
    wait_until(lambda: pending(url) == 2)
    assert [r for r in caplog.messages if "the bucket is down" in r and "\n" not in r]
    compact(url)
    wait_until(lambda: count(other, A, SECRET) == 1 and count(one, A, [1, 2, 3]) == 1)
    one.close()
    other.close()


def test_a_bucket_that_may_not_be_listed(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was built is found without; what is learnt is not."""
    build_store(tmp_path / "bucket", [[1, 2, 3]], VOCAB)

    def denied(self: Bucket, path: str) -> list[str]:
        raise buckets.UnreachableError("not allowed")

    original, read = Bucket.read, list[str]()
    monkeypatch.setattr(Bucket, "_list", denied)
    monkeypatch.setattr(Bucket, "read", lambda self, name: (read.append(name), original(self, name))[1])
    check_live(folder_url, VOCAB, None, "tenant")  # it may be down, which is no reason not to start
    log = replica.FleetLog(Bucket(folder_url), VOCAB, None, "tenant")
    for _ in range(2):
        assert log.sync() == Changes([], [])
    assert len(read) < 40
    said = [line for line in caplog.messages if "s3:ListBucket" in line]
    assert len(said) == 2 and "the server starts" in said[0] and "it is tried again" in said[1]


def test_an_answer_that_is_lost_loses_no_text(folder_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch arrives, is compacted, and the server that was not told so publishes it again, with more."""
    server = open_live(folder_url, VOCAB)
    wait_until(lambda: reached(server))
    original, failures = Bucket.write, []

    def lost(self: Bucket, name: str, data: bytes) -> None:
        original(self, name, data)
        if name.startswith("batches") and not failures:
            compact(folder_url)
            failures.append(name)
            raise buckets.UnreachableError("the answer is lost")

    monkeypatch.setattr(Bucket, "write", lost)
    learn(server, A, [1, 2, 3])
    wait_until(lambda: bool(failures))
    learn(server, A, [4, 5, 6])
    wait_until(lambda: pending(folder_url) > 0)
    wait_until(lambda: compact(folder_url) is None)
    assert sorted(text for text, _ in documents_at(folder_url)) == [[1, 2, 3], [4, 5, 6]]
    server.close()


def test_a_start_without_the_bucket_and_without_a_copy(folder_url: str, tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("no folder")
    check_live(folder_url, VOCAB, None, "tenant")
    server = open_live(folder_url, VOCAB)
    time.sleep(0.2)
    assert not server.insert(np.array([1, 2, 3], np.int32), server.tenant(A))
    assert server.stats().dropped["bucket"] == 1
    (tmp_path / "bucket").unlink()
    wait_until(lambda: reached(server))
    learn(server, A, [1, 2, 3])
    server.close()


def test_a_fleet_of_another_kind_is_refused(folder_url: str) -> None:
    with_documents(folder_url, [[1, 2, 900]], [A])
    compact(folder_url)
    check_live(folder_url, VOCAB, "a" * 64, "tenant")
    with pytest.raises(DatastoreError, match="learns with isolation 'tenant', not 'shared'"):
        check_live(folder_url, VOCAB, None, "shared")
    with pytest.raises(DatastoreError, match="token ids up to 900, the model's vocabulary has only 800"):
        check_live(folder_url, 800, None, "tenant")


def test_what_is_damaged_is_not_drafted_from(folder_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_documents(folder_url, [SECRET], [A])
    damaged = bytearray(seal([Record(b"", 5, np.arange(9, dtype=np.int32))], 9))
    damaged[-3] ^= 1
    Bucket(folder_url).write("batches/bad-0", bytes(damaged))
    compact(folder_url)
    assert "a batch is damaged" in caplog.text and len(documents_at(folder_url)) == 1
    shutil.rmtree(tmp_path / "cache")
    (path,) = (tmp_path / "bucket").glob("*/tokens.i32")
    content = bytearray(path.read_bytes())
    content[2] ^= 1
    path.write_bytes(content)
    server = open_live(folder_url, VOCAB)
    time.sleep(0.3)
    assert count(server, A, SECRET) == 0 and "is corrupted: checksum" in caplog.text
    server.close()


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_batch_with_ids_that_are_none(wrong: int) -> None:
    with pytest.raises(DatastoreError, match="beyond the vocabulary"):
        unseal(seal([Record(b"", 5, np.array([1, wrong], np.int32))], 9), VOCAB)


def test_a_host_fetches_once(folder_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_documents(folder_url, [[1, 2, 3]], [A])
    compact(folder_url)
    fetched: list[str] = []
    files = type(fsspec.core.url_to_fs(folder_url)[0])
    original = files.get_file
    monkeypatch.setattr(files, "get_file", lambda self, *a, **k: (fetched.append(a[0]), original(self, *a, **k))[1])
    with_documents(folder_url, [list(range(500))], [B])
    compact(folder_url)
    fetched.clear()
    shutil.rmtree(buckets.cache_folder())
    newest = Bucket(folder_url).newest()
    assert newest is not None
    threads = [threading.Thread(target=lambda: Bucket(folder_url).fetch(newest)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == len(set(fetched)) > 0


def test_a_copy_whose_removal_was_killed_is_whole_or_gone(folder_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generations = []
    for text in ([1, 2, 3], [4, 5, 6]):
        with_documents(folder_url, [text], [A])
        compact(folder_url)
        generations.append(Bucket(folder_url).newest())
    first, second = generations
    assert first is not None and second is not None
    path = Bucket(folder_url).fetch(first)

    def killed(folder: Path, **how: bool) -> None:
        if folder.is_dir() and (links := [part for part in folder.iterdir() if part.is_symlink()]):
            links[0].unlink()
            raise SystemExit

    with monkeypatch.context() as broken, pytest.raises(SystemExit):
        broken.setattr(buckets.shutil, "rmtree", killed)
        Bucket(folder_url).fetch(second)
    assert Bucket(folder_url).fetch(first) == path
    Datastore.open(path).close()


def test_a_start_beside_a_neighbour_that_fetches(folder_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes what this server has just fetched, since there is a newer generation."""
    with_documents(folder_url, [[1, 2, 3]], [A])
    compact(folder_url)
    fetch, removed = Bucket.fetch_newest, []

    def fetch_newest(bucket: Bucket) -> tuple[buckets.Generation, Path] | None:
        found = fetch(bucket)
        if found and not removed:
            removed.append(found[1])
            shutil.rmtree(found[1])
        return found

    monkeypatch.setattr(Bucket, "fetch_newest", fetch_newest)
    check_live(folder_url, VOCAB, None, "tenant")
    assert removed and removed[0].exists()


def test_a_start_with_a_damaged_copy(folder_url: str) -> None:
    with_documents(folder_url, [[1, 2, 3]], [A])
    compact(folder_url)
    newest = Bucket(folder_url).newest()
    assert newest is not None
    (Bucket(folder_url).fetch(newest) / "manifest.json").write_bytes(b"")
    server = open_live(folder_url, VOCAB)
    wait_until(lambda: reached(server) and count(server, A, [1, 2, 3]) == 1)
    server.close()


def test_a_store_that_was_built_is_part_of_the_fleet(folder_url: str, tmp_path: Path) -> None:
    build_store(tmp_path / "bucket", [[5, 6, 7]], VOCAB)
    server = open_live(folder_url, VOCAB)
    wait_until(lambda: count(server, None, [5, 6, 7]) == 1)
    learn(server, A, SECRET)
    wait_until(lambda: pending(folder_url) == 1)
    compact(folder_url)
    wait_until(lambda: server.stats().tokens == 0)
    assert count(server, A, SECRET) == count(server, A, [5, 6, 7]) == 1
    assert count(server, None, SECRET) == 0
    server.close()
    assert CliRunner().invoke(app, ["verify", folder_url]).exit_code == 0
    assert "2 sub-indices" in CliRunner().invoke(app, ["info", folder_url]).output


def test_a_full_disk_is_one_line(folder_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_documents(folder_url, [[1, 2, 3]], [A])
    compact(folder_url)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(fsspec.core.url_to_fs(folder_url)[0]), "get_file", full)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DatastoreError, match=r"no space left for .* set FREEDRAFT_CACHE"):
        compaction.newest(Bucket(folder_url))


def test_a_store_where_nothing_can_be_listed(folder_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a web server."""
    build_store(tmp_path / "bucket", [[5, 6, 7]], VOCAB)

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "forbidden")

    monkeypatch.setattr(type(fsspec.core.url_to_fs(folder_url)[0]), "ls", refused)
    with Datastore.open(buckets.local_copy(folder_url)) as store:
        assert store.n_tokens == 3


def test_what_was_learnt_becomes_a_store(folder_url: str, tmp_path: Path) -> None:
    run = CliRunner().invoke
    with_documents(folder_url, [[1, 2, 3], [4, 5]], [A, B])
    assert "2 new documents" in run(app, ["compact", folder_url]).output
    out, salts = str(tmp_path / "out.npy"), tmp_path / "salts"
    refused = run(app, ["export", folder_url, out])
    assert refused.exit_code == 1 and "say --accept" in refused.stderr
    salts.write_text("a\n")
    assert run(app, ["export", folder_url, out, "--tenants", str(salts)]).exit_code == 0
    assert np.load(out).tolist() == [1, 2, 3, -1]
    local = open_live(tmp_path / "local", VOCAB, isolation="shared")
    learn(local, None, [8, 9])
    local.close()
    assert run(app, ["export", str(tmp_path / "local"), str(tmp_path / "more.npy")]).exit_code == 0
    args = ["build", str(tmp_path / "store"), out, str(tmp_path / "more.npy"), "--vocab-size", str(VOCAB), "--quiet"]
    assert run(app, args).exit_code == 0
    with Datastore.open(tmp_path / "store") as store:
        assert documents_of(store.snapshot.sub_indices[0]) == [[1, 2, 3], [8, 9]]
    forgotten = run(app, ["forget", folder_url, "--tenants", "-"], input="a\n")
    assert forgotten.exit_code == 0, forgotten.output
    assert [text for text, _ in documents_at(folder_url)] == [[4, 5]]
    missing = run(app, ["compact", f"file://{tmp_path}/nothing"])
    assert missing.exit_code == 1 and "no fleet learns at" in missing.stderr and missing.stderr.count("\n") == 1


def test_a_full_disk_keeps_what_is_learnt(
    folder_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the host whose folder it is, and of the one that compacts, whose job goes on."""
    server = open_live(folder_url, VOCAB)
    wait_until(lambda: reached(server))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_file(path: Path, *args: object) -> None:
        with reporting("write", path):
            full()

    with monkeypatch.context() as disk:
        disk.setattr(buckets, "write_atomically", full)
        learn(server, A, [1, 2, 3])
        wait_until(lambda: f"no space left for {folder_url}" in caplog.text)
        assert count(server, A, [1, 2, 3]) == 1 and pending(folder_url) == 0
    wait_until(lambda: pending(folder_url) == 1)
    server.close()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        monkeypatch.setattr(compaction, "write_array", write_array)
        if len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(compaction, "write_array", full_file)
    monkeypatch.setattr("sssd_plugin.datastore.cli.time", SimpleNamespace(sleep=sleep))
    done = CliRunner().invoke(app, ["compact", folder_url, "--every", "7"])
    assert "No space left on device" in done.stderr and "it is tried again" in done.stderr, done.output
    assert "1 new documents" in done.stdout and waited == [7.0, 7.0]


def test_a_compaction_that_was_killed_leaves_what_there_was(folder_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its steps, in what others see."""
    with_documents(folder_url, [[1, 2, 3], [4, 5]], [A, B])
    compact(folder_url)
    for step in ("upload", "publish", "remove", "remove_generations"):
        with_documents(folder_url, [[len(step), 7, 8]], [A])
        with monkeypatch.context() as killed:
            killed.setattr(Bucket, step, lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                compact(folder_url)
        compact(folder_url)
        texts = [text for text, _ in documents_at(folder_url)]
        assert texts.count([len(step), 7, 8]) == 1 and [1, 2, 3] in texts and [4, 5] in texts
    compact(folder_url)
    names = {sub.name for sub in compaction.newest(Bucket(folder_url))[2].sub_indices}
    folders = {path.name for path in Path(folder_url[7:]).iterdir() if path.is_dir()} - {"batches"}
    assert folders == names and pending(folder_url) == 0


def test_erasures_end_with_the_age(folder_url: str) -> None:
    with_documents(folder_url, [[1, 2, 3]], [A])
    compaction.announce(Bucket(folder_url), [Erasure(None, 5)])
    with_documents(folder_url, [[1, 2, 4]], [A], at=time.time_ns() // 1_000_000)
    compact(folder_url, max_age=3600)
    assert compaction.newest(Bucket(folder_url))[3].erasures == ()


def test_a_servers_age_hides_and_erases_what_the_fleet_learnt(
    folder_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time_ns() // 1_000_000
    with_documents(folder_url, [SECRET, [1, 2, 3]], [A, B], at=now - 3_900_000)  # an hour, a step of it and a bit
    compact(folder_url)
    young, other = open_live(folder_url, VOCAB, max_age=3600.0), open_live(folder_url, VOCAB)
    wait_until(lambda: count(other, A, SECRET) == 1)
    wait_until(lambda: young.runs._fetched is not None)
    assert count(young, A, SECRET) == 0
    with monkeypatch.context() as down:
        down.setattr(Bucket, "publish", lambda *a: (_ for _ in ()).throw(buckets.UnreachableError("it is down")))
        young._expire_at = 0
        wait_until(lambda: "it is down; what is too old is not drafted from, and erased later" in caplog.text)
    assert count(young, A, SECRET) == 0 and count(other, A, SECRET) == 1
    learn(other, A, [7, 8, 9])
    wait_until(lambda: pending(folder_url) == 1)
    young._expire_at = 0
    wait_until(lambda: count(other, A, SECRET) == 0)
    compact(folder_url)
    assert [text for text, _ in documents_at(folder_url)] == [[7, 8, 9]]
    assert np.array(SECRET, "<i4").tobytes() not in contents(folder_url)
    for server in (young, other):
        wait_until(lambda server=server: count(server, A, [7, 8, 9]) == 1)
        server.close()


def test_a_host_whose_clock_is_ahead_erases_nothing_that_comes(folder_url: str) -> None:
    now = time.time_ns() // 1_000_000
    with_documents(folder_url, [[1, 2, 3]], [A], at=now)
    compact(folder_url)
    ahead = open_live(folder_url, VOCAB, max_age=3600.0)
    wait_until(lambda: ahead.runs._fetched is not None)
    ahead._clock = SteadyClock(lambda: time.time() + 1e9)
    ahead._expire_at = 0
    wait_until(lambda: bool(compaction.newest(Bucket(folder_url))[3].erasures))
    assert [e.before for e in compaction.newest(Bucket(folder_url))[3].erasures] == [now + 1]
    ahead.close()
    with_documents(folder_url, [[4, 5, 6]], [A], at=now + 1)
    compact(folder_url)
    assert [text for text, _ in documents_at(folder_url)] == [[4, 5, 6]]


def test_erasures_that_others_cover_are_not_kept(folder_url: str) -> None:
    with_documents(folder_url, [])
    bucket = Bucket(folder_url)
    a, b = bytes(15) + b"a", bytes(15) + b"b"
    compaction.announce(bucket, [Erasure(a, 5), Erasure(b, 50), Erasure(a, 20)])
    compaction.announce(bucket, [Erasure(None, 20)])
    compaction.announce(bucket, [Erasure(None, 10)])
    erasures = compaction.newest(bucket)[3].erasures
    assert {(e.tenant, e.before) for e in erasures} == {(None, 20), (b.hex(), 50)}


def test_of_many_sub_indices_the_newest_and_the_largest_are_searched(
    folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "FACTOR", 0)
    monkeypatch.setattr(compaction, "MAX_LEARNT", 99)
    lengths = [30, 90, 10, 80, 20, 70, 40, 6, 5, 4]
    texts = [[100 + number] * length for number, length in enumerate(lengths)]
    for number, text in enumerate(texts):
        with_documents(folder_url, [text], [A], at=10_000 + number)
        compact(folder_url)
    with_documents(folder_url, [[99]], [A], at=1)
    warned = CliRunner().invoke(app, ["compact", folder_url])
    assert "at most 6 of 11 sub-indices are searched" in warned.stderr and warned.exit_code == 0
    server = open_live(folder_url, VOCAB)
    wait_until(lambda: server.runs._fetched is not None)
    seen = [number for number, text in enumerate(texts) if count(server, A, text)]
    assert seen == [1, 3, 5, 7, 8, 9]
    server.close()


TAMPER = """
import json, shutil, sys
import numpy as np
from pathlib import Path
from sssd_plugin.datastore.disk.checksum import write_array
from sssd_plugin.datastore.disk.format import file_name, read_manifest
from sssd_plugin.datastore.disk.manifest import checksum
from sssd_plugin.datastore.disk.sections import learnt_sub_indices
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.fleet.replica import Fetched
from sssd_plugin.datastore.live.clock import SteadyClock
from sssd_plugin.datastore.live.store import LiveDatastore
from sssd_plugin.drafter import Drafter

whole, work, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
ended = {"refused": 0, "harmless": 0}
drafters = {}
for kind in ("tenant", "shared"):
    live = LiveDatastore(1000, isolation=kind)
    drafters[kind] = live, Drafter(vocab_size=1000, max_nodes=16, live=live)
for seed in range(30):
    rng = np.random.default_rng(seed)
    shutil.rmtree(work, ignore_errors=True)
    store = shutil.copytree(whole, work)
    content = json.loads((store / "manifest.json").read_bytes())
    sub = content["sub_indices"][0]
    role = rng.choice(list(sub["files"]))
    path = store / sub["name"] / file_name(role)
    array = np.fromfile(path, np.int32)
    places = rng.integers(0, len(array), rng.integers(1, 9))
    array[places] = rng.choice([-2**31, -2, -1, 0, 1, 7, 999, 1000, 70_000, 2**31 - 1], len(places))
    path.unlink()
    sub["files"][role] = write_array(path, array).model_dump(mode="json")
    content.pop("checksum")
    (store / "manifest.json").write_text(json.dumps(content | {"checksum": checksum(content)}))
    try:
        opened = Datastore.open(store, vocab_size=1000)
        fetched = Fetched(opened.snapshot, learnt_sub_indices(store, opened.manifest), 0)
    except DatastoreError:
        ended["refused"] += 1
        continue
    live, drafter = drafters[opened.manifest.learnt.isolation]
    live._own_key = bytes.fromhex(opened.manifest.learnt.key)
    live.runs.use_fetched(fetched)
    for name in names:
        for start in range(0, 900, 60):
            drafter.set_tenant("r", live.tenant(name))
            drafter.replace("r", np.arange(start, start + 20, dtype=np.int32))
            draft = drafter.draft(["r"], max_nodes=16, shape="tree")
            tokens = draft.tokens[0, : draft.counts[0]]
            assert (tokens >= 0).all() and (tokens < 1000).all(), seed
    ended["harmless"] += 1
print(json.dumps(ended))
"""


@pytest.mark.parametrize("isolated", [True, False])
def test_sub_indices_that_somebody_tampered_with(folder_url: str, tmp_path: Path, isolated: bool) -> None:
    """Checksums included: each is refused, or drafts harmlessly."""
    rng = np.random.default_rng(0)
    texts = [np.sort(rng.integers(0, VOCAB, 80)).tolist() for _ in range(40)]
    with_documents(folder_url, texts, [A, B] * 20 if isolated else None)
    compact(folder_url)
    path = compaction.newest(Bucket(folder_url))[1]
    shutil.copytree(path, tmp_path / "whole")
    command = [sys.executable, "-c", TAMPER, str(tmp_path / "whole"), str(tmp_path / "work"), A, B]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    ended = json.loads(done.stdout)
    assert ended["refused"] > 4 and ended["harmless"] > 1 and sum(ended.values()) == 30
