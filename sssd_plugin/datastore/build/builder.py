"""`StoreBuilder`: writes a datastore from a stream of token ids, or of other datastores, in bounded memory; it appears
complete, or not at all."""

import contextlib
import ctypes
import glob
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ByteSize, TypeAdapter, ValidationError

from freedraft.files import FileLock, fsync_folder
from sssd_plugin.datastore.build import divsufsort
from sssd_plugin.datastore.disk.checksum import NewFile, record, write_array
from sssd_plugin.datastore.disk.format import (
    LIVE,
    MANIFEST,
    MAX_VOCAB_SIZE,
    ROLES,
    Manifest,
    SubIndexEntry,
    TokenizerEntry,
    file_name,
)
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import PAD, PADDING, SEPARATOR, direct_buckets, sorted_arrays, with_tables

SUB_INDEX_TOKENS = 64, 1 << 29  # least and most; 512 Mi as in arXiv 2411.05894, 3.1.3
_PART_TOKENS = 1 << 20
DEFAULT_MEMORY = 2 << 30
SORT_BYTES = 9  # least memory per token of sorting a sub-index, by `sorted_arrays`: tokens, their order, a sparse index
_MIN_SORT_BYTES = SORT_BYTES << 20
_READING_BYTES = 160 << 20  # tokenising a batch, buffers, and allocator overhead


