"""Servers of a benchmark do not outlive it, even when it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import arctic
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_finds_what_pip_put_beside_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, device: str
) -> None:
    """The ninja that SGLang compiles with, also where no environment is active."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "ninja").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    server = servers.build("s", engine, tmp_path, tmp_path / "log", device=device, python="venv/bin/python")
    assert shutil.which("ninja", path=server.env["PATH"]) == str(programs / "ninja")
    assert shutil.which("sh", path=server.env["PATH"]) == shutil.which("sh")


def test_the_rivals_build_finds_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("cmake", "ninja"):
        (tmp_path / name).touch(mode=0o755)
    built: list[Path] = []
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(arctic, "build", built.append)
    monkeypatch.setattr("sys.argv", ["arctic.py", str(tmp_path / "built")])
    monkeypatch.setattr(servers.programs_first, "__defaults__", (str(tmp_path / "python"),))
    assert arctic.main() == 0 and built == [tmp_path / "built"]
    (tmp_path / "ninja").unlink()
    assert arctic.main() == 2


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
