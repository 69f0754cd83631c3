"""SSSD in vLLM; passes the tenant key to live datastores."""

from dataclasses import replace

from freedraft.engines.vllm.methods import register as register_method
from freedraft.engines.vllm.scheduler import carry_salt
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
    learns = options.live != "off" and options.isolation == "strict"
    if (learns or options.isolation == "salt") and not carry_salt():
        raise ValueError(
            "this vLLM does not tell drafters whose a request is, so nothing can be kept apart by cache_salt: set "
            "isolation 'shared' if there is one tenant only, or isolation 'strict' and live 'off' ('freedraft doctor')"
        )
