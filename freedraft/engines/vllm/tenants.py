"""The tenant of a request, by its `cache_salt`, which vLLM's scheduler knows and does not hand to the model runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.hooks import TENANT_HOOKS
from freedraft.engines.vllm.patching import wrap_once
from freedraft.tenants import tenant_key

SALT = "freedraft_salt"  # Attribute of vLLM's NewRequestData: the key of the request's tenant


def carry_salt() -> bool:
    """Make the scheduler pass on the cache_salt of new requests; whether this vLLM can be made to."""
    if check(TENANT_HOOKS):
        return False
    from vllm.v1.core.sched.output import NewRequestData

    wrap_once(NewRequestData, "from_request", _from_request)
    return True


def _from_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        data = original(request, *args, **kwargs)
        key = tenant_key(request.cache_salt)
        if key:
            setattr(data, SALT, key)
        return data

    return from_request
