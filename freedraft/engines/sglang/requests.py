"""What SGLang's requests say of themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.tenants import tenant_key

NEVER = 1 << 30


class Tracked(NamedTuple):
    """A request as it began.

    Attributes:
        request: SGLang's Req.
        length: positions in the KV cache that its tokens take.
        padding: how many of these are more than `tokens_of` has tokens.
        least: positions from which on it may have drafts.
        limit: positions that it may take at its end.
    """

    request: Any
    length: int
    padding: int
    least: int
    limit: int

    @classmethod
    def of(cls, request: Any) -> Tracked:
        length = len(request.origin_input_ids) + len(request.output_ids)
        padding = len(request.origin_input_ids) - len(request.origin_input_ids_unpadded)
        # SGLang has cut `max_new_tokens` to the longest context.
        limit = len(request.origin_input_ids) + int(request.sampling_params.max_new_tokens)
        return cls(request, length, padding, length + drafted_from(request), limit)


UNTRACKED = Tracked(None, 0, 0, 0, 0)


def tokens_of(request: Any) -> NDArray[np.int32]:
    """Prompt and output so far. Image padding holds hashes in place of token ids, so the unpadded prompt is taken."""
    prompt = np.asarray(request.origin_input_ids_unpadded, np.int64)
    # Of a copy: SGLang cannot append to an array that another thread looks at.
    return np.concatenate((prompt, np.asarray(request.output_ids[:], np.int64))).astype(np.int32)


def tenant_of(request: Any) -> str | None:
    """Tenant key of a request, by its cache_salt and extra_key, without the id that SGLang appends to the latter for an
    adapter."""
    extra_key = (request.extra_key or "").removesuffix(request.lora_id or "")
    return tenant_key(request.cache_salt, extra_key)


def extra_of(request: Any) -> dict[str, Any]:
    """What the client sent for the drafter: `custom_params` of its sampling parameters. SGLang takes lists and scalars
    there, too, in which nothing is for the drafter."""
    sent = request.sampling_params.custom_params
    return sent if isinstance(sent, dict) else {}


def output_of(request: Any) -> NDArray[np.int32]:
    """The output of a request that has ended, without what the last step accepted beyond its end."""
    return np.array(request.output_ids[: request.finished_len], np.int32)


def was_aborted(request: Any) -> bool:
    """Whether a request that has ended was given up, by its client or by SGLang."""
    reason = request.finished_reason
    return reason is not None and reason.to_json()["type"] == "abort"


def drafted_from(request: Any) -> int:
    """How many tokens a request has to generate before it may have drafts; `NEVER` for none at all.

    Where the distribution of its next token but one depends on the next, a draft tree has no one distribution: with
    penalties, which count tokens, with custom logit processors, which may look at them, and before `min_new_tokens`,
    which SGLang counts from the prefill (a retraction starts anew).
    """
    sampling = request.sampling_params
    looks_back = (
        sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or sampling.repetition_penalty != 1.0
        or request.custom_logit_processor is not None
    )
    return NEVER if looks_back else sampling.min_new_tokens
