"""`ChecksummedManifest`: a JSON file that says what a folder holds, replaced atomically, with a checksum of itself.

Readers ignore keys that they do not know, so later writers may add some. What a reader must not ignore, a writer lists
in `requires`; a reader refuses a manifest that requires a feature it lacks.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ValidationError

import freedraft
from freedraft.files import write_atomically
from sssd_plugin.datastore.errors import DatastoreError, reporting


class ChecksummedManifest(BaseModel, frozen=True):
    """The base of manifests; `format` and `format_version` are literals with a default in each of them.

    Attributes:
        DESCRIBES: what the manifest describes, in a few words.
        REMEDY: what helps against damage, where there is nothing to restore.
        ALTERNATIVE: what helps, other than an upgrade, against a version that is too new.
    """

    DESCRIBES: ClassVar[str]
    REMEDY: ClassVar[str]
    ALTERNATIVE: ClassVar[str]
    format: str
    format_version: int

    def write(self, path: Path) -> None:
        """Write, or atomically replace, the file, mode 0600; `OSError` if the disk refuses."""
        write_atomically(path, self.content())

    def content(self) -> bytes:
        content = self.model_dump(mode="json")
        return (json.dumps(content | {"checksum": checksum(content)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check the file; raises `DatastoreError` also where it is missing."""
        with reporting("read", path):
            data = path.read_bytes()
        return cls.parse(data, path)

    @classmethod
    def parse(cls, data: bytes, path: Path | str) -> Self:
        """Check the contents of the file at `path`.

        Raises:
            DatastoreError: it is damaged, describes something else, or is newer than this version reads.
        """
        ours = f"freedraft {freedraft.__version__}"
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            raise DatastoreError(f"{path} is corrupted: not JSON; restore it, or {cls.REMEDY}") from None
        if not isinstance(content, dict) or content.get("format") != cls.model_fields["format"].default:
            raise DatastoreError(f"{path} does not describe {cls.DESCRIBES}: correct the path, or {cls.REMEDY}")
        version, known = content.get("format_version"), cls.model_fields["format_version"].default
        if isinstance(version, int) and version != known:
            newer = version > known
            remedy = f"upgrade freedraft, or {cls.ALTERNATIVE}" if newer else cls.REMEDY
            raise DatastoreError(
                f"{path} has format version {version}, {'newer' if newer else 'older'} than the {known} that {ours} "
                f"reads: {remedy}"
            )
        if content.pop("checksum", None) != checksum(content):
            raise DatastoreError(f"{path} is corrupted: its checksum does not match; restore it, or {cls.REMEDY}")
        required = content.get("requires")
        if isinstance(required, list) and required:
            features = ", ".join(map(str, required))
            raise DatastoreError(
                f"{path} requires {features}, which {ours} does not know: upgrade freedraft, or {cls.ALTERNATIVE}"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "contents"
            message = first["msg"].removeprefix("Value error, ")
            raise DatastoreError(f"{path} is not a valid manifest ({where}: {message}): {cls.REMEDY}") from None


def checksum(content: dict[str, Any]) -> str:
    """Return the CRC-32 of a manifest's content without its checksum, in canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{zlib.crc32(canonical.encode()):08x}"
