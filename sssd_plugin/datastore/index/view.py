"""`View`: what the requests of one batch draft from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.runs import Run
from sssd_plugin.datastore.index.sub_index import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
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
    def of(cls, static: Snapshot, runs: Sequence[Run] = ()) -> View:
        """One group that sees `static` and then `runs`."""
        table = np.concatenate([static.table, *(run.sub.row[None] for run in runs)])
        size = static.n_tokens + sum(run.n for run in runs)
        bounds, sizes, n_static = (np.array(v, np.int64) for v in ([0, len(table)], [size], [len(static.table)]))
        return cls(table, bounds, sizes, n_static, (static, *runs), len(table))

    @classmethod
    def join(cls, views: Sequence[View]) -> View:
        """A group for each of these views of one group."""
        bounds = np.zeros(len(views) + 1, np.int64)
        np.cumsum([len(view.table) for view in views], out=bounds[1:])
        table, sizes, static = (
            np.concatenate([getattr(view, name) for view in views]) for name in ("table", "sizes", "static_rows")
        )
        return cls(table, bounds, sizes, static, tuple(views), max(view.widest for view in views))
