"""The OpenAI-compatible servers of vLLM and SGLang as child processes: started on a free port, ended by their pid."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
MODEL_NAME = "demo"
MAX_MODEL_LEN = 2048
START_LIMIT_S = 420.0


class ServerError(RuntimeError):
    """A server that did not start, or ended by itself, with the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def environment(engine: str, python: str = sys.executable) -> dict[str, str]:
    """The environment of a CPU server: one thread per core, the venv's OpenMP runtime, no network."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "PYTHONUNBUFFERED": "1"}
    # A third faster than torch's OpenMP runtime, and in its place, since vLLM refuses both. vLLM's CPU build has it.
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        others = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path and "omp" not in Path(path).name]
        env["LD_PRELOAD"] = ":".join([str(openmp), *others])
    if engine == "vllm":
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Reloading a cache of ahead-of-time compilation fails on CPU in 0.32.
        env |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0"}
    else:
        env["SGLANG_PLATFORM"] = "freedraft_cpu"
        # Waiting threads of torch's OpenMP runtime spin otherwise: when anything else runs, steps take seconds.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def in_process_environment() -> dict[str, str]:
    """The environment of a process that holds one of vLLM's CPU engines itself."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {"VLLM_LOGGING_LEVEL": "WARNING"} | environment("vllm") | own


def programs_first(env: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """The same with what lies beside an interpreter found first: engines compile with the ninja that pip puts there."""
    beside = Path(shutil.which(python) or python).absolute().parent
    return {**env, "PATH": os.pathsep.join(filter(None, (str(beside), env.get("PATH"))))}


@dataclass
class Server:
    """A server process and its children. If `tied`, it ends with this process, even if that is killed (Linux)."""

    name: str
    command: Sequence[str]
    env: dict[str, str]
    port: int
    log: Path
    tied: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it in a process group of its own, so that all of it can be ended by one signal."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"preexec_fn": end_with_parent if self.tied else None, "start_new_session": True}
        with self.log.open("wb") as out:
            how |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self.process = subprocess.Popen(self.command, env=self.env, **how)

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Raises ServerError: the process has ended, or the time is over."""
        assert self.process is not None, "start it first"
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"server '{self.name}' ended with code {self.process.returncode}\n{self.tail()}")
            if is_healthy(self.url):
                return
            time.sleep(0.5)
        raise ServerError(f"server '{self.name}' did not answer within {limit_s:.0f} s\n{self.tail()}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def stop(self) -> None:
        """End it and its children; nothing happens when it has ended."""
        if self.process is not None:
            end_group(self.process.pid)
            self.process.wait()
            self.process = None

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log, and the errors among the lines before."""
        log = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in log[:-lines] if "rror:" in line][-5:]
        return "\n".join([*errors, *log[-lines:], f"(all of it: {self.log})"])


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """All of them up; ended whatever happens."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.stop()


def end_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end_group(leader: int, patience_s: float = 20.0) -> None:
    """Ask the process group of `leader` to end; make it, when it does not in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):  # not our child, or reaped already
                os.waitpid(leader, os.WNOHANG)
            try:
                os.killpg(leader, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def build(
    name: str, engine: str, model: Path, log: Path, *, port: int = 0, dtype: str = "float32", eager: bool = True,
    speculative: dict[str, object] | None = None, device: str = "cpu", requests: int = 4,
    max_model_len: int = MAX_MODEL_LEN, python: str = sys.executable, prefixes: bool = False,
) -> Server:  # fmt: skip
    """A server that is not started yet.

    Args:
        port: 0 picks a free one.
        eager: without compiled graphs, as exact comparisons need it; SGLang on CPU is always eager.
        speculative: vLLM's `--speculative-config`; None decodes plainly. SGLang's options are set from it.
        device: "cpu", or "cuda" with the engine's own defaults.
        requests: at a time at most, of `max_model_len` tokens at most.
        python: of the environment that has the engine. prefixes: whether those of prompts are cached.
    """
    port = port or free_port()
    env = environment(engine, python) if device == "cpu" else {**os.environ, "PYTHONUNBUFFERED": "1"}
    env, own = programs_first(env, python), speculative or {}
    length = str(max_model_len)
    if engine == "vllm":  # as `vllm serve`, which does not find its own version in the CPU wheel
        command = ["vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [f"--{'' if prefixes else 'no-'}enable-prefix-caching"]
        command += ["--max-model-len", length, "--max-num-seqs", str(requests)]
        command += ["--enforce-eager"] if eager else []
        command += ["--speculative-config", json.dumps(speculative)] if speculative is not None else []
    else:
        command = ["sglang.launch_server", "--model-path", str(model)]
        command += [] if prefixes else ["--disable-radix-cache"]
        command += ["--context-length", length, "--max-running-requests", str(requests)]
        # An idle scheduler takes a whole core otherwise, also from the other server.
        command += ["--skip-server-warmup", "--enable-metrics", "--sleep-on-idle"]
        if device == "cpu":
            command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            command += ["--disable-cuda-graph", "--max-total-tokens", str(max_model_len * max(4, requests))]
        if speculative is not None:
            command += ["--speculative-algorithm", str(own["method"])]
            if "num_speculative_tokens" in own:
                command += ["--speculative-num-draft-tokens", str(own["num_speculative_tokens"])]
        keys = own.keys() - {"method", "num_speculative_tokens"}
        env |= {f"FREEDRAFT_{key.upper()}": str(own[key]) for key in sorted(keys)}
    command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), "--dtype", dtype]
    return Server(name, [python, "-m", *command], env, port, log)
