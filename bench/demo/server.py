"""Start an OpenAI-compatible server with SSSD in the background and print an example request; or stop it.

python -m bench.demo.server start --engine vllm --model build/model --port 8000
python -m bench.demo.server stop
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.demo.store import ensure_store
from bench.lib import servers

STATE = Path("build/server.json")  # build/serve.json belongs to bench/serve.py


def recorded() -> dict[str, Any] | None:
    """Return engine, pid and port of the server that an earlier call started; None if it no longer runs."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text(encoding="utf-8"))
        command = Path(f"/proc/{state['pid']}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError):
        return None
    # Pids are reused: only a process with this port on its command line is the server.
    return state if {b"--port", str(state["port"]).encode()} <= {*command} else None


def start(engine: str, model: Path, store: Path, port: int) -> int:
    """Return the port of the server. Raises ServerError: the port is taken, or it did not start."""
    known = recorded()
    if known and known.get("engine") == engine and servers.is_healthy(f"http://{servers.HOST}:{known['port']}"):
        return int(known["port"])
    stop()
    if servers.is_healthy(f"http://{servers.HOST}:{port}"):
        raise servers.ServerError(f"port {port} is taken: make serve PORT=...")
    servers.keep_telling(["starting the server"])
    ensure_store(store, model)
    settings = {"method": "sssd", "num_speculative_tokens": 8, "datastore": str(store.resolve())}
    log = Path("build/logs/serve.log")
    server = servers.build("sssd", engine, model, log, port=port, requests=8, speculative=settings)
    server.start()
    assert server.process is not None
    try:
        STATE.write_text(json.dumps({"engine": engine, "pid": server.process.pid, "port": port}) + "\n")
        server.wait_until_ready()
    except BaseException:
        server.stop()
        STATE.unlink(missing_ok=True)
        raise
    return port


def stop() -> None:
    """Stop the server of an earlier `start`, if there is one."""
    known = recorded()
    if known is not None:
        servers.end_group(known["pid"])
        print("server stopped")
    STATE.unlink(missing_ok=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server with SSSD that stays up.")
    parser.add_argument("command", choices=("start", "stop"))
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.command == "stop":
        stop()
        sys.exit()
    try:
        url = f"http://{servers.HOST}:{start(args.engine, args.model, Path('build/store'), args.port)}/v1"
    except KeyboardInterrupt:
        sys.exit(130)
    except servers.ServerError as error:
        parser.exit(2, f"error: {error}\n")
    messages = [{"role": "user", "content": "Write a haiku about rivers."}]
    request = json.dumps({"model": servers.MODEL_NAME, "messages": messages, "max_tokens": 64})
    print(f"serving on {url} until `make stop`. Ask it:\n")
    print(f"curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{request}'\n")
