"""Requests whose clients want no drafts."""

from __future__ import annotations

from typing import Any

FIELD, OFF = "freedraft", "off"


def opted_out(extra: Any) -> bool:
    """Whether a client's fields for the drafter (vLLM's `extra_args`, SGLang's `custom_params`) are a dict with
    `"freedraft": "off"`. Clients may send anything; all else is ignored."""
    return isinstance(extra, dict) and extra.get(FIELD) == OFF
