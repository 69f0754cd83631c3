"""SSSD in vLLM, where live datastores need to be told whose a request is."""

from dataclasses import replace

from freedraft.engines.vllm.methods import register as register_method
from freedraft.engines.vllm.tenants import carry_salt
from freedraft.step import EngineContext
from sssd_plugin import method
from sssd_plugin.options import SssdOptions


def register() -> None:
    """Entry point of `vllm.general_plugins`: runs in every process of vLLM."""
    if register_method(replace(method.SPEC, check=check)):
        carry_salt()


def check(options: SssdOptions, context: EngineContext) -> None:
    """See `MethodSpec.check`. Raises ValueError."""
    method.check(options, context)
    if options.live and options.isolation == "tenant" and not carry_salt():
        raise ValueError(
            "this vLLM does not tell drafters whose a request is, so live datastores cannot keep tenants apart: "
            "remove option 'live', or set isolation 'shared' if there is one tenant only (see 'freedraft doctor')"
        )
