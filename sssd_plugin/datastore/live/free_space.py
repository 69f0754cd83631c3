"""What is left in the free space of a sqlite3 file (https://sqlite.org/fileformat2.html), where nothing should be."""

from __future__ import annotations

from collections.abc import Iterable

_FILE_HEADER = 100
_INTERIOR, _LEAF = 0x05, 0x0D  # of tables


def free_bytes(data: bytes, roots: Iterable[int]) -> int:
    """Return the number of bytes that are not 0 in no row, and in no structure that sqlite3 needs.

    Args:
        data: a file of tables without indices.
        roots: the first page of each table.
    """
    return _FreeSpace(data).count(roots)


class _FreeSpace:
    def __init__(self, data: bytes) -> None:
        self.data, self.left = data, bytearray(data)
        size = self._number(16, 2)
        self.page = 65536 if size == 1 else size
        self.usable = self.page - data[20]

    def count(self, roots: Iterable[int]) -> int:
        self._take(0, _FILE_HEADER)
        pages = [1, *roots]
        while pages:
            pages += self._table_page(pages.pop())
        trunk = self._number(32, 4)
        while trunk:
            at = (trunk - 1) * self.page
            trunk = self._number(at, 4)
            self._take(at, 8 + 4 * self._number(at + 4, 4))
        return len(self.left) - self.left.count(0)

    def _table_page(self, number: int) -> list[int]:
        """Take what a page of a table uses, and return its children."""
        start = (number - 1) * self.page
        at = start + (_FILE_HEADER if number == 1 else 0)
        interior = self.data[at] == _INTERIOR
        header = 12 if interior else 8
        n = self._number(at + 3, 2)
        free = self._number(at + 1, 2)
        self._take(at, header + 2 * n)
        while free:  # the header of a free block
            self._take(start + free, 4)
            free = self._number(start + free, 2)
        children = [self._number(at + 8, 4)] if interior else []
        for i in range(n):
            cell = start + self._number(at + header + 2 * i, 2)
            if interior:
                children.append(self._number(cell, 4))
                self._take(cell, 4 + self._varint(cell + 4)[1])
            else:
                self._row(cell)
        return children

    def _row(self, cell: int) -> None:
        payload, size_bytes = self._varint(cell)
        head = size_bytes + self._varint(cell + size_bytes)[1]
        most = self.usable - 35
        local = payload
        if payload > most:
            least = (self.usable - 12) * 32 // 255 - 23
            local = least + (payload - least) % (self.usable - 4)
            local = local if local <= most else least
            overflow = self._number(cell + head + local, 4)
            left = payload - local
            while overflow and left > 0:
                at = (overflow - 1) * self.page
                self._take(at, 4 + min(left, self.usable - 4))
                overflow, left = self._number(at, 4), left - (self.usable - 4)
            local += 4
        self._take(cell, max(4, head + local))

    def _number(self, at: int, size: int) -> int:
        return int.from_bytes(self.data[at : at + size], "big")

    def _varint(self, at: int) -> tuple[int, int]:
        """Return a number of variable length and its bytes."""
        value = 0
        for i in range(8):
            byte = self.data[at + i]
            value = value << 7 | byte & 0x7F
            if byte < 0x80:
                return value, i + 1
        return value << 8 | self.data[at + 8], 9

    def _take(self, at: int, size: int) -> None:
        self.left[at : at + size] = bytes(min(size, len(self.left) - at))
