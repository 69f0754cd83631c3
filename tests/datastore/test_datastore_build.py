"""Building a datastore: what goes in is found, within bounded memory, and however a build ends, the target is whole, or
what it was."""

import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build.builder import StoreBuilder, parse_size
from sssd_plugin.datastore.disk.format import read_manifest
from sssd_plugin.datastore.disk.store import Datastore, audit
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.sub_index import SEPARATOR
from tests.support.disks import full_disk
from tests.support.stores import (
    brute_force,
    build_store,
    documents_at,
    documents_of,
    leftovers,
    look_up,
    one_line,
    read_only_folder,
    refused,
    run,
)
from tests.support.waiting import wait_until


@st.composite
def _corpora(draw: st.DrawFn) -> tuple[list[list[int]], int, int | None]:
    """Documents of few different ids, so that they repeat; a vocabulary; a size of sub-indices."""
    vocab_size = draw(st.sampled_from([3, 300, 2**31]))
    ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4, unique=True))
    documents = draw(st.lists(st.lists(st.sampled_from(ids), max_size=40), max_size=12))
    return documents, vocab_size, draw(st.sampled_from([None, 64, 100]))


@settings(max_examples=30, deadline=None)
@given(_corpora(), st.data())
def test_look_ups_equal_brute_force(corpus: tuple[list[list[int]], int, int | None], data: st.DataObject) -> None:
    documents, vocab_size, sub_index_tokens = corpus
    kept = [d for d in documents if d]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "store"
        if not kept:
            with pytest.raises(DatastoreError, match="no tokens"):
                build_store(target, documents, vocab_size, sub_index_tokens=sub_index_tokens)
            assert list(Path(folder).iterdir()) == []
            return
        build_store(target, documents, vocab_size, sub_index_tokens=sub_index_tokens)
        store = Datastore.open(target, vocab_size=vocab_size)
        audit(store, full=True)
        audit(store)
        subs = store.snapshot
        # Documents in order, some cut where a sub-index is full.
        stored = [token for sub in subs for document in documents_of(sub) for token in document]
        assert stored == [token for document in kept for token in document]
        assert store.manifest.n_tokens == len(stored)
        if len(subs) == 1:
            assert documents_of(subs[0]) == kept
        ids = sorted(set(stored))
        for _ in range(5):
            query = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=5))
            for sub in subs:
                assert look_up(sub, query) == brute_force(sub, query)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with StoreBuilder(tmp_path / "store", vocab_size=10) as builder:
        for wrong in (10, -2, 2**31, 2**32 - 1):
            with pytest.raises(DatastoreError, match=f"token id {wrong} .* vocabulary of 10.*--vocab-size"):
                builder.append(np.array([1, wrong]))
        with pytest.raises(DatastoreError, match="one-dimensional integer array"):
            builder.append(np.array([0.5]))


def test_tokens_may_come_in_any_pieces(tmp_path: Path) -> None:
    stream = np.array([SEPARATOR, 1, 2, SEPARATOR, SEPARATOR, SEPARATOR, 3, 4, 5, SEPARATOR, 6], np.int16)
    for size in (1, 2, 3, 11):
        with StoreBuilder(tmp_path / str(size), vocab_size=10) as builder:
            for a in range(0, len(stream), size):
                builder.append(stream[a : a + size])
            manifest = builder.finish()
        assert (manifest.n_tokens, manifest.n_documents) == (6, 3)
        assert documents_at(tmp_path / str(size)) == [[1, 2], [3, 4, 5], [6]]


def test_files_are_for_their_owner_and_shared_by_processes(tmp_path: Path) -> None:
    """All arrays are read-only maps of the files, so that the page cache holds the only copy."""
    build_store(tmp_path / "store", [[1, 2, 3]] * 50, 10)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    store = Datastore.open(tmp_path / "store")
    assert store.snapshot
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(lines) == 4 and {line[1] for line in lines} == {"r--s"}


