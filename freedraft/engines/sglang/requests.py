"""Accessors for SGLang's requests: tokens, tenant, limits and outcome."""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from freedraft.tenants import opted_out, tenant_key

NEVER = 1 << 30


class Tracked(NamedTuple):
    """State of a request when tracking starts.

    Attributes:
        request: SGLang's Req.
        length: positions in the KV cache that its tokens take.
        padding: number of these positions in excess of the tokens from `tokens_of`.
        least: smallest length at which it may have drafts.
        limit: maximum number of positions.
    """

    request: Any
    length: int
    padding: int
    least: int
    limit: int

    @classmethod
    def of(cls, request: Any) -> Self:
        length = len(request.origin_input_ids) + len(request.output_ids)
        padding = len(request.origin_input_ids) - len(request.origin_input_ids_unpadded)
        # SGLang has limited `max_new_tokens` to the maximum context.
        limit = len(request.origin_input_ids) + int(request.sampling_params.max_new_tokens)
        first = NEVER if opted_out(extra_of(request)) else independent_from(request)
        return cls(request, length, padding, length + first, limit)


UNTRACKED = Tracked(None, 0, 0, 0, 0)


def tokens_of(request: Any) -> NDArray[np.int32]:
    """Return prompt and output tokens. The prompt is the unpadded one: image padding holds hashes, not token ids."""
    prompt = np.asarray(request.origin_input_ids_unpadded, np.int64)
    # A copy: SGLang cannot append to an array while another thread holds a view of it.
    return np.concatenate((prompt, np.asarray(request.output_ids[:], np.int64))).astype(np.int32)


def tenant_of(request: Any) -> str | None:
    """Return the tenant key of a request, from its cache_salt, extra_key and adapter, whose id SGLang has appended to
    extra_key."""
    lora = request.lora_id or ""
    return tenant_key(request.cache_salt, (request.extra_key or "").removesuffix(lora), *filter(None, [lora]))


def extra_of(request: Any) -> dict[str, Any]:
    """Return the client's fields for the drafter: `custom_params` of the sampling parameters if it is a dict, else
    empty (SGLang also accepts lists and scalars)."""
    sent = request.sampling_params.custom_params
    return sent if isinstance(sent, dict) else {}


def output_of(request: Any) -> NDArray[np.int32]:
    """Return the output of a finished request, without tokens that the last step accepted beyond its end."""
    return np.array(request.output_ids[: request.finished_len], np.int32)


def independent_from(request: Any) -> int:
    """Return how many tokens a request must generate before its distributions do not depend on draft nodes; `NEVER` if
    they always do.

    They do with penalties, which count tokens, with custom logit processors, which may read them, and before
    `min_new_tokens`, which SGLang counts from the prefill (a retraction restarts the count).
    """
    sampling = request.sampling_params
    looks_back = (
        sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or sampling.repetition_penalty != 1.0
        or request.custom_logit_processor is not None
    )
    return NEVER if looks_back else sampling.min_new_tokens


def rests_on_drafts(request: Any) -> bool:
    """Return whether the next distributions of a request depend on draft nodes; with `min_new_tokens`, also after a
    retraction."""
    restarted = request.retracted_stain and request.sampling_params.min_new_tokens > 0
    return restarted or len(request.output_ids) < independent_from(request)
