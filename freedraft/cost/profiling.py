"""Measures a machine's roofline (FLOP/s and bandwidth) in a few seconds."""

import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from freedraft.config import ConfigError, configs_dir
from freedraft.cost.hardware import Dtype, HardwareProfile
from freedraft.files import write_atomically

_SECONDS = 1.5  # per measurement
_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


def measure(device: str | None, name: str | None, progress: Callable[[str, float], None]) -> HardwareProfile:
    """Measure matrix products and copies with torch. Raises ConfigError: torch is missing, or the device is.

    Args:
        device: "cuda" or "cpu"; None takes the GPU where there is one.
        name: of the profile; None: from the device's name.
        progress: called with the name of each measurement and the share done, 0 to 1.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError("'freedraft profile' measures with torch: install it, or use a shipped profile") from None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"--device {device}: torch sees no such device here; give cpu or cuda")
    title = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    largest = 8192 if device == "cuda" else 2048
    flops: dict[Dtype, float] = {}
    for i, dtype in enumerate(_DTYPES):
        progress(f"matrix products, {dtype}", i / (len(_DTYPES) + 1))
        try:
            size = largest // 8
            while True:  # an emulated format would take minutes at full size
                a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
                seconds = median_seconds(partial(torch.mm, a, a), 0.1 if size < largest else _SECONDS)
                if size == largest or seconds > _SECONDS / 50:
                    break
                size *= 2
        except RuntimeError:  # a number format that this device cannot multiply
            continue
        flops[dtype] = 2 * size**3 / seconds
    progress("copies", len(_DTYPES) / (len(_DTYPES) + 1))
    source = torch.empty((1 << 30 if device == "cuda" else 1 << 28), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / median_seconds(lambda: target.copy_(source), _SECONDS)
    progress("done", 1.0)
    peak = flops.pop("bfloat16", None) or flops["float32"]
    return HardwareProfile(
        name=name or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        source="measured",
        peak_flops=_round(peak),
        bandwidth=_round(bandwidth),
        peak_flops_by_dtype={dtype: _round(rate) for dtype, rate in flops.items()},
        devices=(title,) if device == "cuda" else (),
        max_nodes_by_batch={1: 32} if device == "cuda" else {},
    )


def write(profile: HardwareProfile, path: Path | None = None, *, force: bool = False) -> Path:
    """Write a profile as YAML, by default into the configs folder, where `hardware: NAME` finds it. Raises ConfigError:
    the file exists and `force` is False, or the folder is not writable."""
    path = configs_dir() / "hardware" / f"{profile.name}.yaml" if path is None else path
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: give another --name or --out, or --force to replace it")
    values: dict[str, Any] = profile.model_dump(exclude_defaults=True)
    values["devices"] = list(profile.devices)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, yaml.safe_dump(values, sort_keys=False).encode(), mode=0o666)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): give --out FILE.yaml") from None
    return path


def median_seconds(work: Callable[[], Any], budget: float = 0.0, least: int = 3) -> float:
    """Median seconds of `work` on its device, after one warm-up call: of `least` calls, or of up to 500 within `budget`
    seconds."""
    import torch

    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    work()
    synchronise()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < least or (time.perf_counter() < end and len(times) < 500):
        started = time.perf_counter()
        work()
        synchronise()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")
