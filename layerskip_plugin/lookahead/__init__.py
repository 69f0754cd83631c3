"""Draft length policies, which decide after every position of a round of draft passes."""

from layerskip_plugin.lookahead.base import Confidence, DraftVerify, Fixed, Lookahead
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.lookahead.disco import Disco
from layerskip_plugin.lookahead.records import Recorder, Verifications

__all__ = ["Confidence", "Cost", "Disco", "DraftVerify", "Fixed", "Lookahead", "Recorder", "Verifications"]
