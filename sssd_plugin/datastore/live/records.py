"""Records of documents, and the segments that hold them: files of a header and then records, little-endian.

A record is one document: a header (count of tokens, time, tenant, checksums) and its tokens, int32. It counts when its
checksums match, so whatever a crash leaves of the last one is recognised and dropped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freedraft.files import create_file, fsync_folder
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.folder import MANIFEST, LiveManifest, SegmentEntry, segment_name

SEGMENT_HEADER = b"FDLIVE1\n"
_MAGIC = b"FDr1"
_HEADER = struct.Struct("<4sIQ16sI")  # magic, tokens, time in ms, tenant, CRC-32 of the tokens; then its own CRC-32


@dataclass(frozen=True, slots=True)
class Record:
    """A document.

    Attributes:
        tenant: 16 bytes, or none.
        milliseconds: since 1970, when its request ended.
        tokens: int32 [n].
    """

    tenant: bytes
    milliseconds: int
    tokens: NDArray[np.int32]

    @property
    def size(self) -> int:
        """Tokens, the separator included."""
        return len(self.tokens) + 1

    def to_bytes(self) -> bytes:
        payload = np.ascontiguousarray(self.tokens, "<i4").tobytes()
        header = _HEADER.pack(_MAGIC, len(self.tokens), self.milliseconds, self.tenant, zlib.crc32(payload))
        return header + zlib.crc32(header).to_bytes(4, "little") + payload


@dataclass(frozen=True, slots=True)
class Scan:
    """The contents of a segment."""

    records: list[Record]  # the good ones
    end: int  # byte at which the last good record ends
    size: int  # bytes of the file
    damaged: int  # bytes before `end` that belong to no good record


def scan_segment(path: Path) -> Scan:
    """Read a segment; records whose checksums do not match are left out.

    Raises:
        DatastoreError: it is missing, cannot be read, or is no segment.
    """
    with reporting("read", path):
        data = path.read_bytes()
    if len(data) < len(SEGMENT_HEADER):
        return Scan([], 0, len(data), 0)
    if not data.startswith(SEGMENT_HEADER):
        raise DatastoreError(f"{path} is no segment of a live datastore: restore it, or {LiveManifest.REMEDY}")
    records: list[Record] = []
    at = end = len(SEGMENT_HEADER)
    damaged = 0
    while (at := data.find(_MAGIC, at)) >= 0 and (start := at + _HEADER.size + 4) <= len(data):
        header = data[at : start - 4]
        if zlib.crc32(header) != int.from_bytes(data[start - 4 : start], "little"):
            at += 1
            continue
        _, n, milliseconds, tenant, crc = _HEADER.unpack(header)
        stop = start + 4 * n
        payload = data[start:stop]
        good = zlib.crc32(payload) == crc
        if stop > len(data) or (stop == len(data) and not good):
            break  # torn; in the second case, the file had its length before its contents
        if good:
            tokens = np.frombuffer(payload, "<i4").astype(np.int32)
            records.append(Record(tenant if any(tenant) else b"", milliseconds, tokens))
        damaged += (at if good else stop) - end
        at = end = stop
    return Scan(records, end, len(data), damaged)


def in_parts(records: Iterable[Record], max_tokens: int) -> Iterator[list[Record]]:
    """Yield consecutive documents, at most `max_tokens` together, separators included, unless one alone is larger."""
    part: list[Record] = []
    total = 0
    for record in records:
        if part and total + record.size > max_tokens:
            yield part
            part, total = [], 0
        part.append(record)
        total += record.size
    if part:
        yield part


def replace_segments(
    folder: Path, manifest: LiveManifest, parts: Iterable[SegmentEntry | list[Record]]
) -> LiveManifest:
    """Replace the segments by `parts` (those that stay, documents for new ones) and return the new manifest.

    Raises:
        OSError: the disk refuses.
    """
    segments, number = [], manifest.next
    for part in parts:
        if not isinstance(part, SegmentEntry):
            data = b"".join([SEGMENT_HEADER, *(record.to_bytes() for record in part)])
            name, tokens = segment_name(number), sum(record.size for record in part)
            create_file(folder / name, data)
            part, number = SegmentEntry(name=name, size=len(data), tokens=tokens), number + 1
        segments.append(part)
    replaced = manifest.model_copy(update={"segments": tuple(segments), "next": number})
    replaced.write(folder / MANIFEST)
    for name in {entry.name for entry in manifest.segments} - {entry.name for entry in segments}:
        (folder / name).unlink(missing_ok=True)
    fsync_folder(folder)
    return replaced
