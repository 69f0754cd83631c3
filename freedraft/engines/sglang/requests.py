"""`RequestTokens`: how many tokens of each request the draft source has, by request id, never by batch row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RequestTokens:
    """Follows requests through prefill, decoding, retraction and abort, so that the source's copy of them stays exact.

    A copy that does not match is rebuilt: drafts would still be verified, but from the wrong text.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def begin(self, request: Any) -> NDArray[np.int32] | None:
        """Tokens of a request whose prefill starts; None when the source has just these (a later chunk of a
        prefill)."""
        known = self._lengths.get(request.rid)
        total = len(request.origin_input_ids) + len(request.output_ids)
        if known == total:
            return None
        self._lengths[request.rid] = total
        return _tokens(request)

    def advance(self, ids: Sequence[str], totals: NDArray[np.int64], gained: NDArray[np.int32]) -> list[int]:
        """Note that each request gains tokens.

        Args:
            ids: B request ids.
            totals: [B], tokens of each with those gained.
            gained: [B].

        Returns:
            rows whose copy misses or exceeds what came before: to be rebuilt.
        """
        known = np.fromiter((self._lengths.get(i, -1) for i in ids), np.int64, len(ids))
        self._lengths.update(zip(ids, totals.tolist(), strict=True))
        return np.flatnonzero(known + gained != totals).tolist()

    def rebuild(self, request: Any, length: int) -> NDArray[np.int32]:
        """The first `length` tokens of a request, counted as its KV cache counts them.

        Those that the last step accepted are not wanted here: under overlap scheduling `output_ids` lacks them still.
        """
        missing = len(request.origin_input_ids) - len(request.origin_input_ids_unpadded)
        return _tokens(request)[: max(0, length - missing)]

    def forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)

    def sweep(self, ids: Sequence[str], max_batch: int) -> list[str]:
        """Requests to forget because far more are known than can run: those aborted while they waited. Usually none.

        A waiting request that is swept is rebuilt when it runs again.
        """
        if len(self._lengths) <= 4 * max_batch + 64:
            return []
        gone = list(self._lengths.keys() - set(ids))
        for request_id in gone:
            del self._lengths[request_id]
        return gone


def tenant_of(request: Any) -> str | None:
    """Whose a request is: its extra_key (which SGLang ends in the adapter's id, if there is one) and its cache_salt."""
    given = (getattr(request, "extra_key", None), getattr(request, "cache_salt", None))
    return "\n".join(filter(None, given)) or None


def text_of(request: Any) -> NDArray[np.int32]:
    """Prompt and output of a request that has ended, without what the last step accepted beyond its end."""
    end = getattr(request, "finished_len", None)
    prompt, output = request.origin_input_ids_unpadded, request.output_ids
    return np.array([*prompt, *(output if end is None else output[:end])], np.int32)


def _tokens(request: Any) -> NDArray[np.int32]:
    """Prompt and output so far. Image padding holds hashes in place of token ids, so the unpadded prompt is taken."""
    prompt = np.asarray(request.origin_input_ids_unpadded, np.int64)
    return np.concatenate((prompt, np.asarray(request.output_ids, np.int64))).astype(np.int32)
