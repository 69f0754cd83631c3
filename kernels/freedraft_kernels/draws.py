"""Random draws of tree verification: a pure function of (seed, position, node).

A request's draws do not depend on its row in the batch, and the reference and the kernels can be compared exactly.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), key = the request's seed,
counter = (node, position, 0, STREAM). A draw is the first 48 bits of the output: an integer u that means u / 2**48.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freedraft_kernels.checks import check_tensor

DRAW_BITS = 48
WEIGHT_ONE = 1 << 46  # a probability of 1 as verification compares them: integers of 2**-46
STREAM = 0x54524545  # "TREE": keeps these draws apart from other Philox users of the same seed
_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox 4x32-10 over int64 tensors that hold unsigned 32-bit words (shapes broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The 64-bit products wrap into the sign: their bits are right, and masking after a shift drops its copies.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def draws(seeds: Tensor, positions: Tensor, nodes: int) -> Tensor:
    """int64 [B, nodes]: the draw of every node of every request. Node 0's is the one for the bonus token.

    Args:
        seeds: int64 [B], all 64 bits count.
        positions: int32 or int64 [B], the root's position, which no two steps of a request share. Only the low 32 bits
            count.
        nodes: N.
    """
    if seeds.dim() != 1:
        raise ValueError(f"seeds has shape {list(seeds.shape)}, expected [batch]")
    check_tensor("seeds", seeds, seeds.shape, (torch.int64,), seeds.device)
    check_tensor("positions", positions, seeds.shape, (torch.int32, torch.int64), seeds.device)
    seeds, positions = seeds[:, None], positions[:, None].to(torch.int64) & _MASK
    node = torch.arange(nodes, device=seeds.device)[None, :]
    zero = torch.zeros_like(node)
    x0, x1, _, _ = philox((node, positions, zero, zero + STREAM), (seeds & _MASK, (seeds >> 32) & _MASK))
    return (x0 << 16) | (x1 >> 16)


def scale(draw: Tensor, total: Tensor) -> Tensor:
    """floor(draw * total / 2**48), exactly, for int64 `draw` < 2**48 and 0 <= `total` < 2**47 (in 16-bit digits)."""
    a, b, c = draw >> 32, (draw >> 16) & 0xFFFF, draw & 0xFFFF
    return (a * total + ((b * total + ((c * total) >> 16)) >> 16)) >> 16
