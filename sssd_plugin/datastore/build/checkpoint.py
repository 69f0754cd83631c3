"""`BuildCheckpoint`: the token ids of a build that may be interrupted, kept beside the target until it is done."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from freedraft.files import FileLock, write_all, write_json_atomically
from sssd_plugin.datastore.build.sources import Input, Piece, check_ids, read_pieces, tokenize
from sssd_plugin.datastore.errors import DatastoreError, reporting

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKPOINT_SECONDS = 5.0
_BLOCK = 1 << 20


class BuildCheckpoint:
    """Tokens read so far and how far that is, on disk.

    Tokenising takes most of a build, so that is what is not done twice; sorting starts from the kept tokens.

    Args:
        target: the store to be; the checkpoint is its hidden sibling.
        inputs, fields: what is read.
        tokenizer: fingerprint, or none.
        vocab_size: ids are below it.

    Raises:
        DatastoreError: another build uses the checkpoint, or the disk refuses.
    """

    def __init__(
        self, target: Path, inputs: Sequence[Input], fields: Sequence[str], tokenizer: str | None, vocab_size: int
    ) -> None:
        self._inputs, self._fields, self._vocab_size = inputs, fields, vocab_size
        target = target.resolve()
        self.folder = target.parent / f".{target.name}.resume"
        self._tokens = self.folder / "tokens.i32"
        self._progress = self.folder / "progress.json"
        # Other files, or the same ones changed since, or another tokenizer: another build, which begins anew.
        files = [[str(i.path.resolve()), i.kind, i.size, i.path.stat().st_mtime_ns] for i in inputs]
        described = [files, list(fields), tokenizer, vocab_size]
        self._key = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        with reporting("write", self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._lock = FileLock(self.folder)
            except BlockingIOError:
                raise DatastoreError(f"another build uses {self.folder}: wait for it, or choose another path") from None
        self.pieces = self.size = self.n_bytes = 0
        self.done = False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            progress = json.loads(self._progress.read_bytes())
            if progress["key"] == self._key and self._tokens.stat().st_size >= int(progress["size"]):
                self.pieces, self.size, self.n_bytes = (int(progress[k]) for k in ("pieces", "size", "n_bytes"))
                self.done = bool(progress["done"])

    @property
    def n_tokens(self) -> int:
        """Tokens kept, separators included."""
        return self.size // 4

    def fill(self, tokenizer: Tokenizer | None, on_read: Callable[[int], None] = lambda n_bytes: None) -> None:
        """Read what is missing.

        Args:
            on_read: called with the input bytes of each batch.

        Raises:
            DatastoreError: see `sources`; an id outside the vocabulary; a full disk.
        """
        if self.done:
            return
        pulled = consumed = 0
        saved = time.monotonic()

        def counted(pieces: Iterable[Piece]) -> Iterator[Piece]:
            nonlocal pulled
            for piece in pieces:
                self.pieces += 1
                pulled += piece.n_bytes
                yield piece

        def read(n_bytes: int) -> None:
            nonlocal consumed, saved
            consumed += n_bytes
            on_read(n_bytes)
            self.n_bytes += n_bytes
            # Only where everything that was pulled is in the file can reading go on later.
            if consumed == pulled and time.monotonic() - saved >= CHECKPOINT_SECONDS:
                self._save(fd)
                saved = time.monotonic()

        with reporting("write", self._tokens):
            fd = os.open(self._tokens, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with reporting("write", self._tokens):
                os.truncate(fd, self.size)
                os.lseek(fd, self.size, os.SEEK_SET)
            pieces = islice(read_pieces(self._inputs, self._fields), self.pieces, None)
            for tokens in tokenize(counted(pieces), tokenizer, read):
                check_ids(tokens, self._vocab_size)
                with reporting("write", self._tokens):
                    write_all(fd, np.ascontiguousarray(tokens, "<i4").tobytes())
                self.size += 4 * len(tokens)
            self.done = True
            self._save(fd)
        finally:
            os.close(fd)

    def blocks(self) -> Iterator[NDArray[np.int32]]:
        """Yield the tokens (int32), a block at a time."""
        # Not mapped: pages of a map would count as this process's memory.
        with reporting("read", self._tokens), self._tokens.open("rb") as file:
            for start in range(0, self.n_tokens, _BLOCK):
                yield np.fromfile(file, "<i4", min(_BLOCK, self.n_tokens - start))

    def close(self) -> None:
        """Let the next build go on from here."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # the build is done
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def _save(self, fd: int) -> None:
        progress = {"key": self._key, "pieces": self.pieces, "size": self.size, "n_bytes": self.n_bytes}
        with reporting("write", self._progress):
            os.fsync(fd)
            write_json_atomically(self._progress, progress | {"done": self.done}, mode=0o600)
