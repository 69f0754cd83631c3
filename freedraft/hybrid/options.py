"""The options of the hybrid method: those of both drafters."""

from __future__ import annotations

from typing import ClassVar

from freedraft.config import ConfigError
from freedraft.method import MethodSpec
from freedraft.step import EngineContext
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.options import check as check_layerskip
from sssd_plugin.method import check as check_sssd
from sssd_plugin.options import SssdOptions

NAME = "hybrid"


class HybridOptions(SssdOptions, LayerSkipOptions):
    """Every option of `sssd` and of `layerskip`."""

    source_name: ClassVar[str] = NAME
    shape_at_one_length = property(lambda self: self.shape)  # of n-grams

    def parts(self) -> tuple[SssdOptions, LayerSkipOptions]:
        """The options of each drafter that were set."""
        ngrams, passes = SssdOptions.model_fields, LayerSkipOptions.model_fields
        return (
            SssdOptions.parse(self.model_dump(exclude_unset=True, include=set(ngrams))),
            LayerSkipOptions.parse(self.model_dump(exclude_unset=True, include=set(passes))),
        )


def check(options: HybridOptions, context: EngineContext) -> None:
    """Raises ValueError for options that a drafter refuses, or that conflict."""
    if options.policy not in (None, "auto") or (options.policy is None and options.knee is not None):
        raise ConfigError("option 'policy' must be auto, without a knee: both drafters are compared by what steps take")
    if options.lookahead != "cost":
        raise ConfigError("option 'lookahead' must be cost: both drafters are compared by what draft passes take")
    ngrams, passes = options.parts()
    check_sssd(ngrams, context)
    check_layerskip(passes, context)


SPEC = MethodSpec(
    NAME, "freedraft.hybrid.method:HybridMethod", HybridOptions, check, runs_model=True, takes_corpora=True
)
