"""Compiled code on disk: several processes write it at once, sources change, the disk refuses."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from freedraft import compiled

LIMIT_S = 600


def python(code: str, *arguments: object, folder: Path | None = None, **environment: str) -> str:
    """What another process prints that runs `code`, and imports from `folder` first."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # Python's own files go by time and size
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder to import from: `freedraft.outer` calls `freedraft.inner`, and both are compiled."""
    folder = tmp_path / "freedraft"
    folder.mkdir()
    shutil.copy(compiled.__file__, folder)
    (folder / "__init__.py").touch()
    (folder / "outer.py").write_text(
        "from freedraft.compiled import compiled\nfrom freedraft.inner import price\n"
        "@compiled\ndef outer(x):\n    return x + price()\ndef work():\n    outer(1)\n"
    )
    set_price(folder, 1)
    return tmp_path


def set_price(folder: Path, value: int) -> None:
    source = folder / "inner.py"
    source.write_text(f"from freedraft.compiled import compiled\n@compiled\ndef price():\n    return {value}\n")
    os.utime(source, (0, 0))  # as reproducible builds have it: neither its time nor its size tells


RUN = "import sys; from freedraft.outer import outer; print(outer(int(sys.argv[1])), sum(outer.stats[1].values()))"


def run(package: Path, x: int, **environment: str) -> str:
    """The result, and how many signatures were loaded from the disk."""
    return python(RUN, x, folder=package, **environment)


def test_an_upgrade_of_a_called_function_takes_effect(package: Path) -> None:
    """In a folder that outlives an installation, as a volume of an image does."""
    where = {"NUMBA_CACHE_DIR": str(package / "cache")}
    assert run(package, 1, **where) == "2 0\n"
    (package / "freedraft" / ".#inner.py").symlink_to("someone@their-machine.1")  # as editors lock a file
    assert run(package, 1, **where) == "2 1\n"
    set_price(package / "freedraft", 5)
    assert run(package, 1, **where) == "6 0\n"
    assert run(package, 1, **where) == "6 1\n"


def test_the_second_start_compiles_nothing() -> None:
    """All that a drafter calls is found on disk: no part of what names a file differs between processes."""
    code = """
import sys
from numba.core.dispatcher import Dispatcher
from sssd_plugin.drafter import Drafter
Drafter(vocab_size=100, max_nodes=8, recycle_megabytes=1)
functions = {f for m in list(sys.modules.values()) for f in vars(m).values() if isinstance(f, Dispatcher)}
stats = [f.stats for f in functions]
print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""
    python(code)
    hits, misses = map(int, python(code).split())
    assert hits > 0 and misses == 0


def test_another_process_compiles_once_while_the_engine_starts(package: Path) -> None:
    """And half a file is compiled again."""
    ahead = "from freedraft import compiled; from freedraft.outer import work; compiled.compile_ahead(work); "
    ahead += "compiled.await_compilation()"
    python(ahead, folder=package)
    assert run(package, 1) == "2 1\n"
    files = list((package / "freedraft" / "__pycache__").glob("*.nbc"))
    for file in files:
        file.write_bytes(b"half")
    assert run(package, 1) == "2 0\n"
    for file in files:
        file.unlink()
    python(ahead, folder=package)
    assert files and not any(file.exists() for file in files), "known to be done"


def test_a_compiling_process_that_hangs_does_not_stop_the_start(package: Path) -> None:
    with (package / "freedraft" / "outer.py").open("a") as source:
        source.write("def hang():\n    import time\n    time.sleep(20)\n")
    code = """
import time
from freedraft import compiled
from freedraft.outer import hang
compiled.compile_ahead(hang)
began = time.monotonic()
compiled.await_compilation(1.0)
print(1 <= time.monotonic() - began < 15)
"""
    assert "True\n" in python(code, folder=package)


def test_no_folder_that_can_be_written(package: Path) -> None:
    """As in a container with a read-only root: it serves, and one line says what that costs."""
    answer = run(package, 1, NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator")  # finds no folder for a file of source
    assert answer.startswith("2 0\n") and answer.count("no folder") == 1


WRITER = """
import sys, time
from pathlib import Path
from freedraft.compiled import _Cache
from freedraft.outer import outer
me, others, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])

def meet(name):  # all have come here
    (folder / f"{name}-{me}").touch()
    while sum((folder / f"{name}-{other}").exists() for other in range(others)) < others:
        time.sleep(0)

wrong = 0
for i in range(rounds):
    files = _Cache(outer.py_func)._cache_file
    meet(f"start-{i}")
    files.save((i, me), [i, me] * 1000)
    meet(f"saved-{i}")
    for other in range(others):
        wrong += files.load((i, other)) != [i, other] * 1000
    meet(f"read-{i}")
print(wrong)
"""


def test_servers_that_start_at_once(package: Path) -> None:
    """What is loaded for a signature is what was saved for it, in 360 loads of three processes at once; with numba's
    own `FunctionCache` more than half of them give nothing, or what another process saved."""
    at_once, rounds = 3, 40
    (package / "meet").mkdir()
    with ThreadPoolExecutor(at_once) as pool:
        wrong = pool.map(
            lambda me: python(WRITER, me, at_once, rounds, package / "meet", folder=package), range(at_once)
        )
    assert list(wrong) == ["0\n"] * at_once
