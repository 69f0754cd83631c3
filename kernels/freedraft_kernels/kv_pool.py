"""`KVPool`: the paged KV cache, and compaction of accepted paths in it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.verification import Verification


class KVPool:
    """The K and V buffers of all layers, addressed by slot.

    A verifying pass writes the KV of node i of request b into `slots[b, i]`. Afterwards the accepted nodes' KV must be
    at the front of these slots, in order, as if decoded one by one: depth j of the path is position `seq_len + j` and
    belongs into `slots[b, j]`.

    Pages do not matter: slot = page * page_size + offset, so slots may lie on any pages in any order.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        """
        Args:
            buffers: K and V of every layer, in any order, on one device, each [slots, ...]. Dtypes and row shapes may
                differ (K from V, layer from layer). Rows must be contiguous; the distance between rows is free. Buffers
                are not copied, and must not move while this object is used.

        Raises:
            ValueError: the rows of a buffer are not contiguous.
        """
        assert len({(len(b), b.device) for b in buffers}) == 1 and min(b.dim() for b in buffers) >= 2
        for buffer in buffers:  # an engine chooses its layout
            if len(buffer) and not buffer[0].is_contiguous():
                raise ValueError(f"the rows of the KV cache are not contiguous (strides {buffer.stride()})")
        self._buffers = tuple(buffers)
        self._row_bytes = max(b[0].numel() * b.element_size() if b.shape[0] else 0 for b in buffers)
        self._table: Tensor | None = None
        if use_triton(self.device):  # here, because a CUDA graph cannot capture a copy to the device
            from freedraft_kernels.device.kv_pool import buffer_table

            self._table = buffer_table(self._buffers)

    @property
    def device(self) -> torch.device:
        return self._buffers[0].device

    def compact(self, slots: Tensor, verification: Verification, *, backend: Backend = "auto") -> None:
        """Copy the KV of each accepted path to the front of its slots, in all buffers.

        Sources and targets may overlap: node j of a path has an index of at least j, so a row is read before any later
        node overwrites it.

        Args:
            slots: int32 or int64 [B, N], the KV slot of every node, all different and inside the buffers.
            verification: of the same B trees. Only `accepted` (int32 [B, W <= N], rising) and `lengths` are read.
        """
        accepted, lengths = verification.accepted, verification.lengths
        batch, width = accepted.shape
        assert slots.shape[0] == len(lengths) == batch and slots.shape[1] >= width and slots.device == self.device
        assert accepted.dtype == lengths.dtype == torch.int32 and slots.is_contiguous() and accepted.is_contiguous()
        if width < 2 or batch == 0:
            return
        if use_triton(self.device, backend):
            from freedraft_kernels.device.kv_pool import launch_compact

            assert self._table is not None  # Triton runs now, so it ran in the constructor
            launch_compact(self._table, self._row_bytes, slots, accepted, lengths)
            return
        step = torch.arange(width, device=self.device)
        node = torch.where(step < lengths[:, None], accepted, step).to(torch.int64)  # beyond the path: no move
        source = slots.to(torch.int64).gather(1, node).view(-1)
        target = slots[:, :width].to(torch.int64).reshape(-1)
        for buffer in self._buffers:
            rows = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer  # float8 lacks indexing
            rows[target] = rows[source]  # gathers all rows before it scatters them
