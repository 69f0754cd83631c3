"""Inputs of a build: files of text, JSON lines and token ids, read as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import SEPARATOR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARS = 1 << 18  # longer documents are tokenised in pieces, cut where a line ends, so that memory stays bounded
BATCH_CHARS = 1 << 20
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


class Piece(NamedTuple):  # of a document
    content: str | NDArray[np.int64]  # text, or token ids in which `SEPARATOR` (-1) ends a document
    last: bool  # the document ends here
    n_bytes: int  # of input read for it


class Block(NamedTuple):  # of some pieces
    tokens: NDArray[np.int64]  # a `SEPARATOR` after each document
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
    """Yield the token ids of `pieces`, batch after batch; tokenizer: None if none is text."""
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        content = piece.content
        if isinstance(content, str):
            batch.append(piece)
            chars += len(content) + 16
        if batch and (chars >= BATCH_CHARS or not isinstance(content, str)):
            yield _encode(batch, tokenizer)
            batch, chars = [], 0
        if not isinstance(content, str):
            yield Block(np.append(content, SEPARATOR) if piece.last else content, piece.n_bytes)
    if batch:
        yield _encode(batch, tokenizer)


def _encode(batch: list[Piece], tokenizer: Any) -> Block:
    encodings = tokenizer.encode_batch_fast([piece.content for piece in batch], add_special_tokens=False)
    ends = ((SEPARATOR,) if piece.last else () for piece in batch)
    ids = chain.from_iterable(chain.from_iterable(zip((e.ids for e in encodings), ends, strict=True)))
    return Block(np.fromiter(ids, np.int64), sum(piece.n_bytes for piece in batch))
