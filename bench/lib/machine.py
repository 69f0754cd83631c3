"""The machine and the package versions that figures are measured with; how they are timed and rounded."""

import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")
"""What decides most about matrix products on a CPU, and what it costs to verify several tokens: the best first."""


def _info(name: str) -> str:
    """A field of the first core in /proc/cpuinfo; "" for none."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    found = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith(name))
    return next(found, "")


def cpu() -> str:
    return _info("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """The best of `INSTRUCTIONS` that the processor has; "" for none of them."""
    known = {*_info("flags").split(), *_info("Features").split()}
    return next((name for name in INSTRUCTIONS if name in known), "")


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    found = {"cpu": cpu(), "instructions": instructions(), "cores": cores(), "memory_gib": memory}
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def gpu(device: str = "cuda") -> dict[str, str]:
    """The GPUs by the names of nvidia-smi if `device` is "cuda"; empty without."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        if device == "cuda":
            names = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            return {"gpu": ", ".join(names.split("\n")).strip(", ")}
    return {}


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those of the packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def rounded(value: Any, places: int = 4) -> Any:
    """The same lists and dicts with every float rounded."""
    if isinstance(value, float):
        return round(value, places)
    if isinstance(value, dict):
        return {key: rounded(item, places) for key, item in value.items()}
    return [rounded(item, places) for item in value] if isinstance(value, list) else value


def timed(work: Callable[[], Any]) -> list[Any]:
    """What `work` returns, and its seconds."""
    start = time.perf_counter()
    result = work()
    return [result, time.perf_counter() - start]


def in_fresh_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process of its own, so that the peak of memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()
