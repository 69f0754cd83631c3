"""Machine and package versions of a measurement; timing and rounding of figures."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")
"""Instruction sets that decide the speed of matrix products, and so the cost of verification, best first."""


def _info(name: str) -> str:
    """Return a field of the first core in /proc/cpuinfo; "" if missing."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    found = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith(name))
    return next(found, "")


def cpu() -> str:
    return _info("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Return the best of `INSTRUCTIONS` that the processor has; "" if none."""
    known = {*_info("flags").split(), *_info("Features").split()}
    return next((name for name in INSTRUCTIONS if name in known), "")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    found = {"cpu": cpu(), "instructions": instructions(), "cores": cores(), "memory_gib": memory}
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def gpu(device: str = "cuda") -> dict[str, str]:
    """Return the names of the GPUs from nvidia-smi if `device` is "cuda"; empty without GPUs."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        if device == "cuda":
            names = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            return {"gpu": ", ".join(names.split("\n")).strip(", ")}
    return {}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def rounded(value: Any, places: int = 4) -> Any:
    """Return the same lists and dicts with every float rounded."""
    if isinstance(value, float):
        return round(value, places)
    if isinstance(value, dict):
        return {key: rounded(item, places) for key, item in value.items()}
    return [rounded(item, places) for item in value] if isinstance(value, list) else value


def timed(work: Callable[[], Any]) -> list[Any]:
    """Return the result of `work` and its seconds."""
    start = time.perf_counter()
    result = work()
    return [result, time.perf_counter() - start]
