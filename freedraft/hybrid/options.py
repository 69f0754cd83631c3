"""The options of the hybrid method: those of its two parts, which it addresses by role."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import create_model

from freedraft.config import ConfigError, PluginOptions
from freedraft.method import MethodSpec, spec_of_role
from freedraft.step import EngineContext

NAME = "freedraft"
ROLES = ("host", "model")  # the first part drafts on the host; the second runs the model


@functools.cache
def option_type() -> type[PluginOptions]:
    """The options of both parts; raises ConfigError when one of them is not registered."""
    bases = tuple(spec_of_role(role).option_type for role in ROLES)
    merged: type[PluginOptions] = create_model("HybridOptions", __base__=bases)
    merged.source_name = NAME
    return merged


def part_options(options: PluginOptions, role: str) -> PluginOptions:
    """The options of one part that the user set. The host part serves the metrics of both."""
    part = spec_of_role(role).option_type
    own = part.model_fields.keys() - (set() if role == "host" else {"metrics_port", "metrics_host"})
    return part.parse({name: value for name, value in options.model_dump(exclude_unset=True).items() if name in own})


def check(options: Any, context: EngineContext) -> None:
    """Raises ValueError for options that a part refuses, or that conflict."""
    if options.policy not in (None, "auto") or (options.policy is None and options.knee is not None):
        raise ConfigError("option 'policy' must be auto, without a knee: both drafters are compared by what steps take")
    if options.lookahead != "cost":
        raise ConfigError("option 'lookahead' must be cost: both drafters are compared by what draft passes take")
    for role in ROLES:
        part = spec_of_role(role)
        if part.check is not None:
            part.check(part_options(options, role), context)


SPEC = MethodSpec(NAME, "freedraft.hybrid.method:HybridMethod", option_type, check, runs_model=True, takes_corpora=True)
