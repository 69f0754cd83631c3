"""`HardwareProfile`: speed figures of an accelerator, for the cost model."""

import logging
from pathlib import Path
from typing import Annotated, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from freedraft.config import ConfigError, configs_dir, one_line, read_yaml, suggestion

logger = logging.getLogger(__name__)

CPU = "cpu"  # device name without a GPU

# Number formats that a profile may give a rate for, and their bytes per element
Dtype = Literal["float32", "float16", "bfloat16", "float8", "int8"]
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0, "int8": 1.0}


class HardwareProfile(BaseModel):
    """What the cost model knows of an accelerator."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)  # also the stem of its file
    peak_flops: PositiveFloat  # dense bf16 FLOP/s
    bandwidth: PositiveFloat  # bytes/s of the memory that holds the weights
    source: Literal["datasheet", "measured"]
    peak_flops_by_dtype: dict[Dtype, PositiveFloat] = {}  # FLOP/s of other number formats
    # Query tokens per step, over the whole batch, that cost about as much as one; None: derived.
    knee: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    # The paper's caps: most nodes per request (root included) from this batch size up to the next larger entry.
    max_nodes_by_batch: dict[PositiveInt, PositiveInt] = {}
    devices: tuple[str, ...] = ()  # parts of the names that torch reports, by which `hardware: auto` finds this profile

    @property
    def ridge(self) -> int:
        """Query tokens per step at the ridge of the roofline: `knee`, or I_knee = peak FLOP/s / bandwidth (paper,
        section 3.2): a matrix product does 2 FLOP per query token for every 2-byte weight that it reads."""
        return self.knee if self.knee is not None else max(1, round(self.peak_flops / self.bandwidth))

    def ridge_of(self, weight_bytes: float) -> int:
        """Ridge point (tokens) for these bytes per weight: quantised weights are read in less time."""
        return self.ridge if self.knee is not None else max(1, round(self.ridge * min(weight_bytes / 2, 1.0)))

    def flops(self, dtype: str) -> float:
        """FLOP/s in `dtype`: the profile's figure for it, or bf16's; 8-bit formats count as bf16 unless given."""
        return self.peak_flops_by_dtype.get(cast(Dtype, dtype), self.peak_flops)

    def max_nodes(self, batch_size: int) -> int | None:
        """Most nodes per request, root included, at this batch size; None where there is no cap."""
        entry = max((batch for batch in self.max_nodes_by_batch if batch <= batch_size), default=None)
        return None if entry is None else self.max_nodes_by_batch[entry]

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """The profile in a YAML file, or the shipped one of that name (any case). Raises ConfigError: there is no such
        profile, or it makes no sense."""
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
        """Files of the profiles in the configs folder by name."""
        return {path.stem: path for path in sorted((configs_dir() / "hardware").glob("*.yaml"))}

    @classmethod
    def detect(cls, device: str | None = None) -> Self:
        """The shipped profile of a device: a GPU's name, or "cpu"; None: the first device of torch. An unknown GPU gets
        the GPU profile with the lowest ridge, which drafts least, and a log line."""
        device = device or device_name() or CPU
        profiles = [cls.load(path) for path in cls.shipped().values()]
        if device == CPU:
            return next(p for p in profiles if p.name == "cpu")
        # The longest match wins, so that "L40S" is not taken for an "L4".
        matches = [(len(part), p) for p in profiles for part in p.devices if part.lower() in device.lower()]
        if matches:
            return max(matches, key=lambda match: match[0])[1]
        fallback = min((p for p in profiles if p.name != "cpu"), key=lambda p: p.ridge)
        logger.warning(
            "freedraft: no hardware profile for '%s', using '%s' (%d tokens per step take about as long as one); "
            "measure this GPU with 'freedraft profile', which is then found by its name",
            device, fallback.name, fallback.ridge,
        )  # fmt: skip
        return fallback


def device_name() -> str | None:
    """Name of the first GPU as torch reports it; None without torch or a GPU. Initialises CUDA: do not call before a
    fork."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def choose_profile(hardware: str, device: str | None = None) -> HardwareProfile:
    """The profile named by option `hardware`. Raises ConfigError: no such profile, or an invalid one."""
    return HardwareProfile.detect(device) if hardware == "auto" else HardwareProfile.load(hardware)
