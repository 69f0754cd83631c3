"""The datastore on disk: a directory with a manifest and one folder of raw arrays per sub-index.

    STORE/manifest.json
    STORE/<sub-index>/tokens.i32           int32 [n + PAD]
    STORE/<sub-index>/suffix_array.i32     int32 [m]
    STORE/<sub-index>/bucket_starts.i32    int32 [D + 1]
    STORE/<sub-index>/sparse_index.i32     int32 [ceil(m / 16)]

A sub-index of what a fleet learnt has a section for each tenant, and two more files; see `sections`:

    STORE/<sub-index>/sections.i32         int32 [S, 6]
    STORE/<sub-index>/documents.i32        int32 [d, 7]

The arrays are those of `SubIndex`, little-endian, without headers: each starts on a page and is mapped as it is. Files
are never changed once the manifest names them. A change of the store is new folders, then a manifest that replaces the
old one atomically; a folder that no manifest names is garbage.

Manifest keys may be added at the top, to a sub-index, to a file; see `manifest`. `format_version` changes only when the
arrays or these rules do.
"""

from __future__ import annotations

import hashlib
import json
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
from sssd_plugin.datastore.records import Erasure

MANIFEST = "manifest.json"
LIVE = "live"
"""Folder of what was learnt while serving; see `sssd_plugin.datastore.live.folder`."""
MAX_VOCAB_SIZE = 1 << 31

Role = Literal["tokens", "suffix_array", "bucket_starts", "sparse_index", "sections", "documents"]
ROLES: tuple[Role, ...] = ("tokens", "suffix_array", "bucket_starts", "sparse_index")
SECTION_COLUMNS, DOCUMENT_COLUMNS = 6, 7
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
        n_sections: of what was learnt; 0 where the text was built, for everybody.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
    n_tokens: Count
    n_documents: Count
    max_token: Annotated[int, Field(ge=-1, lt=MAX_VOCAB_SIZE)]
    files: dict[Role, FileEntry]
    n_sections: Count = 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of its files; older stores have no sparse index, which is then made when they are opened."""
        roles = ROLES if "sparse_index" in self.files else ROLES[:3]
        return (*roles, "sections", "documents") if self.n_sections else roles

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(entry.size for entry in self.files.values())

    @property
    def address(self) -> str:
        """A digest of the contents."""
        files = {role: self.files[role].model_dump(mode="json") for role in self.roles}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:32]


class TokenizerEntry(BaseModel, frozen=True):
    """The tokenizer whose ids the store holds; see `sssd_plugin.datastore.tokenizer.fingerprint`."""

    name: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ErasureEntry(BaseModel, frozen=True):
    """What is to be forgotten: documents of a tenant (a digest in hex; None for all) from before a time (ms)."""

    tenant: Digest | None
    before: int


class ConsumedEntry(BaseModel, frozen=True):
    """What a store holds of a replica: batches below `number`, documents of before `until`; since when (both ms)."""

    number: Count
    until: int
    at: int


class LearntEntry(BaseModel, frozen=True):
    """What a fleet has learnt.

    Attributes:
        isolation: of its servers.
        key: of the digests that stand for tenants' names, in hex.
        erasures: of documents that may still arrive.
        consumed: by replica.
    """

    isolation: Isolation
    key: Digest
    erasures: tuple[ErasureEntry, ...] = ()
    consumed: dict[str, ConsumedEntry] = {}

    @property
    def forgotten(self) -> list[Erasure]:
        """What `erasures` stand for."""
        return [Erasure(bytes.fromhex(e.tenant) if e.tenant else None, e.before) for e in self.erasures]


class Manifest(ChecksummedManifest, frozen=True):
    """What a datastore holds, and how to tell that it is whole.

    Attributes:
        vocab_size: ids are below it. The direct buckets of every sub-index are min(vocab_size, 2^20).
        tokenizer: None if the store was built from token ids without a tokenizer.
        requires: features that a reader must have.
        learnt: None for a store that only was built.
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
    learnt: LearntEntry | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> Manifest:
        if len({sub.name for sub in self.sub_indices}) != len(self.sub_indices):
            raise ValueError("two sub-indices have the same name")
        for sub in self.sub_indices:
            if sub.n_sections and self.learnt is None:
                raise ValueError(f"sub-index {sub.name} was learnt, and nothing says from whom")
            items = {
                "tokens": sub.n_tokens + sub.n_documents + PAD,
                "suffix_array": sub.n_tokens,
                "bucket_starts": 1 + (direct_buckets(self.vocab_size) if sub.n_sections <= 1 else 0),
                "sparse_index": -(-sub.n_tokens // SPARSE_STEP),
                "sections": SECTION_COLUMNS * sub.n_sections,
                "documents": DOCUMENT_COLUMNS * sub.n_documents,
            }
            for role in sub.roles:
                if role not in sub.files:
                    raise ValueError(f"sub-index {sub.name} lacks its {role}")
                entry = sub.files[role]
                sizes = {4 * items[role]}
                if sub.n_sections and role == "bucket_starts":  # only where they are worth their space
                    sizes = {4, *sizes}
                if sub.n_sections and role == "sparse_index":  # each section has its own
                    sizes = {entry.size}
                if entry.size not in sizes or len(entry.crc32) != -(-entry.size // BLOCK_BYTES):
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

    def files(self, directory: Path) -> list[Checked]:
        """Return the paths of all array files under `directory`, what is recorded of them, and what they may hold."""
        found: list[Checked] = []
        any_number = Bounds(-(1 << 31), (1 << 31) - 1)
        for sub in self.sub_indices:
            bounds: dict[Role, Bounds] = {
                "tokens": Bounds(SEPARATOR, sub.max_token),
                "suffix_array": Bounds(0, sub.n_tokens + sub.n_documents - 1),
                "bucket_starts": Bounds(0, sub.n_tokens, rising=True),
                "sparse_index": Bounds(SEPARATOR, sub.max_token),
                "sections": any_number,
                "documents": any_number,
            }
            found += [(directory / sub.name / file_name(role), sub.files[role], bounds[role]) for role in sub.roles]
        return found


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
