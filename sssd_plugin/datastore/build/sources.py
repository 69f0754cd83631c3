"""Inputs of a build: files of text, JSON lines and token ids, read as a stream, which a `BuildCheckpoint` resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from freedraft.files import FileLock, write_all, write_json_atomically
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import SEPARATOR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARS = 1 << 18  # longer documents are tokenised in pieces, cut where a line ends, so that memory stays bounded
BATCH_CHARS = 1 << 20
CHECKPOINT_SECONDS = 5.0
_BLOCK_TOKENS = 1 << 20
_SNIFF_BYTES = 1 << 13
_LINE_END = re.compile(r"\n(?=\S)")
_SPACE = re.compile(r"(?<=\S)(?=\s)")

Kind = Literal["text", "jsonl", "npy"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy"}


class Input(NamedTuple):
    path: Path
    kind: Kind
    size: int  # bytes


class Piece(NamedTuple):
    """A part of a document."""

    content: str | NDArray[np.int64]  # text, or token ids in which `SEPARATOR` (-1) ends a document
    last: bool  # the document ends here
    n_bytes: int  # of input read for it


class Block(NamedTuple):
    """The token ids of some pieces."""

    tokens: NDArray[np.int64]  # a `SEPARATOR` after each document
    n_pieces: int
    n_bytes: int


def find_inputs(paths: Iterable[Path], pattern: str = "**/*") -> list[Input]:
    """Return the files of `paths`; of a folder the sorted ones that match `pattern` and are neither hidden nor binary.
    `DatastoreError` if a path does not exist, a named file is binary, or no file is found."""
    inputs: list[Input] = []
    for path in paths:
        with reporting("read", path):
            if not path.exists():
                raise DatastoreError(f"{path} does not exist: correct the path of the input")
            names = _walk(path, pattern) if path.is_dir() else [path]
            files = [Input(name, kind, name.stat().st_size) for name in names if (kind := _kind(name))]
            if not files and path.is_dir():
                raise DatastoreError(f"no text, .jsonl or .npy file in {path} matches {pattern!r}: correct --glob")
        if not files:
            raise DatastoreError(f"{path} is binary: inputs are UTF-8 text, .jsonl and .npy files")
        inputs += files
    return inputs


def _walk(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        matches = sorted(folder.glob(pattern))
    except (ValueError, NotImplementedError):
        raise DatastoreError(f"--glob {pattern!r} is not a pattern relative to the folder, as is '**/*.txt'") from None
    for path in matches:
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _kind(path: Path) -> Kind | None:
    if (kind := _KINDS.get(path.suffix.lower())) is not None:
        return kind
    with path.open("rb") as file:
        return None if b"\0" in file.read(_SNIFF_BYTES) else "text"


def read_pieces(inputs: Iterable[Input], fields: Sequence[str] = ("text",)) -> Iterator[Piece]:
    """Yield all documents of `inputs`, in order, in pieces; `DatastoreError`, with file and line: no JSON, a missing
    field, or no token ids."""
    for path, kind, _ in inputs:
        with reporting("read", path):
            if kind == "jsonl":
                yield from _read_jsonl(path, fields)
            else:
                yield from (_read_npy if kind == "npy" else _read_text)(path)


def _read_text(path: Path) -> Iterator[Piece]:
    # Invalid UTF-8 becomes U+FFFD, rather than stopping a long build.
    with path.open("r", encoding="utf-8-sig", errors="replace") as file:
        rest, done = "", 0
        while block := file.read(PIECE_CHARS):
            at = file.buffer.tell()  # type: ignore[attr-defined]
            *pieces, rest = _split(rest + block)
            for piece in pieces:
                yield Piece(piece, last=False, n_bytes=at - done)
                done = at
        yield Piece(rest, last=True, n_bytes=path.stat().st_size - done)


def _read_jsonl(path: Path, fields: Sequence[str]) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where, n_bytes = f"{path}, line {number}", len(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise DatastoreError(f"{where} is not JSON: correct the line or remove it") from None
            for field in fields:
                *pieces, rest = _split(_lookup(row, field, where))
                yield from (Piece(piece, last=False, n_bytes=0) for piece in pieces)
                yield Piece(rest, last=True, n_bytes=n_bytes)
                n_bytes = 0


def _lookup(row: Any, field: str, where: str) -> str:
    """Return the string at `field` (keys separated by dots); "" for null."""
    value = row
    # Keys that contain dots themselves take precedence.
    for key in [field] if isinstance(row, dict) and field in row else field.split("."):
        if not isinstance(value, dict) or key not in value:
            fields = ", ".join(map(str, row)) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
            raise DatastoreError(f"{where} has no field {field!r}: choose --field from its fields ({fields})")
        value = value[key]
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise DatastoreError(f"{where}: field {field!r} is a {kind}, not a string; choose another --field")
    return value or ""


def _read_npy(path: Path) -> Iterator[Piece]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise DatastoreError(f"{path} is not a .npy array: save it with numpy.save") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DatastoreError(f"{path} must hold a one-dimensional integer array of token ids, -1 between documents")
    for a in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[a : a + _BLOCK_TOKENS]
        yield Piece(block.astype(np.int64), last=a + len(block) == len(tokens), n_bytes=block.nbytes)


def _split(text: str) -> list[str]:
    """Cut a long text into pieces of about `PIECE_CHARS`, at the end of a line or at least of a word."""
    pieces = []
    while len(text) > 2 * PIECE_CHARS:
        window = PIECE_CHARS, 2 * PIECE_CHARS
        match = _LINE_END.search(text, *window) or _SPACE.search(text, *window)
        cut = match.end() if match else PIECE_CHARS
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def tokenize(pieces: Iterable[Piece], tokenizer: Tokenizer | None) -> Iterator[Block]:
    """Yield the token ids of `pieces`, batch after batch; `DatastoreError` if one is text and there is no tokenizer."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        content = piece.content
        if isinstance(content, str):
            if tokenizer is None:
                raise DatastoreError("text needs a tokenizer: give --tokenizer, the folder of the model")
            batch.append(piece)
            chars += len(content) + 16
        if batch and (chars >= BATCH_CHARS or not isinstance(content, str)):
            yield _encode(batch, tokenizer)
            batch, chars = [], 0
        if not isinstance(content, str):
            yield Block(np.append(content, SEPARATOR) if piece.last else content, 1, piece.n_bytes)
    if batch:
        yield _encode(batch, tokenizer)


def _encode(batch: list[Piece], tokenizer: Any) -> Block:
    encodings = tokenizer.encode_batch_fast([piece.content for piece in batch], add_special_tokens=False)
    ends = ((SEPARATOR,) if piece.last else () for piece in batch)
    ids = chain.from_iterable(chain.from_iterable(zip((e.ids for e in encodings), ends, strict=True)))
    return Block(np.fromiter(ids, np.int64), len(batch), sum(piece.n_bytes for piece in batch))


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
