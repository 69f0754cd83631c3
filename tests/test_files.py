"""Files that are whole or absent, and locks between processes."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from freedraft import files
from freedraft.files import FileLock, write_atomically

HOLD = """
import sys, time
from pathlib import Path
from freedraft.files import FileLock
lock = FileLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
FORK = """
import os, sys
from pathlib import Path
from freedraft.files import FileLock
lock = FileLock(Path(sys.argv[1]))
if os.fork():
    lock.release()
    print("released", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(code: str, path: Path) -> Iterator[None]:
    """Another process, until it is killed; what it forks ends with its input."""
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield
        finally:
            process.kill()


def test_permissions_and_no_other_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    write_atomically(tmp_path / "b", b"y", mode=0o666)
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) & 0o600 == 0o600
    assert (tmp_path / "b").read_bytes() == b"y"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("durable", [False, True])
def test_a_disk_that_refuses_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new", durable=durable)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    """As `--out /dev/stdout` is, or /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, b"x")
    assert os.read(reader, 9) == b"x" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_several_write_the_same_file(tmp_path: Path) -> None:
    """Threads here; also processes of two containers, whose ids are the same."""
    path = tmp_path / "file"

    def write(letter: bytes) -> None:
        for _ in range(25):
            write_atomically(path, letter * 500_000, durable=False)
            content = path.read_bytes()
            assert len(content) == 500_000 and len(set(content)) == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [b"a", b"b", b"c", b"d"]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_free_though_a_fork_has_its_file(tmp_path: Path) -> None:
    with running(FORK, tmp_path):
        FileLock(tmp_path).release()


@pytest.mark.parametrize("folder", [False, True])
def test_a_lock_goes_with_its_process(tmp_path: Path, folder: bool) -> None:
    path = tmp_path if folder else tmp_path / "lock"
    FileLock(path, create=not folder).release()
    with running(HOLD, path), pytest.raises(BlockingIOError):
        FileLock(path)
    lock = FileLock(path, wait=True)
    assert lock.enforced
    with pytest.raises(BlockingIOError):
        FileLock(path)
    lock.release()
    lock.release()
    FileLock(path).release()
