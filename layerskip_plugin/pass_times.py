"""`PassTimes`: seconds of the parts of a pass, and the tokens per time that they allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layerskip_plugin.skip_set import SkipSet


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a pass at one context length and batch.

    Attributes:
        attention, mlp: of one sublayer in a draft pass.
        head: of the final norm, the LM head and sampling, and of everything else that all draft passes share.
        verify: seconds of a verify pass with n query tokens per request; `verify(1)` is a step without drafts.
    """

    attention: float
    mlp: float
    head: float
    verify: Callable[[int], float]

    def draft(self, skip: SkipSet) -> float:
        """t_draft(S) = kept attention * t_attn + kept MLP * t_mlp + t_head."""
        kept = (skip.n_layers - len(skip.attention)) * self.attention + (skip.n_layers - len(skip.mlp)) * self.mlp
        return kept + self.head


def tokens_per_time(acceptance: float, draft: float, verify: Callable[[int], float], length: int) -> float:
    """TPT(S, d) = (1 + a + ... + a^d) / (d * t_draft(S) + t_verify(d + 1)); d = 0 is decoding without drafts."""
    tokens = sum(acceptance**i for i in range(length + 1))
    return tokens / (length * draft + verify(length + 1))
