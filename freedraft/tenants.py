"""What requests tell drafters: their tenant, from whose texts alone they are drafted, or that they want no drafts."""

import hashlib
import json
from typing import Any


def tenant_key(cache_salt: str | None, extra_key: str | None = None, *adapter: str) -> str | None:
    """Return the tenant's key of requests with these fields of vLLM's and SGLang's APIs; None where all are empty.
    adapter: what names the LoRA adapter in the engine's prefix cache; nothing for the model alone."""
    fields = [cache_salt or "", extra_key or "", *adapter]
    return json.dumps(fields) if any(fields) else None


def tenant_number(secret: bytes, key: str | None) -> int:
    """Return what a tenant is called in memory, in files and at URLs: 1 to 2^63 - 1, by a keyed digest of its key; 0
    without a key. Whoever has no `secret` cannot find a key by its number, nor two keys with one number."""
    if not key:
        return 0
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=secret).digest()
    return max(1, int.from_bytes(digest, "big") >> 1)


def names_client(key: str | None) -> bool:
    """Whether a key has a cache_salt or extra_key, and not only an adapter, which all clients may use."""
    return key is not None and not key.startswith('["", "", ')


def parse_tenant(line: str) -> str | None:
    """Return the key for an operator's line: a cache_salt, or a JSON list of `tenant_key`'s arguments; None if
    empty."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, list) and len(fields) >= 2 and all(isinstance(field, str) for field in fields):
        return tenant_key(*fields)
    return tenant_key(line)


def opted_out(extra: Any) -> bool:
    """Whether a client's fields for the drafter (vLLM's `extra_args`, SGLang's `custom_params`) say `"freedraft":
    "off"`. Clients may send anything; all else is ignored."""
    return isinstance(extra, dict) and extra.get("freedraft") == "off"
