"""The datastore on disk: a directory with a manifest and one folder of raw arrays per sub-index.

    STORE/manifest.json
    STORE/<sub-index>/tokens.i32           int32 [n + PAD]
    STORE/<sub-index>/suffix_array.i32     int32 [m]
    STORE/<sub-index>/bucket_starts.i32    int32 [D + 1]
    STORE/<sub-index>/sparse_index.i32     int32 [ceil(m / 16)]

The arrays are those of `SubIndex`, little-endian, without headers: each starts on a page and is mapped as it is. Files
are never changed once the manifest names them. A change of the store is new folders, then a manifest that replaces the
old one atomically; a folder that no manifest names is garbage.

Manifest keys may be added at the top, to a sub-index, to a file; see `manifest`. `format_version` changes only when the
arrays or these rules do.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

import freedraft
from sssd_plugin.datastore.disk.checksum import BLOCK_BYTES, Bounds, Checked, FileEntry
from sssd_plugin.datastore.disk.manifest import ChecksummedManifest
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import PAD, SEPARATOR, SPARSE_STEP, direct_buckets

MANIFEST = "manifest.json"
LIVE = "live"
"""Folder of what was learnt while serving; see `sssd_plugin.datastore.live.folder`."""
MAX_VOCAB_SIZE = 1 << 31

Role = Literal["tokens", "suffix_array", "bucket_starts", "sparse_index"]
ROLES: tuple[Role, ...] = ("tokens", "suffix_array", "bucket_starts", "sparse_index")
Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Isolation = Literal["tenant", "shared", "off"]


def file_name(role: Role) -> str:
    return f"{role}.i32"


class SubIndexEntry(BaseModel, frozen=True):
    """One sub-index: its folder, what is in it, and its files.

    Attributes:
        n_tokens: tokens of the documents, separators not counted: the length of the suffix array.
        n_documents: documents; each has one separator after it.
        max_token: largest token id.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
    n_tokens: Count
    n_documents: Count
    max_token: Annotated[int, Field(ge=-1, lt=MAX_VOCAB_SIZE)]
    files: dict[Role, FileEntry]

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of its files; older stores have no sparse index, which is then made when they are opened."""
        return ROLES if "sparse_index" in self.files else ROLES[:3]

    @property
    def size(self) -> int:  # bytes on disk
        return sum(entry.size for entry in self.files.values())


class TokenizerEntry(BaseModel, frozen=True):
    name: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # see `sssd_plugin.datastore.tokenizer`


class Manifest(ChecksummedManifest, frozen=True):
    """What a datastore holds, and how to tell that it is whole.

    Attributes:
        vocab_size: ids are below it. The direct buckets of every sub-index are min(vocab_size, 2^20).
        tokenizer: None if the store was built from token ids without a tokenizer.
        requires: features that a reader must have; none so far.
    """

    DESCRIBES: ClassVar[str] = "a freedraft datastore"
    REMEDY: ClassVar[str] = REBUILD
    ALTERNATIVE: ClassVar[str] = REBUILD

    format: Literal["freedraft-datastore"] = "freedraft-datastore"
    format_version: Literal[1] = 1
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
        if len({sub.name for sub in self.sub_indices}) != len(self.sub_indices):
            raise ValueError("two sub-indices have the same name")
        for sub in self.sub_indices:
            items = {
                "tokens": sub.n_tokens + sub.n_documents + PAD,
                "suffix_array": sub.n_tokens,
                "bucket_starts": direct_buckets(self.vocab_size) + 1,
                "sparse_index": -(-sub.n_tokens // SPARSE_STEP),
            }
            for role in sub.roles:
                if role not in sub.files:
                    raise ValueError(f"sub-index {sub.name} lacks its {role}")
                entry = sub.files[role]
                if entry.size != 4 * items[role] or len(entry.crc32) != -(-entry.size // BLOCK_BYTES):
                    raise ValueError(f"the {role} of sub-index {sub.name} do not agree with its counts")
            if sub.max_token >= self.vocab_size:
                raise ValueError(f"sub-index {sub.name} holds ids beyond the vocabulary")
        return self

    @property
    def n_tokens(self) -> int:  # separators not counted
        return sum(sub.n_tokens for sub in self.sub_indices)

    @property
    def n_documents(self) -> int:
        return sum(sub.n_documents for sub in self.sub_indices)

    @property
    def max_token(self) -> int:  # -1 if there is none
        return max((sub.max_token for sub in self.sub_indices), default=-1)

    @property
    def size(self) -> int:  # bytes on disk, the manifest not counted
        return sum(sub.size for sub in self.sub_indices)

    def files(self, directory: Path) -> list[Checked]:
        """Return the paths of all array files under `directory`, their entries, and the numbers they may hold."""
        files: list[Checked] = []
        for sub in self.sub_indices:
            bounds: dict[Role, Bounds] = {
                "tokens": Bounds(SEPARATOR, sub.max_token),
                "suffix_array": Bounds(0, sub.n_tokens + sub.n_documents - 1),
                "bucket_starts": Bounds(0, sub.n_tokens, rising=True),
                "sparse_index": Bounds(SEPARATOR, sub.max_token),
            }
            files += [(directory / sub.name / file_name(role), sub.files[role], bounds[role]) for role in sub.roles]
        return files


def digest(directory: Path) -> str:
    """Return the SHA-256 of a store's manifest, which holds those of all files."""
    with reporting("read", directory / MANIFEST):
        return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of `directory`.

    Raises:
        DatastoreError: there is no store, it is of a newer format, or its manifest is damaged.
    """
    if sys.byteorder != "little":
        raise DatastoreError(f"{directory} holds little-endian arrays, which this machine cannot map: use another one")
    path = directory / MANIFEST
    with reporting("read", path):
        if path.exists():
            return Manifest.read(path)
        if not directory.exists():
            raise DatastoreError(
                f"no datastore at {directory}: correct the path, or build one with "
                f"`freedraft datastore build {directory} --tokenizer DIR INPUT...`"
            )
    wrong = f"is not a datastore (no {MANIFEST})" if directory.is_dir() else "is a file, not a datastore"
    raise DatastoreError(f"{directory} {wrong}: give the directory that `freedraft datastore build` made, or build one")
