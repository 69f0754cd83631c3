"""`Gate`: lets a step be launched before its drafts are there. A device's stream waits at it until the host has written
them, so that of the host's work only drafting lies between two steps.

The engine's thread polls for tokens and drafts, since its own work is done by then. On a CPU a compiled thread without
the GIL opened a simulated gate 60 us sooner on a core of its own, and up to 1.3 ms later (median) on shared cores.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

logger = logging.getLogger(__name__)

LONGEST = 0.05  # seconds that a gate stays shut for a drafter
_PATIENCE = 8  # late drafts in a row after which the gate is not used any more

Wait = Callable[[int], None]  # makes the stream wait until the flag has at least this number


@triton.jit(do_not_specialize=["number"])
def wait_kernel(flag, number):
    """Spin until int32 [1] `flag`, written by the host, has at least `number`."""
    value = tl.load(flag, volatile=True)
    while value < number:
        value = tl.load(flag, volatile=True)


def stream_wait(flag: torch.Tensor) -> Wait:
    """A `Wait` on the current stream, by the driver or else by a kernel. flag: int32 [1], pinned memory as the device
    sees it."""

    def by_kernel(number: int) -> None:
        wait_kernel[(1,)](flag, number, num_warps=1)

    try:
        library = ctypes.CDLL("libcuda.so.1")
        wait = getattr(library, "cuStreamWaitValue32_v2", None) or library.cuStreamWaitValue32
    except (OSError, AttributeError):
        return by_kernel
    wait.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

    def by_driver(number: int) -> None:
        stream = torch.cuda.current_stream(flag.device).cuda_stream
        if wait(stream, flag.data_ptr(), number, 0):  # CU_STREAM_WAIT_VALUE_GEQ
            raise OSError("the driver does not wait for values in streams")

    try:
        by_driver(0)  # open
    except OSError:
        return by_kernel
    return by_driver


def why_no_gate(vllm_config: Any) -> str | None:
    """Why drafts must be there before a step is launched, in words for the user; None if they need not."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return "CUDA_LAUNCH_BLOCKING is set: unset it"
    return "a KV connector may wait for the device" if vllm_config.kv_transfer_config is not None else None


class Gate:
    """One step at a time: `close`, queue what reads drafts, write them in `writing`, `open`. flag: int32 [1], pinned.

    A thread opens a gate that is shut for `LONGEST` seconds after `watch`: late drafts are lost, tokens are not.
    """

    def __init__(self, flag: torch.Tensor, wait: Wait) -> None:
        self._flag, self._wait = flag.numpy(), wait
        self._number, self._watched_since, self._late = 0, math.inf, 0
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None

    @property
    def usable(self) -> bool:
        return self._late < _PATIENCE

    @property
    def shut(self) -> bool:
        return bool(self._flag[0] < self._number)

    def close(self) -> None:
        """Make the stream wait here. The tokens to draft after may still be computed."""
        if self._watch is None or not self._watch.is_alive():  # none yet, or this process was forked
            self._lock = threading.Lock()
            self._watch = threading.Thread(target=self._open_late, name="freedraft-gate", daemon=True)
            self._watch.start()
        self._watched_since = math.inf
        self._number += 1
        self._wait(self._number)

    def watch(self) -> None:
        """The tokens are there: from now on drafts can be late."""
        self._watched_since = time.monotonic()

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Whether what the stream waits for may still be written; the gate is opened after it."""
        with self._lock:
            in_time = self.shut
            try:
                yield in_time
            finally:
                self._late = 0 if in_time else self._late
                self._flag[0] = self._number

    def open(self) -> None:
        with self._lock:
            self._flag[0] = self._number

    def give_up(self) -> None:
        self._late = _PATIENCE

    def _open_late(self) -> None:
        while self.usable:
            time.sleep(LONGEST / 2)
            with self._lock:
                if self.shut and time.monotonic() - self._watched_since > LONGEST:
                    self._flag[0] = self._number
                    self._late += 1
                    if not self.usable:
                        late = "freedraft: drafts take longer than %.0f ms: from now on steps are launched after them"
                        logger.warning(late, 1000 * LONGEST)
