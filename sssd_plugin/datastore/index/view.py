"""`View`: what the requests of one batch draft from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.sub_index import Snapshot


@dataclass(frozen=True, slots=True)
class View:
    """The sub-indices that each group of requests sees.

    Attributes:
        table: int64 [R, 7], rows as in `Snapshot.table`, group after group.
        bounds: int64 [G + 1], where each group's rows start.
        sizes: int64 [G], tokens that each group sees.
        static_rows: int64 [G], how many of each group's rows, the first ones, are of the store that was built.
        keeps: what keeps the addresses valid.
        widest: the largest number of sub-indices of a group.
    """

    table: NDArray[np.int64]
    bounds: NDArray[np.int64]
    sizes: NDArray[np.int64]
    static_rows: NDArray[np.int64]
    keeps: tuple[object, ...]
    widest: int

    @classmethod
    def of(cls, snapshot: Snapshot) -> View:
        """One group that sees `snapshot`."""
        return cls.single(snapshot.table, snapshot.n_tokens, len(snapshot.table), (snapshot,))

    @classmethod
    def single(cls, table: NDArray[np.int64], size: int, n_static: int, keeps: tuple[object, ...]) -> View:
        """One group that sees all of `table`, of which the first `n_static` rows are static."""
        n = len(table)
        bounds, sizes, static = (np.array(values, np.int64) for values in ([0, n], [size], [n_static]))
        return cls(table, bounds, sizes, static, keeps, n)

    @classmethod
    def join(cls, views: Sequence[View]) -> View:
        """A group for each of these views of one group."""
        bounds = np.zeros(len(views) + 1, np.int64)
        np.cumsum([len(view.table) for view in views], out=bounds[1:])
        table, sizes, static = (
            np.concatenate([getattr(view, name) for view in views]) for name in ("table", "sizes", "static_rows")
        )
        return cls(table, bounds, sizes, static, tuple(views), max(view.widest for view in views))