IDS = 5000
MEASURED = """
import sys
from sssd_plugin.datastore.build.builder import peak_resident_bytes
from sssd_plugin.datastore.cli import app
app(sys.argv[1:], standalone_mode=False)
print(peak_resident_bytes())
"""


def arrays(path: Path) -> list[list[bytes]]:
    store = Datastore.open(path)
    return [[array.tobytes() for array in (sub.tokens, sub.suffix_array, sub.bucket_starts)] for sub in store.snapshot]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    tokens = (np.random.default_rng(0).zipf(1.2, 60_000) % IDS).astype(np.int32)
    tokens[99::100] = -1
    np.save(tmp_path / "ids.npy", tokens)
    return tmp_path / "ids.npy"


def arguments(out: Path, ids: Path, *more: object) -> list[str]:
    common = ("--vocab-size", IDS, "--sub-index-tokens", 9000, "--quiet")
    return [str(arg) for arg in ("build", out, ids, *common, *more)]


@pytest.mark.parametrize(
    ("vocab_size", "tokens", "memory", "more"),
    [
        (49_152, 12_000_000, "320MiB", ()),
        (60_000, 6_000_000, "600MiB", ("--workers", 2, "--sub-index-tokens", 2_000_000)),
    ],
)
def test_a_build_stays_within_its_memory(
    tmp_path: Path, vocab_size: int, tokens: int, memory: str, more: tuple[object, ...]
) -> None:
    numbers = (np.random.default_rng(0).random(tokens, np.float32) ** 4 * vocab_size).astype(np.int32)
    numbers[:: vocab_size // 100] = -1
    np.save(tmp_path / "ids.npy", numbers)
    options = ["--vocab-size", vocab_size, "--memory", memory, "--quiet", *more]
    command = [sys.executable, "-c", MEASURED, "build", tmp_path / "store", tmp_path / "ids.npy", *options]
    output = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
    assert 100 << 20 < int(output.splitlines()[-1]) <= parse_size(memory)
    assert 2 <= len(read_manifest(tmp_path / "store").sub_indices) <= 8, "the memory is used"


def test_workers_make_the_same_store(tmp_path: Path, ids: Path) -> None:
    assert run(*arguments(tmp_path / "one", ids)).exit_code == 0
    result = run(*arguments(tmp_path / "several", ids, "--workers", 3))
    assert result.exit_code == 0, result.output
    assert arrays(tmp_path / "several") == arrays(tmp_path / "one") and len(arrays(tmp_path / "one")) == 7
    assert run("verify", tmp_path / "several", "--full").exit_code == 0


def test_memory_that_runs_out_is_one_line(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> object:
        raise MemoryError

    monkeypatch.setattr("sssd_plugin.datastore.build.builder.sort", fails)
    assert "give a smaller --memory" in one_line(*arguments(tmp_path / "store", ids, "--workers", 2))
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []


BUILD_FOREVER = """
import sys
import numpy as np
from sssd_plugin.datastore.build.builder import StoreBuilder

target, replace = sys.argv[1], sys.argv[2] == "replace"
print("ready", flush=True)
for generation in range(1, 1000):
    with StoreBuilder(target if replace else f"{target}-{generation}", vocab_size=2000, sub_index_tokens=30_000,
                      replace=replace) as builder:
        for _ in range(100):
            builder.append(np.array([*[generation] * 1000, -1]))
        builder.finish()
"""


def start(*args: str, **settings: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )  # type: ignore[call-overload]


@pytest.mark.parametrize("mode", ["replace", "new"])
def test_killed_at_random_moments(tmp_path: Path, mode: str) -> None:
    rng = np.random.default_rng(7)
    target = tmp_path / "store"
    unfinished = 0
    for _ in range(8):
        child = start("-c", BUILD_FOREVER, str(target), mode)
        try:
            assert child.stdout and child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()
            time.sleep(rng.uniform(0, 0.25))
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        unfinished += bool(leftovers(tmp_path))
        stores = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        for store in stores:  # 100 documents of one generation
            tokens = [token for document in documents_at(store) for token in document]
            assert len(tokens) == 100_000 and len({*tokens}) == 1
        if mode == "new":
            # The next build of a target removes what a killed one left of it.
            for name in leftovers(tmp_path):
                build_store(tmp_path / name[1:].split(".building-")[0], [[1]], 10, replace=True)
            assert leftovers(tmp_path) == []
            for path in tmp_path.iterdir():
                shutil.rmtree(path)
    assert unfinished >= 2, "the kills came too early or too late to test anything"
    build_store(target, [[1]], 10, replace=True)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 2)])
