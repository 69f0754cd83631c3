"""`Spool`: the token ids of a build that may be interrupted, kept beside the target until the build is done."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.sources import Input, Piece, read_pieces, tokenize
from sssd_plugin.datastore.sub_index import SEPARATOR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKPOINT_SECONDS = 5.0
_BLOCK = 1 << 20


class Spool:
    """Tokens read so far and how far that is, on disk.

    Tokenising takes most of a build, so that is what is not done twice; sorting starts from the spool.

    Args:
        target: the store to be; the spool is its hidden sibling.
        inputs, fields: what is read.
        tokenizer: fingerprint, or none.
        vocab_size: ids are below it.

    Raises:
        DatastoreError: another build uses the spool, or the disk refuses.
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
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DatastoreError(f"another build uses {self.folder}: wait for it, or choose another path") from None
        except OSError:
            pass  # a file system without locks
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
            on_read: told the input bytes of each batch.

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
                self._save(file.fileno())
                saved = time.monotonic()

        with reporting("write", self._tokens):
            fd = os.open(self._tokens, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            with reporting("write", self._tokens):
                file.truncate(self.size)
                file.seek(self.size)
            pieces = islice(read_pieces(self._inputs, self._fields), self.pieces, None)
            for tokens in tokenize(counted(pieces), tokenizer, read):
                self._append(file, tokens)
            self.done = True
            self._save(file.fileno())

    def blocks(self) -> Iterator[NDArray[np.int32]]:
        """The tokens (int32), a block at a time."""
        # Not mapped: pages of a map would count as this process's memory.
        with reporting("read", self._tokens), self._tokens.open("rb") as file:
            for start in range(0, self.n_tokens, _BLOCK):
                yield np.fromfile(file, "<i4", min(_BLOCK, self.n_tokens - start))

    def close(self) -> None:
        """Let the next build have it."""
        os.close(self._lock)

    def remove(self) -> None:
        """The build is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _append(self, file: object, tokens: NDArray[np.integer]) -> None:
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < SEPARATOR or high >= self._vocab_size:
            raise DatastoreError(
                f"token id {low if low < SEPARATOR else high} is outside the vocabulary of {self._vocab_size}: "
                f"give the tokenizer that made these ids, or a larger --vocab-size"
            )
        view = np.ascontiguousarray(tokens, "<i4").view(np.uint8).data
        with reporting("write", self._tokens):
            while view:
                n = file.write(view)  # type: ignore[attr-defined]
                view = view[n:]
                self.size += n

    def _save(self, fd: int) -> None:
        progress = {"key": self._key, "pieces": self.pieces, "size": self.size, "n_bytes": self.n_bytes}
        temporary = self._progress.with_suffix(".new")
        with reporting("write", self._progress):
            os.fsync(fd)
            new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(new, "w") as file:
                json.dump(progress | {"done": self.done}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._progress)
