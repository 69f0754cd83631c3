"""What servers at one URL learn from each other: in a folder, and on an S3 server what drivers do by themselves."""

import hashlib
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pytest

from bench.lib.servers import free_port
from freedraft.tenants import tenant_key, tenant_number
from sssd_plugin.datastore.disk.remote import UnreachableError, UrlFolder
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.search import find_ngram
from sssd_plugin.datastore.live import exchange, maintenance
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.exchange import Batch, Exchange, seal, unseal
from sssd_plugin.datastore.live.folder import LiveManifest
from sssd_plugin.datastore.live.store import LiveStore, check_live
from sssd_plugin.datastore.records import Changes, Erasure, Record, now_ms
from tests.support.stores import build_store, documents_at, number_in, one_line, refused, run
from tests.support.waiting import wait_until

VOCAB = 1000
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
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        assert process.poll() is None, "the server does not start"
        return False

    wait_until(answers, 60)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREEDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(live_store, "SYNC_SECONDS", 0.02)
    monkeypatch.setattr(exchange, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(live_store, "RETRY_SECONDS", 0.05)


S3 = pytest.param("s3", marks=pytest.mark.extended)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if getattr(request, "param", "file") == "file":
        return f"file://{tmp_path}/bucket"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    name = f"b-{abs(hash(tmp_path))}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}/servers"


def started(url: str, **settings: object) -> LiveStore:
    server = LiveStore(VOCAB, url, **settings)  # type: ignore[arg-type]
    wait_until(lambda: server.key is not None)
    return server


def learn(server: LiveStore, name: str | None, text: list[int]) -> None:
    wait_until(lambda: server.insert(np.array(text, np.int32), number_in(server, name)))


def count(server: LiveStore, name: str | None, text: list[int]) -> int:
    """How often a request of a tenant finds a text."""
    view = server.runs.view_of(number_in(server, name))
    query = np.array(text, np.int32)
    ranges = [find_ngram(view.table, row, query, 0, len(query)) for row in range(len(view.table))]
    return sum(high - low for low, high in ranges)


def contents(url: str) -> dict[str, bytes]:
    """Every file at the URL, by name."""
    files, root = fsspec.core.url_to_fs(f"{url}/learnt")
    files.invalidate_cache()
    found = {}
    for path in files.find(root):
        with suppress(FileNotFoundError):  # a server has written it anew
            found[path.rpartition("/")[2]] = files.cat_file(path)
    return found


def holds(url: str, text: list[int]) -> bool:
    return any(np.array(text, "<i4").tobytes() in content for content in contents(url).values())


def new(url: str, max_age: float | None = None, **settings: object) -> Exchange:
    """A server's end of the URL, without the server."""
    settings = {"vocab_size": VOCAB, "isolation": "shared"} | settings
    return Exchange(url, LiveManifest.model_validate(settings), max_age=max_age)


def member(url: str, **settings: object) -> Exchange:
    sync(one := new(url, **settings))  # type: ignore[arg-type]
    return one


def sync(one: Exchange) -> Changes:
    changes = Changes()
    one.sync(changes)
    return changes


def publish(one: Exchange, *texts: list[int], at: int | None = None, tenant: int = 0) -> None:
    for text in texts:
        one.pending.append(Record(tenant, now_ms() if at is None else at, np.array(text, np.int32)))
    sync(one)


def texts_at(url: str) -> list[list[int]]:
    return [record.tokens.tolist() for record in new(url).documents()]


def texts_of(one: Exchange) -> list[list[int]]:
    return [record.tokens.tolist() for record in sync(one).records]


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_what_one_learns_the_other_drafts_from_until_it_is_forgotten(url: str) -> None:
    one, other = started(url), started(url)
    learn(one, A, SECRET)
    learn(other, B, [1, 2, 3, 4])
    assert count(one, A, SECRET) == 1
    wait_until(lambda: count(other, A, SECRET) == 1 and count(one, B, [1, 2, 3, 4]) == 1)
    for server in (one, other):
        assert count(server, B, SECRET) == count(server, None, SECRET) == 0, "tenants are kept apart"
    late = {name: content for name, content in contents(url).items() if name[:2] == "20"}
    learn(other, A, [*SECRET, 9])  # one in memory, or on its way
    erased: list[int] = []
    one.runs.on_erased = lambda: erased.append(1)
    maintenance.forget(url, [A])
    wait_until(lambda: count(one, A, SECRET) == count(other, A, SECRET) == 0 and not holds(url, SECRET))
    assert erased and count(other, B, [1, 2, 3, 4]) == count(one, B, [1, 2, 3, 4]) == 1
    files, root = fsspec.core.url_to_fs(f"{url}/learnt")
    for name, content in late.items():  # of a server that had not heard of it
        files.pipe_file(f"{root}/{name}", content)
    wait_until(lambda: not holds(url, SECRET))
    fresh = started(url)
    wait_until(lambda: count(fresh, B, [1, 2, 3, 4]) == 1)
    assert count(fresh, A, SECRET) == count(one, A, SECRET) == 0
    learn(one, A, [*SECRET, 5])  # later: this one was not erased
    wait_until(lambda: count(other, A, [*SECRET, 5]) == count(fresh, A, [*SECRET, 5]) == 1)
    for server in (one, other, fresh):
        server.close()


@pytest.mark.parametrize("url", ["file", S3], indirect=True)
def test_servers_that_start_together_have_one_key(url: str) -> None:
    members = [new(url) for _ in range(8)]
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(sync, members))
    assert len({one.key for one in members}) == 1 and members[0].key is not None
    assert list(contents(url)) == ["manifest.json"]


