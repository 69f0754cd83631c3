"""Inputs of a build: files of text, JSON lines and token ids, read as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import SEPARATOR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["text", "jsonl", "npy"]

PIECE_CHARS = 1 << 18
"""Longer documents are tokenised in pieces, cut where a line ends, so that memory stays bounded."""
BATCH_CHARS = 1 << 20
_NPY_BLOCK = 1 << 20
_SNIFF_BYTES = 1 << 13
_LINE_END = re.compile(r"\n(?=\S)")
_SPACE = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True, slots=True)
class Input:
    """One input file."""

    path: Path
    kind: Kind
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document.

    Attributes:
        content: text, or integer token ids in which `SEPARATOR` (-1) ends a document.
        last: the document ends here.
        n_bytes: bytes of input read for it.
    """

    content: str | NDArray[np.integer]
    last: bool
    n_bytes: int


def find_inputs(paths: Iterable[Path], pattern: str = "**/*") -> list[Input]:
    """Return the files that `paths` name; of a folder, sorted, those that match `pattern` and are not hidden or binary.

    Raises:
        DatastoreError: a path that does not exist, a named file that is binary, or nothing found.
    """
    inputs: list[Input] = []
    for path in paths:
        with reporting("read", path):
            if not path.exists():
                raise DatastoreError(f"{path} does not exist: correct the path of the input")
            files = [*_walk(path, pattern)] if path.is_dir() else [_input(path)]
        if not files:
            raise DatastoreError(f"no text, .jsonl or .npy file in {path} matches {pattern!r}: correct --glob")
        if None in files:
            raise DatastoreError(f"{path} is binary: inputs are UTF-8 text, .jsonl and .npy files")
        inputs += [file for file in files if file]
    return inputs


def _walk(folder: Path, pattern: str) -> Iterator[Input]:
    try:
        matches = sorted(folder.glob(pattern))
    except (ValueError, NotImplementedError):
        raise DatastoreError(
            f"--glob {pattern!r} is not a pattern relative to the folder, such as '**/*.txt'"
        ) from None
    for path in matches:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file() and (file := _input(path)):
            yield file


def _input(path: Path) -> Input | None:
    """Return the input file at `path`; None for a binary one."""
    kinds: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy"}
    kind = kinds.get(path.suffix.lower(), "text")
    if kind == "text":
        with path.open("rb") as file:
            if b"\0" in file.read(_SNIFF_BYTES):
                return None
    return Input(path, kind, path.stat().st_size)


def read_pieces(inputs: Iterable[Input], fields: Sequence[str] = ("text",)) -> Iterator[Piece]:
    """Yield all documents of `inputs`, in order, in pieces.

    Raises:
        DatastoreError: a line that is not JSON or lacks a field, an array that holds no token ids; names file and line.
    """
    for source in inputs:
        with reporting("read", source.path):
            if source.kind == "jsonl":
                yield from _read_jsonl(source.path, fields)
            elif source.kind == "npy":
                yield from _read_npy(source.path)
            else:
                yield from _read_text(source.path)


def _read_text(path: Path) -> Iterator[Piece]:
    # Bytes that are not UTF-8 become U+FFFD: it would be a pity to stop a long build for one.
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
            n_bytes = len(line)
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise DatastoreError(f"{path}, line {number} is not JSON: correct the line or remove it") from None
            for field in fields:
                pieces = _split(_lookup(row, field, path, number))
                for i, piece in enumerate(pieces, start=1):
                    yield Piece(piece, i == len(pieces), n_bytes)
                    n_bytes = 0


def _lookup(row: Any, field: str, path: Path, number: int) -> str:
    """Return the string at `field`, whose parts are separated by dots; "" for null."""
    value = row
    # A key that contains dots itself comes first.
    keys = [field] if isinstance(row, dict) and field in row else field.split(".")
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(map(str, row)) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
            raise DatastoreError(
                f"{path}, line {number} has no field {field!r}: choose --field from its fields ({known})"
            )
        value = value[key]
    if value is not None and not isinstance(value, str):
        raise DatastoreError(
            f"{path}, line {number}: field {field!r} is a {type(value).__name__}, not a string; choose another --field"
        )
    return value or ""


def _read_npy(path: Path) -> Iterator[Piece]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise DatastoreError(f"{path} is not a .npy array: save it with numpy.save") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DatastoreError(f"{path} must hold a one-dimensional integer array of token ids, -1 between documents")
    for a in range(0, len(tokens), _NPY_BLOCK):
        block = np.array(tokens[a : a + _NPY_BLOCK])
        yield Piece(block, last=a + len(block) == len(tokens), n_bytes=block.nbytes)


def _split(text: str) -> list[str]:
    """Cut a long text into pieces of about `PIECE_CHARS`, where a line or at least a word ends."""
    pieces = []
    while len(text) > 2 * PIECE_CHARS:
        window = PIECE_CHARS, 2 * PIECE_CHARS
        match = _LINE_END.search(text, *window) or _SPACE.search(text, *window)
        cut = match.end() if match else PIECE_CHARS
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def check_ids(tokens: NDArray[np.integer], vocab_size: int) -> None:
    """Raise `DatastoreError` unless all are token ids below `vocab_size`, or separators."""
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < SEPARATOR or high >= vocab_size:
        raise DatastoreError(
            f"token id {low if low < SEPARATOR else high} is outside the vocabulary of {vocab_size}: "
            f"give the tokenizer that made these ids, or a larger --vocab-size"
        )


def tokenize(
    pieces: Iterable[Piece], tokenizer: Tokenizer | None, on_read: Callable[[int], None] = lambda n_bytes: None
) -> Iterator[NDArray[np.integer]]:
    """Yield the token ids of `pieces`, batch after batch, with a `SEPARATOR` after each document.

    Args:
        tokenizer: needed for text only.
        on_read: called with the input bytes of each batch once it is consumed.

    Raises:
        DatastoreError: text and no tokenizer.
    """
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        if isinstance(piece.content, str):
            if tokenizer is None:
                raise DatastoreError("text needs a tokenizer: give --tokenizer, the folder of the model")
            batch.append(piece)
            chars += len(piece.content) + 16
            if chars < BATCH_CHARS:
                continue
        yield from _flush(batch, tokenizer, on_read)
        batch, chars = [], 0
        if not isinstance(piece.content, str):
            yield piece.content
            if piece.last:
                yield np.array([SEPARATOR], np.int32)
            on_read(piece.n_bytes)
    yield from _flush(batch, tokenizer, on_read)


def _flush(
    batch: list[Piece], tokenizer: Tokenizer | None, on_read: Callable[[int], None]
) -> Iterator[NDArray[np.integer]]:
    if not batch or tokenizer is None:
        return
    texts = [piece.content for piece in batch]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ends = ((SEPARATOR,) if piece.last else () for piece in batch)
    ids = chain.from_iterable(chain.from_iterable(zip((e.ids for e in encodings), ends, strict=True)))
    tokens = np.fromiter(ids, np.int64)
    del encodings
    yield tokens
    on_read(sum(piece.n_bytes for piece in batch))
