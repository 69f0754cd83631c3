"""`freedraft top`: what a server's drafter does, from its metrics page, live."""

from __future__ import annotations

import math
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

Samples = Mapping[tuple[str, str], float]
"""Values by name of the metric, without its prefix, and value of its one label, "" for none."""

PREFIX, START = "freedraft_", "process_start_time_seconds"
SOURCES = {
    "input": "prompt and output",
    "static": "datastore",
    "live": "what was learnt",
    "other": "recycled logits and other",
}


def read(url: str) -> dict[tuple[str, str], float]:
    """The samples of a metrics page.

    Raises:
        ValueError: one line: nobody answers there, or the page is not of a drafter.
    """
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            text = page.read().decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no metrics at {url} ({error}): start the server with option 'metrics_port', and name that port"
        ) from None
    samples = {
        (sample.name.removeprefix(PREFIX), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith((PREFIX, START)) and not sample.name.endswith("_created")
    }
    if all(name == START for name, _ in samples):
        raise ValueError(f"{url} has no metrics of freedraft: name the port of option 'metrics_port', not the server's")
    return samples


def view(now: Samples, before: Samples, seconds: float) -> Table:
    """What the drafter has done since `before`, some seconds ago; of a server that nobody asked, since its start."""
    gained: defaultdict[tuple[str, str], float] = defaultdict(float)
    gained.update({key: value - before.get(key, 0.0) for key, value in now.items()})
    methods = sorted(label for name, label in now if name == "request_steps_total")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for method in methods:
        table.add_column(method, justify="right")

    def row(title: str, cells: Iterator[str]) -> None:
        table.add_row(title, *cells)

    def ratio(above: str, below: str) -> Iterator[str]:
        for method in methods:
            divisor = gained[below, method]
            yield _decimals(gained[above, method] / divisor if divisor else math.nan)

    row("requests", (f"{now.get(('requests', m), 0):.0f}" for m in methods))
    row("tokens per second", (_decimals(gained["tokens_total", m] / seconds) for m in methods))
    row("tokens per request and step", ratio("tokens_total", "request_steps_total"))
    row("over plain, by policy auto", map(_decimals, (now.get(("speedup", m), math.nan) for m in methods)))
    row("draft tokens per step, allowed now", (f"{now.get(('budget_tokens', m), 0):.0f}" for m in methods))
    row("of draft tokens, accepted", ratio("accepted_tokens_total", "draft_tokens_total"))
    us = (_micro(gained["drafting_seconds_sum", m], gained["drafting_seconds_count", m]) for m in methods)
    row("microseconds to draft, per step", us)
    row("failures, in all", (f"{now.get(('failures_total', m), 0):.0f}" for m in methods))
    return table


def sources(now: Samples, before: Samples) -> Table | None:
    """Where accepted draft tokens came from since `before`; None where no such tokens were counted."""
    accepted = {
        s: now.get(("sourced_tokens_total", s), 0) - before.get(("sourced_tokens_total", s), 0) for s in SOURCES
    }
    total = sum(accepted.values())
    if not total:
        return None
    table = Table("accepted tokens, from", box=None, pad_edge=False)
    table.add_column("share", justify="right")
    for source, title in SOURCES.items():
        table.add_row(title, f"{accepted[source] / total:.0%}")
    return table


def run(url: str, interval: float, once: bool) -> int:
    """Show it until the user ends it, or once, since the server's start."""
    console = Console()
    started = read(url)
    if once:
        age = time.time() - started.get((START, ""), math.nan)
        console.print(_shown(started, {}, age))
        return 0
    before, at = started, time.monotonic()
    with Live(_shown(started, started, 1.0), console=console, screen=console.is_terminal) as live:
        try:
            while True:
                time.sleep(interval)
                now, then = read(url), time.monotonic()
                live.update(_shown(now, before, then - at), refresh=True)
                before, at = now, then
        except KeyboardInterrupt:
            return 0


def _shown(now: Samples, before: Samples, seconds: float) -> Any:
    parts = [view(now, before, seconds), sources(now, before)]
    return Group(*(part for part in parts if part is not None))


def _decimals(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.2f}"


def _micro(seconds: float, steps: float) -> str:
    return f"{1e6 * seconds / steps:,.0f}" if steps else "-"
