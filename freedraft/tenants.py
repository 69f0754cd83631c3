"""Tenant keys: a request may be drafted from texts of requests with the same key only."""

from __future__ import annotations

import json


def tenant_key(cache_salt: str | None, extra_key: str | None = None) -> str | None:
    """Return the tenant's key of requests with these fields of vLLM's and SGLang's APIs; None where both are empty."""
    return json.dumps([cache_salt or "", extra_key or ""]) if cache_salt or extra_key else None


def parse_tenant(line: str) -> str | None:
    """Return the key for an operator's line: a cache_salt, or a JSON list of it and extra_key; None if empty."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, list) and len(fields) == 2 and all(isinstance(field, str) for field in fields):
        return tenant_key(*fields)
    return tenant_key(line)
