"""The datastore on disk: a directory with a manifest and one folder of raw arrays per sub-index.

    STORE/manifest.json
    STORE/<sub-index>/tokens.i32           int32 [n + PAD]
    STORE/<sub-index>/suffix_array.i32     int32 [m]
    STORE/<sub-index>/bucket_starts.i32    int32 [D + 1]
    STORE/<sub-index>/sparse_index.i32     int32 [ceil(m / 16)]

The arrays are those of `SubIndex`, little-endian, without headers: each starts on a page and is mapped as it is. Files
are never changed once the manifest names them. A change of the store is new folders, then a manifest that replaces the
old one atomically; a folder that no manifest names is garbage.

Keys may be added to the manifest, its sub-indices and files: readers ignore unknown ones. `format_version` changes only
when the arrays or these rules do.
"""

import hashlib
import json
import sys
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

import freedraft
from freedraft.files import write_atomically
from sssd_plugin.datastore.disk.checksum import BLOCK_BYTES, Bounds, Checked, FileEntry
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import PAD, SEPARATOR, SPARSE_STEP, direct_buckets

MANIFEST = "manifest.json"
LIVE = "live"  # folder of learnt text; see `sssd_plugin.datastore.live.folder`
MAX_VOCAB_SIZE = 1 << 31

Role = Literal["tokens", "suffix_array", "bucket_starts", "sparse_index"]
ROLES: tuple[Role, ...] = ("tokens", "suffix_array", "bucket_starts", "sparse_index")
Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Isolation = Literal["salt", "strict", "shared"]


def file_name(role: Role) -> str:
    return f"{role}.i32"


class SubIndexEntry(BaseModel, frozen=True):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
    n_tokens: Count  # separators not counted: the length of the suffix array
    n_documents: Count  # each has one separator after it
    max_token: Annotated[int, Field(ge=-1, lt=MAX_VOCAB_SIZE)]  # the largest that occurs
    files: dict[Role, FileEntry]

    def layout(self, vocab_size: int) -> dict[Role, tuple[int, Bounds]]:  # length and bounds of each file
        n, m, ids = self.n_tokens + self.n_documents, self.n_tokens, Bounds(SEPARATOR, self.max_token)
        return {
            "tokens": (n + PAD, ids),
            "suffix_array": (m, Bounds(0, n - 1)),
            "bucket_starts": (direct_buckets(vocab_size) + 1, Bounds(0, m, rising=True)),
            "sparse_index": (-(-m // SPARSE_STEP), ids),
        }

    @property
    def size(self) -> int:  # bytes on disk
        return sum(entry.size for entry in self.files.values())


class TokenizerEntry(BaseModel, frozen=True):
    name: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ChecksummedManifest(BaseModel, frozen=True):
    """Base of manifests: JSON files with a checksum of themselves."""

    DESCRIBES: ClassVar[str]  # the contents of the folder
    REMEDY: ClassVar[str]  # for damage without a backup
    ALTERNATIVE: ClassVar[str]  # to an upgrade, for a newer version
    format: str  # here and below: a literal with a default
    format_version: int

    def write(self, path: Path) -> None:
        """Write, or atomically replace, the file; `OSError` on a disk error."""
        write_atomically(path, self.content())

    def content(self) -> bytes:
        content = self.model_dump(mode="json")
        return (json.dumps(content | {"checksum": checksum(content)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> Self:
        with reporting("read", path):
            return cls.parse(path.read_bytes(), path)

    @classmethod
    def parse(cls, data: bytes, path: Path | str) -> Self:
        """Check the contents of the file at `path`; `DatastoreError` if it is damaged, describes something else, or is
        newer than this version reads."""
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise DatastoreError(f"{path} is corrupted: not JSON; restore it, or {cls.REMEDY}") from None
        if not isinstance(content, dict) or content.get("format") != cls.model_fields["format"].default:
            raise DatastoreError(f"{path} does not describe {cls.DESCRIBES}: correct the path, or {cls.REMEDY}")
        version, known = content.get("format_version"), cls.model_fields["format_version"].default
        if isinstance(version, int) and version > known:
            newer = f"newer than the {known} that freedraft {freedraft.__version__} reads"
            raise DatastoreError(
                f"{path} has format version {version}, {newer}: upgrade freedraft, or {cls.ALTERNATIVE}"
            )
        if content.pop("checksum", None) != checksum(content):
            raise DatastoreError(f"{path} is corrupted: its checksum does not match; restore it, or {cls.REMEDY}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "contents"
            message = first["msg"].removeprefix("Value error, ")
            raise DatastoreError(f"{path} is not a valid manifest ({where}: {message}): {cls.REMEDY}") from None


def checksum(content: dict[str, Any]) -> str:  # of a content without its checksum
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{zlib.crc32(canonical.encode()):08x}"


class Manifest(ChecksummedManifest, frozen=True):
    DESCRIBES: ClassVar[str] = "a freedraft datastore"
    REMEDY: ClassVar[str] = REBUILD
    ALTERNATIVE: ClassVar[str] = REBUILD

    format: Literal["freedraft-datastore"] = "freedraft-datastore"
    format_version: Literal[1] = 1
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]  # sub-indices have min(vocab_size, 2^20) direct buckets
    tokenizer: TokenizerEntry | None = None  # None if the store was built from token ids alone
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    created_by: str = f"freedraft {freedraft.__version__}"
    sub_indices: tuple[SubIndexEntry, ...]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if len({sub.name for sub in self.sub_indices}) != len(self.sub_indices):
            raise ValueError("two sub-indices have the same name")
        for sub in self.sub_indices:
            for role, (items, _) in sub.layout(self.vocab_size).items():
                if role not in sub.files:
                    raise ValueError(f"sub-index {sub.name} lacks its {role}")
                entry = sub.files[role]
                blocks = -(-entry.size // BLOCK_BYTES)
                if entry.size != 4 * items or len(entry.sha256) != blocks:
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
        return [
            (directory / sub.name / file_name(role), sub.files[role], bounds)
            for sub in self.sub_indices
            for role, (_, bounds) in sub.layout(self.vocab_size).items()
        ]


def digest(directory: Path) -> str:
    """Return the SHA-256 of a store's manifest, which holds those of all files."""
    with reporting("read", directory / MANIFEST):
        return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of `directory`; `DatastoreError` if there is none, or it is damaged or newer."""
    if sys.byteorder != "little":
        raise DatastoreError(f"{directory} holds little-endian arrays, which this machine cannot map: use another one")
    path = directory / MANIFEST
    with reporting("read", path):
        if path.exists():
            return Manifest.read(path)
        if not directory.exists():
            build = f"`freedraft datastore build {directory} --tokenizer DIR INPUT...`"
            raise DatastoreError(f"no datastore at {directory}: correct the path, or build one with {build}")
    wrong = f"is not a datastore (no {MANIFEST})" if directory.is_dir() else "is a file, not a datastore"
    raise DatastoreError(f"{directory} {wrong}: give the directory that `freedraft datastore build` made, or build one")
