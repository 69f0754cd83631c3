"""A newcomer, in an empty directory: install the wheel beside vLLM, serve with the flag, ask, see the metric move."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from vllm_server import complete, get

from bench.lib.servers import build, running
from tests.support.pages import sums

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT = "one two three four one two three four one two three four one two"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The python of an environment that has vLLM, as this one has, and no freedraft."""
    folder = tmp_path_factory.mktemp("existing")
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_*(editable__+)?(freedraft|sssd_plugin|layerskip_plugin)", entry.name):
            (packages / entry.name).symlink_to(entry)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    (Path(own) / "existing.pth").write_text(f"{packages}\n")
    return python


def clean(**more):
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_", "FREEDRAFT_"))} | more


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.glob("freedraft-*.whl")
    return built


def accepted(port):
    return sums(get(port, "/metrics"))["vllm:spec_decode_num_accepted_tokens_total"]


@pytest.mark.extended
def test_four_commands(environment, wheel, demo_model, tmp_path, monkeypatch):
    def run(*command):
        arguments = [str(part) for part in command]
        done = subprocess.run(arguments, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    # 1: into the environment that has vLLM; what freedraft needs is there, or comes along.
    run(environment, "-m", "pip", "install", "-q", "--no-index", wheel)
    where = Path(run(environment, "-c", "import freedraft; print(freedraft.__file__)").strip())
    assert environment.parent.parent in where.parents

    # 2: the engine's own command and one flag.
    monkeypatch.chdir(tmp_path)
    flag = {"speculative": {"method": "sssd", "num_speculative_tokens": 8}}
    server = build("newcomer", "vllm", demo_model.resolve(), tmp_path / "log", python=str(environment), **flag)
    server.env = clean(VLLM_CPU_KVCACHE_SPACE="1", NUMBA_CACHE_DIR=str(tmp_path / "numba"))
    with running(server):
        # 3 and 4: ask, and look at vLLM's own metrics.
        assert accepted(server.port) == 0
        complete(server.port, PROMPT)
        assert accepted(server.port) > 0
