"""`BuildCheckpoint`: token ids of a build, kept next to the target until it is done, so that it can be resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from freedraft.files import FileLock, write_all, write_json_atomically
from sssd_plugin.datastore.build.sources import Block, Input, read_pieces, tokenize
from sssd_plugin.datastore.errors import DatastoreError, reporting

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKPOINT_SECONDS = 5.0
_BLOCK_TOKENS = 1 << 20


class BuildCheckpoint:
    """Tokens read so far, in a hidden sibling of the target, so that tokenising, most of a build's time, is not
    repeated. Other or changed files, or another tokenizer, restart it. Raises DatastoreError: another build uses the
    checkpoint, or a disk error."""

    def __init__(
        self, target: Path, inputs: Sequence[Input], fields: Sequence[str], fingerprint: str | None, vocab_size: int
    ) -> None:
        self._inputs, self._fields = inputs, fields
        target = target.resolve()
        self.folder = target.parent / f".{target.name}.resume"
        self._tokens, self._file = self.folder / "tokens.i32", self.folder / "progress.json"
        files = [[str(i.path.resolve()), i.kind, i.size, i.path.stat().st_mtime_ns] for i in inputs]
        key = hashlib.sha256(json.dumps([files, list(fields), fingerprint, vocab_size]).encode()).hexdigest()
        with reporting("write", self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._lock = FileLock(self.folder)
            except BlockingIOError:
                raise DatastoreError(f"another build uses {self.folder}: wait for it, or choose another path") from None
        self._progress: dict[str, Any] = {"key": key, "pieces": 0, "size": 0, "n_bytes": 0, "done": False}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_bytes())
            if kept["key"] == key and self._tokens.stat().st_size >= kept["size"]:
                self._progress = {name: kept[name] for name in self._progress}

    @property
    def n_tokens(self) -> int:  # kept, separators included
        return self._progress["size"] // 4

    def blocks(self, tokenizer: Tokenizer | None) -> Iterator[Block]:
        """Yield the kept tokens, then read on, and keep each block that the caller has processed; errors: see
        `sources`."""
        progress = self._progress
        # Not mapped: mapped pages would count as this process's memory.
        with reporting("read", self._tokens), self._tokens.open("a+b", buffering=0) as file:
            file.truncate(progress["size"])
            file.seek(0)
            n_bytes, left = progress["n_bytes"], self.n_tokens
            while left:
                tokens = np.fromfile(file, "<i4", min(_BLOCK_TOKENS, left))
                yield Block(tokens, 0, n_bytes)
                n_bytes, left = 0, left - len(tokens)
            if progress["done"]:
                return
            saved = time.monotonic()
            for block in tokenize(islice(read_pieces(self._inputs, self._fields), progress["pieces"], None), tokenizer):
                yield block
                with reporting("write", self._tokens):
                    write_all(file.fileno(), block.tokens.astype("<i4").view(np.uint8).data)
                progress["pieces"] += block.n_pieces
                progress["size"] += 4 * len(block.tokens)
                progress["n_bytes"] += block.n_bytes
                if time.monotonic() - saved >= CHECKPOINT_SECONDS:
                    self._save(file.fileno())
                    saved = time.monotonic()
            progress["done"] = True
            self._save(file.fileno())

    def close(self) -> None:
        """Keep the checkpoint for the next build."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # the build is done
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def _save(self, fd: int) -> None:
        with reporting("write", self._file):
            os.fsync(fd)
            write_json_atomically(self._file, self._progress, mode=0o600)
