"""`TreeBatch`: a batch of draft trees on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Draft trees as flat int32 tensors on one device: `freedraft.draft.DraftBatch` without its scores.

    Node 0 is the root: the request's last token, accepted already but not yet in the KV cache. Parents come before
    their children, and the children of a node have different tokens. Entries at and beyond `counts[b]` are padding:
    undefined, never accepted, but part of the forward pass, which has width N for all requests.

    Attributes:
        tokens: int32 [B, N], token id of each node.
        parents: int32 [B, N], index of each node's parent; -1 for the root.
        depths: int32 [B, N], 0 for the root, parent's depth + 1 otherwise.
        counts: int32 [B], number of nodes, root included; 0 where the request has no token to extend.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    counts: torch.Tensor

    def __post_init__(self) -> None:
        parts = self.tokens, self.parents, self.depths
        assert self.tokens.shape[1] >= 1 and {part.shape for part in parts} == {self.tokens.shape}
        assert self.counts.shape == self.tokens.shape[:1] and {t.dtype for t in (*parts, self.counts)} == {torch.int32}
        assert all(part.is_contiguous() for part in parts)

    @classmethod
    def from_numpy(
        cls,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        depths: NDArray[np.int32],
        counts: NDArray[np.int32],
        device: torch.device | str = "cpu",
    ) -> TreeBatch:
        """Copy host arrays (int32 [B, N], [B, N], [B, N], [B]) to `device` in one asynchronous transfer.

        The arrays may be overwritten as soon as this returns.
        """
        batch, nodes = tokens.shape
        device = torch.device(device)
        size = batch * nodes
        part = size + -size % 4  # parts aligned to 16 bytes: Triton specialises kernels by alignment
        # torch reuses pinned memory only after the copy has finished.
        staging = torch.empty(3 * part + batch, dtype=torch.int32, pin_memory=device.type == "cuda")
        view = staging.numpy()
        for i, array in enumerate((tokens, parents, depths)):
            view[i * part : i * part + size].reshape(batch, nodes)[...] = array
        view[3 * part :] = counts
        flat = staging.to(device, non_blocking=True)
        trees = flat[: 3 * part].view(3, part)[:, :size].unflatten(1, (batch, nodes))
        return cls(trees[0], trees[1], trees[2], flat[3 * part :])

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def max_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def valid(self) -> torch.Tensor:
        """bool [B, N]: which entries are nodes rather than padding."""
        return torch.arange(self.max_nodes, device=self.device) < self.counts[:, None]
