"""Prometheus metrics of drafting.

The client library is imported only when a drafter is built: it reads its multi-process mode from an environment
variable at import, which SGLang sets after loading plugins.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

from freedraft.config import LOCAL, ConfigError

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Summary

logger = logging.getLogger(__name__)

_servers: dict[tuple[str, int], int] = {}  # port of each metrics server, by configured address
_lock = threading.Lock()


class Metrics(NamedTuple):
    """The metrics of one method; their help texts are below."""

    requests: Gauge
    budget: Gauge
    speedup: Gauge
    request_steps: Counter
    tokens: Counter
    drafted: Counter
    accepted: Counter
    seconds: Summary
    late: Counter
    failures: Counter

    @classmethod
    def of(cls, method: str) -> Metrics:
        """The metrics of the method of this name."""
        return cls._make(family.labels(method) for family in _families())


@functools.cache
def _families() -> Metrics:
    """Registered by the first drafter of a process, so that the engine's own metrics server does not show them. With
    several API servers vLLM sets Prometheus's multi-process mode, in which gauges need an aggregation."""
    from prometheus_client import Counter, Gauge, Summary

    label = ["method"]

    def gauge(name: str, text: str, mode: Literal["livesum", "livemax"]) -> Gauge:
        return Gauge(f"freedraft_{name}", text, label, multiprocess_mode=mode)

    def counter(name: str, text: str) -> Counter:
        return Counter(f"freedraft_{name}", text, label)

    speedup = "Tokens per second over plain decoding, by the estimate of policy auto; NaN for others"
    return Metrics(
        requests=gauge("requests", "Requests whose tokens the drafter holds", "livesum"),
        budget=gauge("budget_tokens", "Draft tokens that the last step was allowed, over the whole batch", "livesum"),
        speedup=gauge("speedup", speedup, "livemax"),
        request_steps=counter("request_steps", "Requests that a step decoded, over all steps"),
        tokens=counter("tokens", "Tokens that these steps gave them"),
        drafted=counter("draft_tokens", "Draft tokens verified by the target"),
        accepted=counter("accepted_tokens", "Draft tokens accepted by the target"),
        seconds=Summary("freedraft_drafting_seconds", "Time spent drafting, per step", label),
        late=counter("late_steps", "Steps that went without drafts because these took too long"),
        failures=counter("failures", "Calls of the drafter that raised; it pauses after each"),
    )


def check_address(port: int | None, host: str) -> None:
    """Raise ConfigError, before the engine starts, where `serve` would fail."""
    if not port or (host, port) in _servers:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _refused(host, port, error) from None


def where_to_look(port: int | None) -> str:
    """Log text: how to watch drafting."""
    return f"'freedraft top {port}' shows what it brings" if port else "set metrics_port to see what it brings"


def serve(port: int | None, rank: int = 0, host: str = LOCAL) -> int | None:
    """Serve this process's metrics at http://host:port/metrics, once per address and process; return the port. The API
    server's own page does not show them. Raises ConfigError: the port is taken, or the host is no address of this
    machine.

    Args:
        port: 0 picks a free one, None serves nothing.
        rank: of this process among those of the engine, each of which serves at port + rank.
    """
    if port is None:
        return None
    from prometheus_client import start_http_server

    port = port and port + rank
    with _lock:
        if (host, port) not in _servers:
            try:
                server, _ = start_http_server(port, addr=host)
            except OSError as error:
                raise _refused(host, port, error) from None
            _servers[host, port] = server.server_port
            logger.info("freedraft: metrics at http://%s:%d/metrics", host, server.server_port)
        return _servers[host, port]


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"metrics cannot be served on {host}:{port} ({error.strerror}): set 'metrics_port' to another port, or 0 for "
        "any, and 'metrics_host' to an address of this machine"
    )