@pytest.mark.parametrize("url", ["file", S3], indirect=True)
def test_a_url_that_is_down_stops_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = started(url)
    files = type(fsspec.core.url_to_fs(url)[0])
    with monkeypatch.context() as broken:
        for name in ("_call_s3",) if url.startswith("s3") else ("ls", "cat_file", "pipe_file"):
            broken.setattr(files, name, raising(ConnectionError("the bucket is down")))
        time.sleep(0.3)
        check_live(url, VOCAB, None, "strict")
        other = LiveStore(VOCAB, url)  # this host knows the key
        for server, text in ((one, SECRET), (other, [1, 2, 3])):
            learn(server, A, text)
            assert count(server, A, text) == 1
    wait_until(lambda: count(other, A, SECRET) == 1 and count(one, A, [1, 2, 3]) == 1)
    assert [r for r in caplog.messages if "the bucket is down" in r and "\n" not in r]
    one.close(), other.close()


def test_a_start_without_the_url(url: str, tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("no folder")
    check_live(url, VOCAB, None, "strict")
    server = LiveStore(VOCAB, url)
    time.sleep(0.2)
    assert not server.insert(np.array([1, 2, 3], np.int32), number_in(server, A))
    assert server.stats().dropped["bucket"] == 1
    (tmp_path / "bucket").unlink()
    learn(server, A, [1, 2, 3])
    server.close()
    assert texts_at(url) == [[1, 2, 3]]


def test_what_does_not_fit_is_refused_in_one_line(url: str, tmp_path: Path) -> None:
    publish(member(url, fingerprint="a" * 64), [1, 2])
    check_live(url, VOCAB, "a" * 64, "shared")
    with refused("learn with isolation 'shared', not 'salt'"):
        check_live(url, VOCAB, "a" * 64, "salt")
    with refused("another model's tokenizer"):
        check_live(url, VOCAB, "b" * 64, "shared")
    (tmp_path / "bucket" / "learnt" / "manifest.json").unlink()
    with refused("is missing though there are batches: restore it"):
        check_live(url, VOCAB, None, "shared")


def test_one_batch_grows_until_it_is_full(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BATCH_TOKENS", 100)
    one, other = member(url), member(url)
    for number in range(20):
        publish(one, [number] * 9)
        assert texts_of(other) == [[number] * 9], "each text once"
    assert len(contents(url)) == 1 + 2
    assert sorted(texts_at(url)) == [[number] * 9 for number in range(20)]
    assert sorted(texts_of(new(url))) == sorted(texts_at(url))
    publish(one, [50, 51])
    monkeypatch.setattr(UrlFolder, "remove", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):  # killed between the two
        publish(one, [77, 78])
    assert texts_of(other) == [[50, 51], [77, 78]] and texts_at(url).count([50, 51]) == 1


def test_a_fresh_server_reads_the_newest_that_it_may_hold(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_BATCH_TOKENS", 2000)
    one, now = member(url), now_ms()
    for number in range(20):
        publish(one, [number] * 1900, at=now + number)
    server = LiveStore(VOCAB, url, isolation="shared", max_tokens=1 << 14)
    wait_until(lambda: server.stats().tokens > 11_000 and server.runs.settle())
    assert [bool(count(server, None, [number] * 5)) for number in range(20)] == [False] * 12 + [True] * 8
    server.close()


def test_an_answer_that_is_lost_loses_no_text(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch arrives, is read, and the server that was not told so publishes it again, with more."""
    one, other = member(url), member(url)
    original = UrlFolder.put

    def lost(self: UrlFolder, name: str, data: bytes) -> None:
        original(self, name, data)
        raise UnreachableError("the answer is lost")

    with monkeypatch.context() as broken:
        broken.setattr(UrlFolder, "put", lost)
        with pytest.raises(UnreachableError):
            publish(one, [1, 2, 3])
    assert texts_of(other) == [[1, 2, 3]]
    publish(one, [4, 5, 6])
    assert texts_of(other) == [[4, 5, 6]] and sorted(texts_at(url)) == [[1, 2, 3], [4, 5, 6]]


def test_what_is_too_old_goes_everywhere(url: str, tmp_path: Path) -> None:
    now, hour = now_ms(), 3_600_000
    one = member(url)
    publish(one, [1, 2, 3], at=now - hour - 200_000)
    publish(one, SECRET, at=now - hour - 100_000)
    publish(one, [7, 8, 9], at=now)  # in one batch with the others
    (tmp_path / "bucket" / "learnt" / ".of-a-killed-one.new").write_bytes(np.array(SECRET, "<i4").tobytes())
    other = started(url, isolation="shared")
    wait_until(lambda: count(other, None, SECRET) == 1)
    young = started(url, isolation="shared", max_age=3600.0)
    wait_until(lambda: count(other, None, SECRET) == 0 and not holds(url, SECRET))
    for server in (other, young):
        wait_until(lambda server=server: count(server, None, [7, 8, 9]) == 1)
        assert count(server, None, SECRET) == 0
        server.close()
    assert texts_at(url) == [[7, 8, 9]]


def test_a_host_whose_clock_is_ahead_erases_nothing_that_comes(url: str) -> None:
    one, ahead, now = member(url), member(url, max_age=3600.0), now_ms()
    publish(one, [1, 2, 3], at=now)
    ahead.expire(now + 10**12)
    sync(ahead)
    publish(one, [4, 5, 6], at=now + 1)
    sync(ahead)
    assert texts_at(url) == [[4, 5, 6]]
    assert [name for name in contents(url) if name.startswith("erased")] == [f"erased.{now + 1}.all.done"]


@pytest.mark.parametrize("step", ["_announce", "_sweep", "_rewrite", "_mark_done"])
def test_a_forget_that_was_killed_is_finished_by_a_server(url: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tenants = member(url, isolation="strict"), (2, 1 << 62)
    for tenant, text in zip(tenants, (SECRET, [1, 2, 3]), strict=True):
        publish(one, text, tenant=tenant, at=5)
    other = member(url, isolation="strict")
    with monkeypatch.context() as killed:
        killed.setattr(Exchange, step, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            member(url, isolation="strict").forget([tenants[0]], 10)
    monkeypatch.setattr(exchange, "FINISH_SECONDS", 0.05)
    erased = [sync(other).erasures]
    time.sleep(0.1)
    sync(other)
    begun = step != "_announce"
    assert erased == [[Erasure(tenants[0], 10)] if begun else []]
    assert holds(url, SECRET) != begun and [1, 2, 3] in texts_at(url)
    assert not any(name.endswith("due") for name in contents(url))


def test_what_was_erased_while_a_server_was_away_is_never_published(url: str) -> None:
    away, one = member(url), member(url)
    away.pending.append(Record(0, 5, np.array(SECRET, np.int32)))
    one.forget([None], 10)
    publish(away, [1, 2, 3])
    assert texts_at(url) == [[1, 2, 3]] and not holds(url, SECRET)


def test_an_erased_batch_is_written_anew_though_that_failed_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = member(url)
    one.forget([None], 10)
    name, data = seal("a" * 16, [(0, Record(0, 5, np.array(SECRET, np.int32)))])  # of a server that was away
    Path(url.removeprefix("file://"), "learnt", name).write_bytes(data)
    with monkeypatch.context() as once:
        once.setattr(UrlFolder, "remove", raising(UnreachableError("503")))
        with pytest.raises(UnreachableError):
            sync(one)
    assert holds(url, SECRET) and sync(one).records == []
    assert not holds(url, SECRET)


def test_forgetting_reaches_what_a_clock_that_was_ahead_has_dated(url: str) -> None:
    one = member(url)
    publish(one, SECRET, at=now_ms() + 3_600_000)
    maintenance.forget(url)
    assert not holds(url, SECRET)


def test_damaged_and_hostile_files_are_left_out_in_one_line(url: str, caplog: pytest.LogCaptureFixture) -> None:
    one, other = member(url), member(url)
    publish(one, [1, 2, 3])
    folder = Path(url[7:]) / "learnt"
    (good,) = [path for path in folder.iterdir() if path.name.startswith("20")]
    data = bytearray(good.read_bytes())
    data[-3] ^= 1
    (folder / good.name.replace(".0000", ".0001", 1)).write_bytes(data)
    (folder / "strange.npz").write_bytes(b"PK")
    (folder / f"{good.name[:-1]}x").write_bytes(bytes(data))
    with (folder / good.name.replace(good.name[-4:], "0000")).open("wb") as huge:
        huge.truncate(1 << 40)
    assert texts_of(other) == [[1, 2, 3]] and texts_of(other) == []
    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(said) == 4 and not any("\n" in line for line in said)
    assert [sum(words in line for line in said) for words in ("is damaged", "is not a file of freedraft")] == [1, 3]


def test_numbers_that_cannot_be_are_refused(url: str) -> None:
    """Names included: whoever may write there cannot crash a server."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB, 30).astype(np.int32) for _ in range(5)]
    _, whole = seal("0" * 16, [(n, Record(1 << 60, 5 + n, text)) for n, text in enumerate(texts)])
    taken = 0
    for _ in range(1000):
        data = np.frombuffer(whole, "<i8").copy() if rng.random() < 0.5 else np.frombuffer(whole, "<i4").copy()
        places = rng.integers(0, min(len(data), 60), int(rng.integers(1, 4)))
        data[places] = rng.choice([-(2**31), -1, 0, 1, 31, VOCAB, 2**31 - 1], len(places))
        content = data.tobytes()[: int(rng.integers(0, 2 * len(whole)))]
        name = f"1970-01-01.{'0' * 16}.{4:012d}.{5:013d}.{9:013d}.{hashlib.sha256(content).hexdigest()[:32]}"
        try:
            documents = unseal(Batch("0" * 16, 4, 5, 9, name), content, VOCAB)
        except DatastoreError as error:
            assert "or holds ids beyond the vocabulary" in str(error)
            continue
        taken += 1
        assert all(r.tokens.min() >= 0 and r.tokens.max() < VOCAB for _, r in documents)
    assert taken < 500


def test_a_built_store_at_the_url_is_drafted_from(url: str, tmp_path: Path) -> None:
    build_store(tmp_path / "bucket", [[5, 6, 7]], VOCAB)
    server = started(url)
    wait_until(lambda: count(server, None, [5, 6, 7]) == 1)
    learn(server, A, SECRET)
    assert count(server, A, SECRET) == count(server, A, [5, 6, 7]) == 1 and count(server, None, SECRET) == 0
    server.close()
    assert run("verify", url).exit_code == 0


def test_commands_at_a_url(url: str, tmp_path: Path) -> None:
    one = member(url, isolation="strict")
    assert one.key is not None
    for name, text in ((A, [1, 2, 3]), (B, [4, 5])):
        publish(one, text, tenant=tenant_number(one.key, name))
    out, salts = tmp_path / "out.npy", tmp_path / "salts"
    assert "say --accept" in one_line("export", url, out)
    salts.write_text("a\n")
    assert run("export", url, out, "--tenants", salts).exit_code == 0
    assert np.load(out).tolist() == [1, 2, 3, -1]
    local = LiveStore(VOCAB, tmp_path / "local", isolation="shared")
    learn(local, None, [8, 9])
    local.close()
    assert run("export", tmp_path / "local", tmp_path / "more.npy").exit_code == 0
    args = (tmp_path / "store", out, tmp_path / "more.npy", "--vocab-size", VOCAB, "--quiet")
    assert run("build", *args).exit_code == 0
    assert documents_at(tmp_path / "store") == [[1, 2, 3], [8, 9]]
    forgotten = run("forget", url, "--tenants", "-", input="a\n")
    assert forgotten.exit_code == 0, forgotten.output
    assert texts_at(url) == [[4, 5]]
    assert "no server learns at" in one_line("forget", f"file://{tmp_path}/nothing", "--before", "2020-01-01")
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == ["learnt"]
