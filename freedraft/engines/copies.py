"""`Copied`: a tensor on its way from the device to the host; `LogitsCopy`: the likeliest tokens at a step's nodes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from freedraft_kernels import top_tokens
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.step import TOP_TOKENS, NodeLogits


class Copied(NamedTuple):
    host: torch.Tensor
    done: Any  # event behind the copy; None for a tensor that was on the host

    def arrived(self) -> bool:
        return self.done is None or bool(self.done.query())

    def wait(self) -> NDArray[Any]:
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


def to_host(values: torch.Tensor) -> Copied:
    """Start the copy, behind the device's work so far; later work may overwrite `values`. On a CPU nothing is
    copied."""
    if values.device.type == "cpu":
        return Copied(values, None)
    # Torch keeps pinned memory by powers of two of its size, and uses it again.
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    done = torch.Event(values.device)
    done.record()
    return Copied(host, done)


class LogitsCopy:
    """The copy of one step, queued after the step's own work, so that waiting for the step's tokens waits for it,
    too."""

    def __init__(self) -> None:
        self._taken: tuple[Any, ...] | None = None

    def put(
        self, request_ids: Sequence[str], draft: DraftBatch, logits: torch.Tensor,
        nodes: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None, contexts: NDArray[Any] | None = None,
    ) -> None:  # fmt: skip
        """Start the copy.

        Args:
            draft: [B, N], the verified trees; they must not change until `take`.
            logits: float [R, V], which may be overwritten as soon as this returns.
            nodes: int64 [K] each, rows of `logits`, and their indices among the B * N nodes; None if each has its row.
        """
        top = [to_host(values) for values in top_tokens(logits, TOP_TOKENS)]
        self._taken = request_ids, draft, contexts, top, nodes

    def put_nodes(
        self, request_ids: Sequence[str], drafts: tuple[NDArray[Any], ...], first: NDArray[np.int64],
        logits: torch.Tensor,
    ) -> None:  # fmt: skip
        """Start the copy for each node of B trees.

        Args:
            drafts: tokens, int32 [B, N], roots first; parents, int32 [B, N], as in `DraftBatch`; int64 [B], draft
                tokens of each, below N; `contexts` of `NodeLogits`.
            first: int64 [B], row of `logits` of each root; the rows of its draft tokens follow.
        """
        tokens, parents, lengths, contexts = drafts
        width = int(lengths.max()) + 1
        trees = DraftBatch.empty(len(lengths), width)
        trees.counts[:] = lengths + 1
        trees.tokens[:], trees.parents[:] = tokens[:, :width], parents[:, :width]
        # Consecutive: the nodes of a tree, and its rows of logits.
        tree = np.repeat(np.arange(len(lengths)), lengths + 1)
        node = np.arange(len(tree)) - np.repeat(np.cumsum(lengths + 1) - lengths - 1, lengths + 1)
        self.put(request_ids, trees, logits, (first[tree] + node, tree * width + node), contexts)

    def forget(self, request_id: str) -> None:
        """Drop a request that begins again: its logits belong to another text."""
        if self._taken is not None:
            request_ids, *rest = self._taken
            self._taken = ["" if each == request_id else each for each in request_ids], *rest

    def take(self) -> NodeLogits | None:
        """Return and clear the pending copy; None if there is none."""
        if self._taken is None:
            return None
        request_ids, draft, contexts, copied, nodes = self._taken
        self._taken = None
        found = [copy.wait() for copy in copied]
        if nodes is not None:
            of_rows, size = found, (draft.tokens.size, TOP_TOKENS)
            found = [np.full(size, -1, np.int32), np.zeros(size, np.float32)]
            for array, rows in zip(found, of_rows, strict=True):
                array[nodes[1]] = rows[nodes[0]]
        top, of_top = (array.reshape(*draft.tokens.shape, TOP_TOKENS) for array in found)
        return NodeLogits(request_ids, draft, top, of_top, contexts)
