"""Compiled functions, cached on disk safely for several processes and invalidated by upgrades.

numba's own cache assumes one writer: of two servers that start at once, one can leave an index that names the other's
code. It also watches the file of the outermost function only, not those of its callees.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

_PACKAGES = tuple(Path(__file__).parents[1] / name for name in ("freedraft", "sssd_plugin", "layerskip_plugin"))


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator: `numba.njit`, with or without its options, that caches the code on disk where possible."""
    if function is None:
        return partial(compiled, **options)
    dispatcher = numba.njit(**options)(function)
    if isinstance(dispatcher, Dispatcher):  # the plain function under NUMBA_DISABLE_JIT
        # Calls from compiled code need no wrappers for Python, which take a seventh of the time.
        inner = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
        dispatcher.get_call_template = lambda args, kws: inner.get_call_template([_general(arg) for arg in args], kws)
        dispatcher.get_overload = inner.get_overload
        try:
            dispatcher._cache, inner._cache = _Cache(function), _Cache(function, "-inner")
        except (RuntimeError, OSError):  # no writable folder; or the sources are being replaced
            _warn("no folder for it can be written, or a source not be read")
    return dispatcher


lean = partial(compiled, nogil=True, _nrt=False)
"""Decorator: as `compiled`, without the GIL and for functions that allocate nothing and return no array that owns
memory: they count no references, which takes longer than what small ones do."""


def _general(kind: types.Type) -> types.Type:
    """The type of an argument in calls from compiled code: callers with literals and with other integers share one
    compilation."""
    kind = types.unliteral(kind)
    return types.int64 if kind in types.signed_domain else kind


@cache
def _sources() -> str:
    """Digest of all sources, read once: any change recompiles everything."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for source in sorted(filter(Path.is_file, package.rglob("*.py"))):  # editors' lock files are dangling links
            digest.update(f"{source.relative_to(package.parent)}\n".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _record() -> Path:
    """The file that names the code which was compiled ahead last; locked while a process compiles."""
    return Path(_Cache(compiled)._cache_path, "freedraft-compiled")


@cache
def compile_ahead(function: Callable[[], None]) -> None:
    """Call a function, which calls compiled ones, in another process while the engine starts, unless that was done
    since the last upgrade. `await_compilation` waits for the process."""
    name, newest = function.__name__, f"{numba.__version__} {sys.implementation.cache_tag} {_sources()}"
    with contextlib.suppress(RuntimeError, OSError), _record().open("a+") as record:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record.seek(0)
        if record.read() != newest:
            code = f"import sys; from {function.__module__} import {name}; {name}(); "
            code += "open(sys.argv[1], 'w').write(sys.argv[2])"
            command, none = [sys.executable, "-c", code, record.name, newest], subprocess.DEVNULL
            # The process inherits the lock, and keeps it until it ends.
            subprocess.Popen(command, stdin=none, stdout=none, stderr=none, pass_fds=[record.fileno()])


def await_compilation(limit_s: float = 300.0) -> None:
    """Wait for the process of `compile_ahead`, up to this limit: then this process compiles what is missing."""
    until = time.monotonic() + limit_s
    with contextlib.suppress(RuntimeError, OSError), _record().open("a") as record:
        while True:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.monotonic() > until:
                return logger.warning("freedraft: another process has been compiling for %.0f s: not waiting", limit_s)
            time.sleep(0.02)


@cache
def _warn(problem: str) -> None:
    logger.warning(
        "freedraft: every start compiles, about 25 s: set NUMBA_CACHE_DIR to a writable folder (%s)", problem
    )


class _File(IndexDataCacheFile):
    """One data file per signature, named after it, without an index."""

    def load(self, key: Any) -> Any:
        try:
            sources, known, data = self._load_data(self._name(key))
        except Exception:  # missing or truncated file: unpickling may raise anything
            return None
        return data if (sources, known) == (self._source_stamp, key) else None

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name(key), (self._source_stamp, key, data))

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(f"{self._version} {key!r}".encode()).hexdigest()
        return str(self._data_name(int(digest[:12], 16)))


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any], suffix: str = ""):
        super().__init__(function)
        self._cache_file = _File(self._cache_path, self._impl.filename_base + suffix, _sources())

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:  # a full disk costs the next start, not this one
            _warn(error.strerror or type(error).__name__)
