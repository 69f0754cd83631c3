"""The datastore on disk: a directory with a manifest and one folder of raw arrays per sub-index.

    STORE/manifest.json
    STORE/<sub-index>/tokens.i32           int32 [n + PAD]
    STORE/<sub-index>/suffix_array.i32     int32 [m]
    STORE/<sub-index>/bucket_starts.i32    int32 [D + 1]

The arrays are those of `SubIndex`, little-endian, without headers: each starts on a page and is mapped as it is. Files
are never changed once the manifest names them. A change of the store is new folders, then a manifest that replaces the
old one atomically; a folder that no manifest names is garbage.

Readers ignore manifest keys that they do not know, so later writers may add some (at the top, to a sub-index, to a
file). What a reader must not ignore, a writer lists in `requires`; a reader refuses a store that requires a feature
it lacks. `format_version` changes only when the arrays or these rules do.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import freedraft
from sssd_plugin.datastore.checksum import BLOCK_BYTES, FileEntry
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting
from sssd_plugin.datastore.sub_index import MAX_DIRECT_BUCKETS, PAD

FORMAT: Final = "freedraft-datastore"
FORMAT_VERSION: Final = 1
FEATURES: frozenset[str] = frozenset()
"""What a store may require and this version provides."""

MANIFEST = "manifest.json"
LIVE = "live"
"""Folder of what was learnt while serving; see `sssd_plugin.datastore.segments`."""
MAX_VOCAB_SIZE = 1 << 31

Role = Literal["tokens", "suffix_array", "bucket_starts"]
ROLES: tuple[Role, ...] = ("tokens", "suffix_array", "bucket_starts")
Count = Annotated[int, Field(ge=0)]


def file_name(role: Role) -> str:
    return f"{role}.i32"


class SubIndexEntry(BaseModel):
    """One sub-index: its folder, what is in it, and its files.

    Attributes:
        n_tokens: tokens of the documents, separators not counted: the length of the suffix array.
        n_documents: documents; each has one separator after it.
        max_token: largest token id.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
    n_tokens: Count
    n_documents: Count
    max_token: Annotated[int, Field(ge=-1, lt=MAX_VOCAB_SIZE)]
    files: dict[Role, FileEntry]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(entry.size for entry in self.files.values())


class TokenizerEntry(BaseModel):
    """The tokenizer whose ids the store holds; see `sssd_plugin.datastore.tokenizer.fingerprint`."""

    model_config = ConfigDict(frozen=True)

    name: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """What a datastore holds, and how to tell that it is whole.

    Attributes:
        vocab_size: ids are below it. The direct buckets of every sub-index are min(vocab_size, 2^20).
        tokenizer: None if the store was built from token ids without a tokenizer.
        requires: features that a reader must have.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["freedraft-datastore"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    tokenizer: TokenizerEntry | None = None
    separator: Literal[-1] = -1
    padding: Literal[32] = 32
    block_bytes: Literal[67108864] = 67108864
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    created_by: str = f"freedraft {freedraft.__version__}"
    sub_indices: tuple[SubIndexEntry, ...]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Manifest:
        buckets = min(self.vocab_size, MAX_DIRECT_BUCKETS)
        names = {sub.name for sub in self.sub_indices}
        if len(names) != len(self.sub_indices):
            raise ValueError("two sub-indices have the same name")
        for sub in self.sub_indices:
            items = {
                "tokens": sub.n_tokens + sub.n_documents + PAD,
                "suffix_array": sub.n_tokens,
                "bucket_starts": buckets + 1,
            }
            for role in ROLES:
                if role not in sub.files:
                    raise ValueError(f"sub-index {sub.name} lacks its {role}")
                entry = sub.files[role]
                if entry.size != 4 * items[role] or len(entry.crc32) != -(-entry.size // BLOCK_BYTES):
                    raise ValueError(f"the {role} of sub-index {sub.name} do not agree with its counts")
            if sub.max_token >= self.vocab_size:
                raise ValueError(f"sub-index {sub.name} holds ids beyond the vocabulary")
        return self

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents, separators not counted."""
        return sum(sub.n_tokens for sub in self.sub_indices)

    @property
    def n_documents(self) -> int:
        return sum(sub.n_documents for sub in self.sub_indices)

    @property
    def max_token(self) -> int:
        """Largest token id; -1 if there is none."""
        return max((sub.max_token for sub in self.sub_indices), default=-1)

    @property
    def size(self) -> int:
        """Bytes on disk, the manifest not counted."""
        return sum(sub.size for sub in self.sub_indices)

    def files(self, directory: Path) -> list[tuple[Path, FileEntry]]:
        """Paths of all array files under `directory`, with what is recorded of them."""
        return [(directory / sub.name / file_name(r), sub.files[r]) for sub in self.sub_indices for r in ROLES]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write (or atomically replace) the manifest of `directory`, mode 0600.

    Raises:
        DatastoreError: the disk refuses.
    """
    content = manifest.model_dump(mode="json")
    content["checksum"] = _checksum(content)
    temporary = directory / f".{MANIFEST}.{os.getpid()}"
    with reporting("write", temporary):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of `directory`.

    Raises:
        DatastoreError: there is no store, it is of a newer format, or its manifest is damaged.
    """
    path = directory / MANIFEST
    content = _read_json(directory, path)
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DatastoreError(
            f"{path} has format version {version}, newer than the {FORMAT_VERSION} that freedraft "
            f"{freedraft.__version__} reads: upgrade freedraft, or {REBUILD}"
        )
    recorded = content.pop("checksum", None)
    if recorded != _checksum(content):
        raise DatastoreError(f"{path} is corrupted: its checksum does not match; restore it, or {REBUILD}")
    required = content.get("requires")
    missing = [f for f in required if f not in FEATURES] if isinstance(required, list) else []
    if missing:
        raise DatastoreError(
            f"{path} requires {', '.join(map(str, missing))}, which freedraft {freedraft.__version__} does not know: "
            f"upgrade freedraft, or {REBUILD}"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "contents"
        message = first["msg"].removeprefix("Value error, ")
        raise DatastoreError(f"{path} is not a valid manifest ({where}: {message}): {REBUILD}") from None


def _read_json(directory: Path, path: Path) -> dict[str, Any]:
    if sys.byteorder != "little":
        raise DatastoreError(f"{directory} holds little-endian arrays, which this machine cannot map: use another one")
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not directory.exists():
            raise DatastoreError(
                f"no datastore at {directory}: correct the path, or build one with "
                f"`freedraft datastore build {directory} --tokenizer DIR INPUT...`"
            ) from None
        raise DatastoreError(
            f"{directory} is not a datastore (no {MANIFEST}): give the directory that "
            f"`freedraft datastore build` made, or build one"
        ) from None
    except NotADirectoryError:
        raise DatastoreError(
            f"{directory} is a file, not a datastore: give the directory that `freedraft datastore build` made"
        ) from None
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror}; give this user access") from None
    except (ValueError, RecursionError):
        raise DatastoreError(f"{path} is corrupted: not JSON; restore it, or {REBUILD}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DatastoreError(f"{path} does not describe a freedraft datastore: correct the path, or {REBUILD}")
    return content


def _checksum(content: dict[str, Any]) -> str:
    """CRC-32 of the manifest's content without its checksum, in canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{zlib.crc32(canonical.encode()):08x}"
