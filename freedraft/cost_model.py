"""How many draft tokens a step may carry, by rule: the SSSD paper's (section 3.2), or a fixed number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from freedraft.hardware import HardwareProfile

Policy = Literal["auto", "knee", "fixed"]


class CostModel:
    """How many draft tokens the next step may carry; zero is a normal answer.

    Under policy "knee" the query tokens of a step, over the whole batch, stay at the ridge of the roofline, where they
    cost about as much as one: b * s_q = I_knee (paper, section 3.2), with caps for small batches. Under "fixed" every
    request may always draft `max_draft_tokens`. Policy "auto" (`freedraft.controller`) takes only the caps from here.
    """

    def __init__(
        self, profile: HardwareProfile, max_draft_tokens: int, *, policy: Policy = "knee", knee: int | None = None
    ) -> None:
        """
        Args:
            max_draft_tokens: most draft tokens per request, roots not counted.
            knee: replaces the profile's ridge.
        """
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must be at least 0, not {max_draft_tokens}")
        if knee is not None and knee < 1:
            raise ValueError(f"knee must be at least 1, not {knee}")
        self.profile = profile
        self.policy = policy
        self.max_draft_tokens = max_draft_tokens
        self.knee = profile.ridge if knee is None else knee

    def speculation_length(self, batch_size: int) -> int:
        """s_q of the paper: nodes per request, root included, I_knee / b; at least 1."""
        return max(1, round(self.knee / batch_size))

    def budget(self, batch_size: int) -> int:
        """Draft tokens for the whole batch, roots not counted: knee - batch, capped by what the requests may take."""
        return max(0, min(self._free_tokens(batch_size), batch_size * self.per_request(batch_size)))

    def per_request(self, batch_size: int) -> int:
        """Most draft tokens of any one request, root not counted."""
        if self.policy == "fixed":
            return self.max_draft_tokens
        cap = self.profile.max_nodes(batch_size)
        return self.max_draft_tokens if cap is None else min(self.max_draft_tokens, cap - 1)

    def width(self, batch_size: int, widths: Sequence[int]) -> int:
        """Nodes per request, root included, for an engine that verifies the same number for every request.

        Args:
            widths: the numbers of nodes that the engine is prepared for.

        Returns:
            the largest of `widths` that this batch may carry; 1 (no draft) when there is none.
        """
        most = self.per_request(batch_size) + 1
        if self.policy == "knee":
            most = min(most, self.speculation_length(max(1, batch_size)))
        return max((w for w in widths if w <= most), default=1)

    def _free_tokens(self, batch_size: int) -> int:
        if self.policy == "fixed":
            return batch_size * self.max_draft_tokens
        return self.knee - batch_size
