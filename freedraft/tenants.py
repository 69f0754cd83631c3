"""The key of a tenant, in whose requests' text, and in no other, its requests may find drafts."""

from __future__ import annotations

import json


def tenant_key(cache_salt: str | None, extra_key: str | None = None) -> str | None:
    """Return the key of who sends requests with these fields, different for different ones; None where neither is
    given.

    Args:
        cache_salt: of vLLM's and SGLang's API.
        extra_key: of SGLang's.
    """
    return json.dumps([cache_salt or "", extra_key or ""]) if cache_salt or extra_key else None


def parse_tenant(line: str) -> str | None:
    """Return the key for a line that an operator writes: a cache_salt, or a JSON list of cache_salt and extra_key; None
    for an empty line."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, list) and len(fields) == 2 and all(isinstance(field, str) for field in fields):
        return tenant_key(*fields)
    return tenant_key(line)