class StoreBuilder:
    """Context that builds the datastore at `target` by calls of `append` and a final `finish`.

    It is built in a sibling of `target`, locked while the builder lives and renamed at the end: after a stop at any
    time, even by SIGKILL, `target` is absent (or unchanged) or complete, and the next build removes leftovers.

    Args:
        vocab_size: token ids must be below it; at most 2^31.
        tokenizer: recorded in the manifest, to refuse other tokenizers.
        memory: bytes that this process may use in total; None: 2 GiB more than it uses now.
        sub_index_tokens: largest sub-index, regardless of memory; at most 512 Mi.
        replace: whether a datastore at `target` may be replaced.
        workers: sub-indices that are sorted at a time, in threads; if several, while more is read.

    Attributes:
        on_phase: called with the name of each phase.

    Raises:
        DatastoreError: a setting or an id out of range, no tokens, a target that may not be written, or a full disk.
    """

    def __init__(
        self, target: Path | str, *, vocab_size: int, tokenizer: TokenizerEntry | None = None,
        memory: int | None = None, sub_index_tokens: int | None = None, replace: bool = False, workers: int = 1,
    ) -> None:  # fmt: skip
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise DatastoreError(f"the vocabulary size must be from 1 to {MAX_VOCAB_SIZE}, not {vocab_size}")
        low, high = SUB_INDEX_TOKENS
        if sub_index_tokens is not None and not low <= sub_index_tokens <= high:
            raise DatastoreError(f"--sub-index-tokens must be from {low} to {high}, not {sub_index_tokens}")
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self.on_phase: Callable[[str], object] = lambda phase: None
        self._workers = workers
        self._memory = sub_index_memory(resident_bytes() + DEFAULT_MEMORY if memory is None else memory, workers)
        self._limit = min(self._memory // SORT_BYTES, sub_index_tokens or high)
        self._closed: list[Future[SubIndexEntry]] = []
        self._file: NewFile | None = None  # token file of the present sub-index
        self._length, self._last = 0, SEPARATOR  # tokens in it, and the last of them
        # Resolved, so that replacing through a symbolic link replaces what it points to, on that disk.
        self._target, self._replace = Path(target).resolve(), replace
        _check_target(self._target, replace)
        with reporting("write", self._target.parent):
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._folder, self._lock = _locked_sibling(self._target)

    def append(self, tokens: NDArray[np.integer]) -> None:
        """Add token ids (any integer dtype) below the vocabulary size; `SEPARATOR` (-1) ends a document, and empty
        documents vanish."""
        tokens = np.asarray(tokens)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            found = f"{tokens.dtype} {tokens.shape}"
            raise DatastoreError(f"token ids must be a one-dimensional integer array, not {found}")
        for start in range(0, len(tokens), _PART_TOKENS):
            part = tokens[start : start + _PART_TOKENS]
            low, high = int(part.min()), int(part.max())
            if low < SEPARATOR or high >= self._vocab_size:
                raise DatastoreError(
                    f"token id {low if low < SEPARATOR else high} is outside the vocabulary of {self._vocab_size}: "
                    f"give the tokenizer that made these ids, or a larger --vocab-size"
                )
            self._write(part.astype("<i4"))

    def finish(self) -> Manifest:
        """Publish the store, and return its manifest."""
        self._close_sub_index()
        if not self._closed:
            raise DatastoreError(f"nothing to store in {self._target}: the inputs hold no tokens")
        self._await_sorting(0)
        entries = tuple(entry.result() for entry in self._closed)
        manifest = Manifest(vocab_size=self._vocab_size, tokenizer=self._tokenizer, sub_indices=entries)
        with reporting("write", self._folder / MANIFEST):
            manifest.write(self._folder / MANIFEST)
        _check_target(self._target, self._replace)
        with reporting("write", self._target):
            for directory in [*(path for path in self._folder.iterdir() if path.is_dir()), self._folder]:
                fsync_folder(directory)
            if self._target.exists() and any(self._target.iterdir()):
                _exchange(self._folder, self._target)  # the former contents are then removed
            else:
                self._folder.rename(self._target)
            fsync_folder(self._target.parent)
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.release()

    def _write(self, tokens: NDArray[np.int32]) -> None:
        while True:
            ends = tokens == SEPARATOR
            tokens = tokens[~(ends & np.append(self._last == SEPARATOR, ends[:-1]))]  # drop empty documents
            if not len(tokens):
                return
            if self._file is None:
                folder = self._folder / f"{len(self._closed):04d}-{secrets.token_hex(4)}"
                with reporting("write", folder):
                    folder.mkdir(mode=0o700)
                self._file = NewFile(folder / file_name("tokens"))
            # Keep room for the separator of a document that is cut here.
            taken, tokens = np.split(tokens, [self._limit - 1 - self._length])
            if len(taken):
                self._file.append(taken)
                self._length, self._last = self._length + len(taken), int(taken[-1])
            if len(tokens):
                self._close_sub_index()

    def _close_sub_index(self) -> None:
        if self._file is None:
            return
        self._await_sorting(self._workers - 1)
        with self._file as file:
            file.append(PADDING if self._last == SEPARATOR else np.append(PADDING, PADDING[:1]))
        self._file, self._length, self._last = None, 0, SEPARATOR
        folder = Path(file.name).parent
        self._closed.append(start_sorting(folder, direct_buckets(self._vocab_size), self._memory))
        if self._workers == 1:
            self._await_sorting(0)
        self.on_phase("reading")

    def _await_sorting(self, max_sorting: int) -> None:
        while len(pending := [entry for entry in self._closed if not entry.done()]) > max_sorting:
            self.on_phase(f"sorting {len(pending)} of {len(self._closed)} sub-indices")
            wait(pending, return_when=FIRST_COMPLETED)
        for entry in self._closed:
            if entry.done():
                entry.result()


def merge_stores(out: Path, stores: Sequence[Path], *, memory: int | None = None, replace: bool = False) -> Manifest:
    """Build a store at `out` of the documents of `stores`, in their order; arguments and errors as of `StoreBuilder`,
    and `DatastoreError` if one cannot be opened, or tokenizers differ."""
    opened = [Datastore.open(path) for path in stores]
    tokenizers = [store.manifest.tokenizer for store in opened]
    names = {entry.fingerprint: entry.name for entry in tokenizers if entry}
    if len(names) > 1 or (names and None in tokenizers):
        different = f"the stores were built with different tokenizers ({', '.join(names.values())})"
        wrong = different if len(names) > 1 else "some of the stores do not record their tokenizer"
        raise DatastoreError(f"{wrong}: merge only stores of one tokenizer")
    vocab_size = max(store.manifest.vocab_size for store in opened)
    with StoreBuilder(out, vocab_size=vocab_size, tokenizer=tokenizers[0], memory=memory, replace=replace) as builder:
        for store in opened:
            for sub in store.snapshot:
                builder.append(sub.tokens[: sub.n])
        return builder.finish()


def _check_target(target: Path, replace: bool) -> None:
    """Refuse to replace anything but a datastore, even by force."""
    with reporting("read", target):
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            return
        live = target / LIVE
        problems = [
            (not target.is_dir(), "is a file: choose the path of a new directory for the datastore"),
            (not replace, "exists: choose another path, or give --force to replace it"),
            (not (target / MANIFEST).is_file(), f"is not a datastore (no {MANIFEST}), so it is not replaced: "
                                                "choose another path, or remove it yourself"),
            (live.exists(), "holds what was learnt while serving, which replacing it would lose: "
                            f"choose another path, or move {live} away"),
        ]  # fmt: skip
    for wrong, message in problems:
        if wrong:
            raise DatastoreError(f"{target} {message}")


def _locked_sibling(target: Path) -> tuple[Path, FileLock]:
    """Make and lock a new directory beside `target`; remove those of dead builders."""
    prefix = f".{target.name}.building-"
    for path in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # its builder lives
            lock = FileLock(path)
            if lock.enforced:  # else dead builders cannot be detected
                shutil.rmtree(path, ignore_errors=True)
            lock.release()
    while True:
        path = target.parent / f"{prefix}{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        # Until it is locked, another builder may remove the new directory as a dead builder's.
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock(path, wait=True)
            if path.exists():
                return path, lock
            lock.release()


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories, atomically if the system can; else `old` is absent for a moment."""
    cwd, exchange = -100, ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(cwd, os.fsencode(new), cwd, os.fsencode(old), exchange) == 0:
        return
    aside = new.with_name(f"{new.name}.old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def start_sorting(folder: Path, direct: int, memory: int) -> Future[SubIndexEntry]:
    """Sort the sub-index in `folder` within `memory` bytes and write its arrays, by compiled code without the GIL.
    Returns a future of its manifest entry, or of MemoryError or DatastoreError. Waiting for it can be interrupted."""
    future: Future[SubIndexEntry] = Future()

    def run() -> None:
        try:
            future.set_result(_sort_folder(folder, direct, memory))
        except BaseException as error:
            future.set_exception(error)

    # Compiled code may take minutes: Ctrl-C and the interpreter's exit do not wait for this thread.
    threading.Thread(target=run, daemon=True, name="freedraft-suffix-sort").start()
    return future


def _sort_folder(folder: Path, direct: int, memory: int) -> SubIndexEntry:
    path = folder / file_name("tokens")
    with reporting("read", path):
        tokens = np.fromfile(path, "<i4")
    n, largest = len(tokens) - PAD, int(tokens.max())
    _, *arrays = sort(tokens, largest, direct, memory)
    del tokens
    m, files = len(arrays[0]), {ROLES[0]: record(path)}
    files |= {role: write_array(folder / file_name(role), array) for role, array in zip(ROLES[1:], arrays, strict=True)}
    return SubIndexEntry(name=folder.name, n_tokens=m, n_documents=n - m, max_token=largest, files=files)


def sort(tokens: NDArray[np.int32], largest: int, direct: int, memory: int) -> tuple[NDArray[np.int32], ...]:
    """Return the arrays of the `SubIndex` of tokens (int32 [n + PAD], ids up to `largest`), with `direct` buckets. Uses
    libdivsufsort if it is installed and `memory` bytes suffice for it, tokens included."""
    if divsufsort.can_sort(len(tokens) - PAD, largest, memory):
        return with_tables(tokens, divsufsort.sort_suffixes(tokens, largest), direct)
    return sorted_arrays(tokens, direct)


def parse_size(text: str) -> int:
    """Return the bytes in "2GiB", "500 MB" or "1073741824"; `DatastoreError` if it is not a size."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise DatastoreError(f"{text!r} is not a size for --memory: write for instance 2GiB or 500MB") from None


def format_size(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the present memory of this process in bytes."""
    match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def peak_resident_bytes() -> int:
    # Not ru_maxrss: on Linux it includes the peak of the parent process.
    return resident_bytes("VmHWM")


def sub_index_memory(memory: int, workers: int = 1) -> int:
    """Return the bytes for each of `workers` concurrent sorts in a build with `memory` bytes in total, this process's
    present memory included; `DatastoreError` if that is too little."""
    overhead = resident_bytes() + _READING_BYTES
    minimum = overhead + workers * _MIN_SORT_BYTES
    if memory < minimum:
        raise DatastoreError(f"--memory {format_size(memory)} is too little: give at least {format_size(minimum)}")
    return (memory - overhead) // workers
