"""How many draft tokens a step may carry: the roofline rule of the SSSD paper (section 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from freedraft.config import ConfigError, configs_dir, one_line, read_yaml, suggestion

logger = logging.getLogger(__name__)

Policy = Literal["knee", "fixed"]


class HardwareProfile(BaseModel):
    """What the cost model knows of an accelerator.

    Attributes:
        name: also the stem of the file it comes from.
        peak_flops: dense bf16 FLOP/s.
        bandwidth: bytes/s of the memory that holds the weights.
        source: "datasheet" or "measured".
        knee: query tokens per step, over the whole batch, that cost about as much as one; None derives it.
        token_cost: what one more query token below the knee adds to a step, as a share of it. A draft token that is
            less likely to be accepted than this does not pay.
        max_nodes_by_batch: the paper's caps: at a batch of this size or more, at most so many nodes per request (root
            included), until the next larger entry.
        devices: parts of the device names that torch reports, by which `hardware: auto` finds this profile.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    peak_flops: float = Field(gt=0)
    bandwidth: float = Field(gt=0)
    source: Literal["datasheet", "measured"]
    knee: int | None = Field(default=None, ge=1, le=1_000_000)
    token_cost: float = Field(default=0.0, ge=0.0, le=1.0)
    max_nodes_by_batch: dict[int, int] = Field(default_factory=dict)
    devices: tuple[str, ...] = ()

    @field_validator("max_nodes_by_batch")
    @classmethod
    def _positive(cls, caps: dict[int, int]) -> dict[int, int]:
        if any(batch < 1 or nodes < 1 for batch, nodes in caps.items()):
            raise ValueError("needs batch sizes and node counts of at least 1")
        return dict(sorted(caps.items()))

    @property
    def ridge(self) -> int:
        """Query tokens per step at the ridge of the roofline: `knee`, or I_knee = peak FLOP/s / bandwidth.

        With bf16 weights a matrix product does 2 FLOP per query token for every 2-byte weight that it reads, so its
        intensity is about b * s_q FLOP per byte, and I_knee counts query tokens (paper, section 3.2).
        """
        return self.knee if self.knee is not None else max(1, round(self.peak_flops / self.bandwidth))

    def max_nodes(self, batch_size: int) -> int | None:
        """Most nodes per request, root included, at this batch size; None where there is no cap."""
        cap = None
        for batch, nodes in self.max_nodes_by_batch.items():
            if batch <= batch_size:
                cap = nodes
        return cap

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """The profile in a YAML file, or the shipped one of that name (any case).

        Raises:
            ConfigError: there is no such profile, or it makes no sense.
        """
        text = str(name_or_path)
        path = Path(text).expanduser()
        if path.suffix not in (".yaml", ".yml") and path.name == text:
            shipped = cls.shipped()
            if text.lower() not in shipped:
                raise ConfigError(
                    f"there is no hardware profile '{text}': {suggestion(text.lower(), [*shipped, 'auto'])}"
                    " (or give the path of a .yaml file)"
                )
            path = shipped[text.lower()]
        try:
            return cls.model_validate(read_yaml(path))
        except ValidationError as error:
            raise ConfigError(one_line(error, cls.model_fields, f"hardware profile {path}")) from None

    @classmethod
    def shipped(cls) -> dict[str, Path]:
        """Files of the shipped profiles by name."""
        return {path.stem: path for path in sorted((configs_dir() / "hardware").glob("*.yaml"))}

    @classmethod
    def detect(cls) -> Self:
        """The shipped profile of the device that torch sees: the first GPU, else the CPU.

        An unknown GPU gets the shipped GPU profile with the lowest ridge, which drafts least, and a log line.
        """
        device = device_name()
        profiles = [cls.load(path) for path in cls.shipped().values()]
        if device is None:
            return next(p for p in profiles if p.name == "cpu")
        # The longest match wins, so that "L40S" is not taken for an "L4".
        matches = [(len(part), p) for p in profiles for part in p.devices if part.lower() in device.lower()]
        if matches:
            return max(matches, key=lambda match: match[0])[1]
        fallback = min((p for p in profiles if p.name != "cpu"), key=lambda p: p.ridge)
        logger.warning(
            "freedraft: no hardware profile for '%s', using '%s' (%d query tokens per step are free); "
            "set option 'hardware' to a profile or 'knee' to a number",
            device,
            fallback.name,
            fallback.ridge,
        )
        return fallback


def device_name() -> str | None:
    """Name of the first GPU as torch reports it; None without torch or without a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


class CostModel:
    """How many draft tokens the next step may carry; zero is a normal answer.

    Under policy "knee" the query tokens of a step, over the whole batch, stay at the ridge of the roofline, where they
    cost about as much as one: b * s_q = I_knee (paper, section 3.2), with caps for small batches. Under "fixed" every
    request may always draft `max_draft_tokens`.
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
            most = min(most, self.knee // max(1, batch_size))
        return max((w for w in widths if w <= most), default=1)

    def _free_tokens(self, batch_size: int) -> int:
        if self.policy == "fixed":
            return batch_size * self.max_draft_tokens
        return self.knee - batch_size


def choose_profile(hardware: str) -> HardwareProfile:
    """The profile that option `hardware` names; "auto" asks torch.

    Raises:
        ConfigError: there is no such profile, or it makes no sense.
    """
    return HardwareProfile.detect() if hardware == "auto" else HardwareProfile.load(hardware)
