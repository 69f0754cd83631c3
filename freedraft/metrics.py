"""Prometheus metrics of drafting."""

from __future__ import annotations

import logging
import socket
import threading

from prometheus_client import Counter, Gauge, Summary, start_http_server

from freedraft.config import ConfigError

logger = logging.getLogger(__name__)

# With several API servers vLLM sets Prometheus's multi-process mode: gauges then need to know how to add up.
_REQUESTS = Gauge(
    "freedraft_requests", "Requests whose tokens the drafter holds", ["method"], multiprocess_mode="livesum"
)
_BUDGET = Gauge(
    "freedraft_budget_tokens",
    "Draft tokens that the last step was allowed, over the whole batch",
    ["method"],
    multiprocess_mode="livesum",
)
_DRAFTED = Counter("freedraft_draft_tokens", "Draft tokens verified by the target", ["method"])
_ACCEPTED = Counter("freedraft_accepted_tokens", "Draft tokens accepted by the target", ["method"])
_SECONDS = Summary("freedraft_drafting_seconds", "Time spent drafting, per step", ["method"])
_LATE = Counter("freedraft_late_steps", "Steps that went without drafts because these took too long", ["method"])
_FAILURES = Counter("freedraft_failures", "Calls of the drafter that raised; it pauses after each", ["method"])

HOST = "127.0.0.1"

_servers: dict[int, int] = {}
_lock = threading.Lock()


class Metrics:
    """The metrics of one method; what each holds is in its help text above."""

    def __init__(self, method: str) -> None:
        self.requests = _REQUESTS.labels(method)
        self.budget = _BUDGET.labels(method)
        self.drafted = _DRAFTED.labels(method)
        self.accepted = _ACCEPTED.labels(method)
        self.seconds = _SECONDS.labels(method)
        self.late = _LATE.labels(method)
        self.failures = _FAILURES.labels(method)


def check_port(port: int | None) -> None:
    """Tell, before the engine starts, that `serve(port)` would fail; None serves nothing.

    Raises:
        ConfigError: the port is taken.
    """
    if not port or port in _servers:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise _taken(port, error) from None


def serve(port: int | None, rank: int = 0) -> int | None:
    """Serve this process's metrics at http://127.0.0.1:port/metrics, once per port and process.

    The engine runs in a process of its own, whose metrics the API server's own page does not show.

    Args:
        port: 0 picks a free one, None serves nothing.
        rank: of this process among those of the engine, each of which serves at a port of its own, port + rank.

    Returns:
        the port.

    Raises:
        ConfigError: the port is taken.
    """
    if port is None:
        return None
    port = port and port + rank
    with _lock:
        if port not in _servers:
            try:
                server, _ = start_http_server(port, addr=HOST)
            except OSError as error:
                raise _taken(port, error) from None
            _servers[port] = server.server_port
            logger.info("freedraft: metrics at http://%s:%d/metrics", HOST, server.server_port)
        return _servers[port]


def _taken(port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"option 'metrics_port': cannot listen on {HOST}:{port} ({error.strerror}): choose another port, or 0 for any"
    )
