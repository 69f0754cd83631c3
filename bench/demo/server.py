"""Start an OpenAI-compatible server with SSSD in the background and print an example request; ask it; stop it.

python -m bench.demo.server start --engine vllm --model build/model --port 8000
python -m bench.demo.server ask "Write a haiku about rivers." [--plain]
python -m bench.demo.server stop
"""

import argparse
import json
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

from bench.demo.store import ensure_store
from bench.lib import servers

STATE = Path("build/server.json")  # build/serve.json belongs to bench/serve.py
METRICS = 9100


def recorded() -> dict[str, Any] | None:
    """Return engine, pid and port of the server that an earlier call started; None if it no longer runs."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text(encoding="utf-8"))
        command = Path(f"/proc/{state['pid']}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, KeyError):
        return None
    # Pids are reused: only a process with this port on its command line is the server.
    return state if {b"--port", str(state["port"]).encode()} <= {*command} else None


def metrics_port() -> int:
    """The port that `freedraft top` reads by default, or a free one if that is taken."""
    with socket.socket() as probe:
        return servers.free_port() if probe.connect_ex((servers.HOST, METRICS)) == 0 else METRICS


def start(engine: str, model: Path, store: Path, port: int) -> dict[str, Any]:
    """Return engine, pid and ports of the server. Raises ServerError: the port is taken, or it did not start."""
    known = recorded()
    if known and known.get("engine") == engine and servers.is_healthy(f"http://{servers.HOST}:{known['port']}"):
        return known
    stop()
    if servers.is_healthy(f"http://{servers.HOST}:{port}"):
        raise servers.ServerError(f"port {port} is taken: make serve PORT=...")
    servers.keep_telling(lambda: "starting the server")
    ensure_store(store, model)
    metrics = metrics_port()
    settings = {"method": "sssd", "num_speculative_tokens": 8, "datastore": str(store.resolve())}
    settings |= {"metrics_port": metrics}
    log = Path("build/logs/serve.log")
    server = servers.build("sssd", engine, model, log, port=port, requests=8, speculative=settings)
    server.start()
    assert server.process is not None
    state = {"engine": engine, "pid": server.process.pid, "port": port, "metrics": metrics}
    try:
        STATE.write_text(json.dumps(state) + "\n")
        server.wait_until_ready()
    except BaseException:
        server.stop()
        STATE.unlink(missing_ok=True)
        raise
    return state


def stop() -> None:
    """Stop the server of an earlier `start`, if there is one."""
    known = recorded()
    if known is not None:
        servers.end_group(known["pid"])
        print("server stopped")
    STATE.unlink(missing_ok=True)


def ask(question: str, max_tokens: int, plain: bool) -> str:
    """Print vLLM's answer as it comes, to a client whose text nobody has seen before; return how fast it came. plain:
    without drafts."""
    from openai import OpenAI  # in the engine's environment only, which `make stop` does not need

    if (state := recorded()) is None:
        raise servers.ServerError("no server is running: make serve")
    client = OpenAI(base_url=f"http://{servers.HOST}:{state['port']}/v1", api_key="none", max_retries=0)
    create: Any = client.chat.completions.create  # its message types are one class per role
    start, tokens = time.perf_counter(), 0
    for chunk in create(
        model=servers.MODEL_NAME, messages=[{"role": "user", "content": question}], temperature=0.0,
        max_tokens=max_tokens, stream=True, stream_options={"include_usage": True},
        extra_body={"cache_salt": secrets.token_hex(8)} | ({"vllm_xargs": {"freedraft": "off"}} if plain else {}),
    ):  # fmt: skip
        print(*(choice.delta.content or "" for choice in chunk.choices), end="", flush=True)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    seconds, how = time.perf_counter() - start, "without" if plain else "with"
    return f"{how} drafts: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server with SSSD that stays up.")
    parser.add_argument("command", choices=("start", "ask", "stop"))
    parser.add_argument("question", nargs="?", default="Write a haiku about rivers.")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--plain", action="store_true", help="ask without drafts")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer")
    args = parser.parse_args()
    if args.command == "stop":
        stop()
        sys.exit()
    try:
        if args.command == "ask":
            print(f"\n{ask(args.question, args.max_tokens, args.plain)}", file=sys.stderr)
            sys.exit()
        state = start(args.engine, args.model, Path("build/store"), args.port)
    except KeyboardInterrupt:
        sys.exit(130)
    except servers.ServerError as error:
        parser.exit(2, f"error: {error}\n")
    url = f"http://{servers.HOST}:{state['port']}/v1"
    messages = [{"role": "user", "content": args.question}]
    request = json.dumps({"model": servers.MODEL_NAME, "messages": messages, "max_tokens": args.max_tokens})
    print(f"serving on {url} until `make stop`. Ask it:\n")
    print(f"curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{request}'\n")
    program = os.path.relpath(Path(sys.executable).with_name("freedraft"))
    print(f"Watch it:\n\n{program} top {state['metrics']}\n")
