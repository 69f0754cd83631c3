"""`freedraft top`: a live view of a server's drafter, from its metrics page."""

from __future__ import annotations

import contextlib
import math
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

# Values by metric name without its prefix, and label values, joined by "/" ("" for none).
Samples = Mapping[tuple[str, str], float]

PREFIX, START = "freedraft_", "process_start_time_seconds"
SOURCES = {
    "input": "prompt and output",
    "store": "datastore and what was learnt",
    "other": "recycled logits and other",
}


def read(url: str) -> dict[tuple[str, str], float]:
    """The samples of a metrics page. Raises ValueError, one line: no answer, or not a drafter's page."""
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            text = page.read().decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no metrics at {url} ({getattr(error, 'reason', error)}): set option 'metrics_port', and name that port"
        ) from None
    samples = {
        (sample.name.removeprefix(PREFIX), "/".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith((PREFIX, START)) and not sample.name.endswith("_created")
    }
    if all(name == START for name, _ in samples):
        raise ValueError(f"{url} has no metrics of freedraft: name the port of option 'metrics_port', not the server's")
    return samples


def view(now: Samples, before: Samples, seconds: float) -> Table:
    """The drafter's activity since `before`, `seconds` ago; since the server's start if there was none."""
    gained: defaultdict[tuple[str, str], float] = defaultdict(float)
    gained.update({key: value - before.get(key, 0.0) for key, value in now.items()})
    methods = sorted(label for name, label in now if name == "request_steps_total")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for method in methods:
        table.add_column(method, justify="right")

    def row(title: str, cell: Callable[[str], float], form: str = ",.2f") -> None:
        values = [cell(method) for method in methods]
        table.add_row(title, *("-" if math.isnan(value) else format(value, form) for value in values))

    def ratio(above: str, below: str, method: str) -> float:
        divisor = gained[below, method]
        return gained[above, method] / divisor if divisor else math.nan

    row("requests", lambda m: now.get(("requests", m), 0), ".0f")
    row("tokens per second", lambda m: gained["tokens_total", m] / seconds)
    row("tokens per request and step", lambda m: ratio("tokens_total", "request_steps_total", m))
    row("over plain, by policy auto", lambda m: now.get(("speedup", m), math.nan))
    row("draft tokens per step, allowed now", lambda m: now.get(("budget_tokens", m), 0), ".0f")
    requests = sum(gained["request_steps_total", method] for method in methods)  # those of a hybrid's parts are its own
    for reason in sorted({label.partition("/")[2] for name, label in now if name == "undrafted_requests_total"}):
        undrafted = {m: gained["undrafted_requests_total", f"{m}/{reason}"] / (requests or math.nan) for m in methods}
        row(f"of requests, without a draft: {reason}", undrafted.__getitem__)
    row("of draft tokens, accepted", lambda m: ratio("accepted_tokens_total", "draft_tokens_total", m))
    drafting = "drafting_seconds_sum", "drafting_seconds_count"
    row("microseconds to draft, per step", lambda m: 1e6 * ratio(*drafting, m), ",.0f")
    row("failures, in all", lambda m: now.get(("failures_total", m), 0), ".0f")
    return table


def sources(now: Samples, before: Samples) -> Table | None:
    """Shares of the sources in accepted draft tokens since `before`, and how many of each source's draft tokens were
    accepted since the server's start; None where no such tokens were counted."""
    names = {source: ("sourced_tokens_total", source) for source in SOURCES}
    accepted = {source: now.get(name, 0) - before.get(name, 0) for source, name in names.items()}
    total = sum(accepted.values())
    if not total:
        return None
    table = Table("accepted tokens, from", box=None, pad_edge=False)
    for title in ("share", "of drafted, in all"):
        table.add_column(title, justify="right")
    for source, title in SOURCES.items():
        drafted = now.get(("sourced_draft_tokens_total", source), 0)
        of_drafted = f"{now.get(names[source], 0) / drafted:.0%}" if drafted else "-"
        table.add_row(title, f"{accepted[source] / total:.0%}", of_drafted)
    return table


def run(url: str, interval: float, once: bool) -> int:
    """Show the view until interrupted, or once, since the server's start."""
    console = Console()
    before, at = read(url), time.monotonic()
    if once:
        console.print(_shown(before, {}, time.time() - before.get((START, ""), math.nan)))
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_shown(before, before, 1.0), console=console, screen=console.is_terminal) as live,
    ):
        while True:
            time.sleep(interval)
            now, then = read(url), time.monotonic()
            live.update(_shown(now, before, then - at), refresh=True)
            before, at = now, then
    return 0


def _shown(now: Samples, before: Samples, seconds: float) -> Any:
    return Group(*filter(None, (view(now, before, seconds), sources(now, before))))
