"""OpenAI-compatible servers of vLLM and SGLang as child processes: started on a free port, stopped by their pid."""

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

HOST = "127.0.0.1"
MODEL_NAME = "demo"
MAX_MODEL_LEN = 2048
START_LIMIT_S = 420.0


class ServerError(RuntimeError):
    """A server did not start, or exited by itself; the message has the end of its log."""


def free_port() -> int:
    """A free port below those of outgoing connections, which might take another before a server has started."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port


def environment(engine: str, python: str = sys.executable) -> dict[str, str]:
    """Return the environment of a CPU server: one thread per core, the venv's OpenMP runtime, no network."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "PYTHONUNBUFFERED": "1"}
    # A third faster than torch's OpenMP runtime, which it replaces: vLLM refuses both. In vLLM's CPU build.
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
        # Otherwise waiting threads of torch's OpenMP runtime spin, and steps take seconds under other load.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def in_process_environment() -> dict[str, str]:
    """Return the environment of a process that runs a vLLM CPU engine itself."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {"VLLM_LOGGING_LEVEL": "WARNING"} | environment("vllm") | own


def programs_first(env: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """Return `env` with the interpreter's folder first in PATH: engines compile with the ninja that pip put there."""
    beside = Path(shutil.which(python) or python).absolute().parent
    return {**env, "PATH": os.pathsep.join(filter(None, (str(beside), env.get("PATH"))))}


@dataclass
class Server:
    """A server process and its children. tied: it ends with this process, even if that is killed (Linux)."""

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
        """Start the server in its own process group, so that one signal ends all of it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"preexec_fn": end_with_parent if self.tied else None, "start_new_session": True}
        with self.log.open("wb") as out:
            how |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self.process = subprocess.Popen(self.command, env=self.env, **how)

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait for the health check. Raises ServerError: the process has exited, or the time limit has passed."""
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
        """Stop the server and its children, if they are running."""
        if self.process is not None:
            end_group(self.process.pid)
            self.process.wait()
            self.process = None

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the log, and errors among earlier lines."""
        log = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in log[:-lines] if "rror:" in line][-5:]
        return "\n".join([*errors, *log[-lines:], f"(all of it: {self.log})"])


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start all servers and wait until they are ready; stop them on every exit."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.stop()


def keep_telling(line: Callable[[], str]) -> None:
    """Print what is being done, `line()`, at once and every 15 s until this process ends."""
    print(f"{line()} ...", flush=True)
    timer = Timer(15, keep_telling, [line])
    timer.daemon = True
    timer.start()


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
    """Send SIGTERM to the process group of `leader`; SIGKILL if it still runs after `patience_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):  # not a child of this process, or already reaped
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
    """Return a server that is not started yet.

    Args:
        port: 0 selects a free one.
        eager: without compiled graphs, as exact comparisons require; SGLang on CPU is always eager.
        speculative: vLLM's `--speculative-config`; None for plain decoding. SGLang's options are derived from it.
        device: "cpu", or "cuda" with the engine's own defaults.
        requests: maximum number of concurrent requests, of at most `max_model_len` tokens each.
        python: interpreter of the engine's environment. prefixes: whether prefix caching is on.
    """
    port = port or free_port()
    env = environment(engine, python) if device == "cpu" else {**os.environ, "PYTHONUNBUFFERED": "1"}
    env, own = programs_first(env, python), speculative or {}
    length = str(max_model_len)
    if engine == "vllm":  # like `vllm serve`, which does not find its own version in the CPU wheel
        command = ["vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [f"--{'' if prefixes else 'no-'}enable-prefix-caching"]
        command += ["--max-model-len", length, "--max-num-seqs", str(requests)]
        command += ["--enforce-eager"] if eager else []
        command += ["--speculative-config", json.dumps(speculative)] if speculative is not None else []
    else:
        command = ["sglang.launch_server", "--model-path", str(model)]
        command += [] if prefixes else ["--disable-radix-cache"]
        command += ["--context-length", length, "--max-running-requests", str(requests)]
        # Otherwise an idle scheduler takes a whole core, which the other server may need.
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
