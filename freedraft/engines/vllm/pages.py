"""`Pages`: block tables of a step's requests. `Step.engine` returns them for draft passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Pages(NamedTuple):
    """Where the KV of B requests lies.

    Attributes:
        table: int32 [R, P] on the device, blocks of each row; beyond those of its request it holds leftovers of others.
        rows: intp [B], the rows of the requests; blocks: int64 [B], how many each has.
        block_size: tokens of a block.
    """

    table: torch.Tensor
    rows: NDArray[np.intp]
    blocks: NDArray[Any]
    block_size: int


class BlockTables(NamedTuple):
    """What passes over some of a step's requests read and write. whole: int32 [R, P], blocks of their KV; read: int32
    [R, P'], those that attention reads; dropped: int64 [R], tokens of each that lie in between and are not read."""

    key: bytes
    whole: torch.Tensor
    read: torch.Tensor
    dropped: NDArray[np.int64]