def test_ctrl_c_leaves_nothing_behind(
    tmp_path: Path, tokenizer_folder: Path, text: str, number: signal.Signals, code: int, workers: int
) -> None:
    """While text is read, and while several workers sort what takes them seconds."""
    out = tmp_path / "out"
    out.mkdir()
    if workers:
        np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 60_000, 6_000_000).astype(np.int32))
        more = ["ids.npy", "--workers", workers, "--vocab-size", 60_000, "--sub-index-tokens", 2_000_000]
    else:
        (tmp_path / "source.txt").write_text(text * 300)
        more = ["source.txt", "--tokenizer", tokenizer_folder]
    # A job in the background of a shell, as the tests may be, is started with SIGINT ignored.
    command = ("-c", "from sssd_plugin.datastore.cli import app; app()", "build", out / "store", *more)
    child = start(*map(str, command), cwd=tmp_path, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    try:
        begun = ".store.building-*/*" if workers else ".store.building-*"
        wait_until(lambda: child.poll() is not None or len(list(out.glob(begun))) > workers, 60)
        time.sleep(0.1)
        assert child.poll() is None
        child.send_signal(number)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == code, errors
    assert "Traceback" not in errors
    assert list(out.iterdir()) == []


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100_000) % 50)
    out = tmp_path / "out"
    with full_disk(200_000):
        message = one_line("build", out / "store", tmp_path / "tokens.npy", "--vocab-size", 50, "--quiet")
    assert "cannot write " in message and "tokens.i32" in message
    assert list(out.iterdir()) == []


def test_builders_that_fail_and_that_live(tmp_path: Path) -> None:
    """The one leaves nothing behind, and the other is left alone."""
    with pytest.raises(RuntimeError), StoreBuilder(tmp_path / "store", vocab_size=10) as builder:
        builder.append(np.arange(10))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with StoreBuilder(tmp_path / "store", vocab_size=10) as slow:
        slow.append(np.arange(10))
        build_store(tmp_path / "store", [[1, 2]], 10)
        assert len(leftovers(tmp_path)) == 1
        with refused("exists: choose another path, or give --force"):
            slow.finish()
    assert leftovers(tmp_path) == []
    assert documents_at(tmp_path / "store") == [[1, 2]]


def test_only_datastores_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with refused(r"is not a datastore .* so it is not replaced"):
        build_store(tmp_path / "home", [[1]], 10, replace=True)
    with refused(r"thesis.txt is a file"):
        build_store(tmp_path / "home" / "thesis.txt", [[1]], 10, replace=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
    build_store(tmp_path / "a [strange]*name" / "store", [[1]], 10)
    (tmp_path / "empty").mkdir()
    build_store(tmp_path / "empty", [[1]], 10)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    build_store(tmp_path / "link", [[2]], 10, replace=True)
    assert (tmp_path / "link").is_symlink()
    assert documents_at(tmp_path / "empty") == [[2]]


def test_a_folder_that_may_not_be_written() -> None:
    with read_only_folder() as folder, refused("cannot write .*Permission denied; give this user access"):
        build_store(folder / "store", [[1]], 10)
