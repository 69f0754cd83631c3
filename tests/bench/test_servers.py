"""Servers of a benchmark do not outlive it, even when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.lib import servers

PARENT = """
import os, sys, time
from pathlib import Path
from bench.lib import servers
server = servers.Server("s", [sys.executable, "-c", "import time; time.sleep(300)"], dict(os.environ), 1, Path("log"))
server.tied = True
server.start()
print(server.process.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on a parent's death is Linux's")
def test_a_tied_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    here = os.environ | {"PYTHONPATH": str(Path(servers.__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=here, cwd=tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the server outlived its parent")
