"""How far to draft: policies that are asked after every position of a round of draft passes."""

from layerskip_plugin.lookahead.adaptive import DraftVerify
from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.lookahead.cost import Cost, Costs
from layerskip_plugin.lookahead.disco import Disco
from layerskip_plugin.lookahead.records import Recording, Verifications
from layerskip_plugin.lookahead.simple import Confidence, Fixed

__all__ = [
    "Confidence", "Cost", "Costs", "Disco", "DraftVerify", "Fixed", "Lookahead", "Recording", "Verifications",
]  # fmt: skip
