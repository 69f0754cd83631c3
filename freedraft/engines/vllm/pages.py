"""`Pages`: block tables of a step's requests. `Step.engine` returns them for draft passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Pages(NamedTuple):
    """The KV blocks of B requests.

    Attributes:
        table: int32 [R, P] on the device, blocks of each row; undefined beyond its request's own.
        rows: intp [B], the rows of the requests; blocks: int64 [B], their numbers of blocks.
        block_size: tokens of a block.
    """

    table: torch.Tensor
    rows: NDArray[np.intp]
    blocks: NDArray[Any]
    block_size: int


class BlockTables(NamedTuple):
    """Block tables of passes over R of a step's requests. whole: int32 [R, P], their blocks; read: int32 [R, P'],
    blocks that attention reads; dropped: int64 [R], tokens left out by the window."""

    key: bytes
    whole: torch.Tensor
    read: torch.Tensor
    dropped: NDArray[np.int64]
