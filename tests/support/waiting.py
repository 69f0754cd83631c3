"""For what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> float:
    """Return the seconds that it took; fail after the timeout."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds, "it takes too long"
        time.sleep(0.005)
    return time.monotonic() - started
