"""`freedraft top`: a live view of a server's drafter, from its metrics page."""

import contextlib
import json
import math
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

# Values by metric name without its prefix, and label values, joined by "/" ("" for none).
Samples = Mapping[tuple[str, str], float]

PREFIX, START = "freedraft_", "process_start_time_seconds"
SOURCES = {
    "request": "prompt and answer",
    "prediction": "the client's prediction",
    "running": "answers being written",
    "learnt": "earlier answers",
    "datastore": "datastore",
    "other": "recycled logits and other",
}
REASONS = {
    "cost": "would cost more than it gains",
    "no match": "nothing similar found",
    "no room": "no room in the batch",
    "failure": "the drafter failed",
    "off": "the client wants none",
}
UNKNOWN = "-: not known yet, or not measured with this policy"
SPEEDUP, ACCEPTED, UNDRAFTED = "speed-up, estimated", "draft tokens accepted", "requests without a draft"
TOKENS, SECONDS = "tokens per step (1 without drafts)", "ms to draft, per step"
FORMS = {SPEEDUP: ",.2f", TOKENS: ",.2f", SECONDS: ",.2f", ACCEPTED: ".0%", UNDRAFTED: ".0%"}


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


def numbers(now: Samples, before: Samples, seconds: float) -> dict[str, dict[str, float]]:
    """What is shown, by title and method: the drafter's activity since `before`, `seconds` ago. NaN is not known."""
    gained: defaultdict[tuple[str, str], float] = defaultdict(float)
    gained.update({key: value - before.get(key, 0.0) for key, value in now.items()})
    reasons = sorted({label.partition("/")[2] for name, label in now if name == "undrafted_requests_total"})

    def of(method: str) -> dict[str, float]:
        def ratio(above: str, below: str) -> float:
            return gained[above, method] / (gained[below, method] or math.nan)

        requests = gained["request_steps_total", method] or math.nan
        undrafted = [gained["undrafted_requests_total", f"{method}/{reason}"] / requests for reason in reasons]
        return {
            SPEEDUP: now.get(("speedup", method), math.nan),
            TOKENS: ratio("tokens_total", "request_steps_total"),
            "tokens per second": gained["tokens_total", method] / seconds,
            "running requests": now.get(("requests", method), 0),
            ACCEPTED: ratio("accepted_tokens_total", "draft_tokens_total"),
            **by_position(gained, method),
            UNDRAFTED: sum(undrafted),
            **{f"  {REASONS.get(r, r)}": share for r, share in zip(reasons, undrafted, strict=True)},
            "draft tokens allowed per step": now.get(("budget_tokens", method), 0),
            SECONDS: 1e3 * ratio("drafting_seconds_sum", "drafting_seconds_count"),
            "failures since the start": now.get(("failures_total", method), 0),
        }

    by_method = {label: of(label) for name, label in sorted(now) if name == "request_steps_total"}
    titles = dict.fromkeys(title for values in by_method.values() for title in values)
    return {title: {method: values.get(title, math.nan) for method, values in by_method.items()} for title in titles}


def by_position(gained: Samples, method: str) -> dict[str, float]:
    """Shares of the drafts below n-grams that were right up to each of their tokens, by title."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for (name, labels), drafts in sorted(gained.items()):
        if name == "head_accepted_lengths_total" and labels.endswith(f"/{method}"):
            drafter, length, _ = labels.split("/")
            found[drafter][int(length)] = drafts
    return {
        f"  token {i} of '{drafter}'": sum(d for n, d in lengths.items() if n >= i)
        / (sum(lengths.values()) or math.nan)
        for drafter, lengths in found.items()
        for i in range(1, max(lengths) + 1)
    }


def view(now: Samples, before: Samples, seconds: float) -> Table:
    """The table of `numbers`."""
    shown = numbers(now, before, seconds)
    table = Table(box=None, pad_edge=False)
    for column, method in enumerate(["", *next(iter(shown.values()), {})]):
        table.add_column(method, justify="right" if column else "left")
    for title, values in shown.items():
        form = FORMS.get(title, ".0%" if title.startswith("  ") else ",.0f")
        table.add_row(title, *("-" if math.isnan(value) else format(value, form) for value in values.values()))
    return table


def sources(now: Samples, before: Samples) -> Table | None:
    """Shares of the sources in accepted draft tokens since `before`, and how many of each source's draft tokens were
    accepted since the server's start; None where no such tokens were counted."""
    names = {source: ("sourced_tokens_total", source) for source in SOURCES}
    accepted = {source: now.get(name, 0) - before.get(name, 0) for source, name in names.items()}
    total = sum(accepted.values())
    if not total:
        return None
    table = Table("accepted tokens come from", box=None, pad_edge=False)
    for title in ("share", "accepted of drafted"):
        table.add_column(title, justify="right")
    for source, title in SOURCES.items():
        drafted = now.get(("sourced_draft_tokens_total", source), 0)
        of_drafted = f"{now.get(names[source], 0) / drafted:.0%}" if drafted else "-"
        table.add_row(title, f"{accepted[source] / total:.0%}", of_drafted)
    return table


def run(url: str, interval: float, once: bool, as_json: bool) -> int:
    """Show the view until interrupted, or once, since the server's start; as JSON, null for what is not known."""
    console = Console()
    before, at = read(url), time.monotonic()
    age = time.time() - before.get((START, ""), math.nan)
    if as_json:
        shown = numbers(before, {}, age)
        known = {t.strip(): {m: None if math.isnan(v) else v for m, v in row.items()} for t, row in shown.items()}
        console.print_json(json.dumps(known))
        return 0
    if once:
        console.print(_shown(f"{url}, since the server's start", before, {}, age))
        return 0
    title = f"{url}, the last {interval:g} s; Ctrl-C ends this view"
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_shown(title, before, before, 1.0), console=console, screen=console.is_terminal) as live,
    ):
        while True:
            time.sleep(interval)
            try:
                now, then = read(url), time.monotonic()
            except ValueError as error:
                live.update(f"{error}; waiting for it", refresh=True)
                continue
            live.update(_shown(title, now, before, then - at), refresh=True)
            before, at = now, then
    return 0


def _shown(title: str, now: Samples, before: Samples, seconds: float) -> Any:
    parts: list[Any] = [title, view(now, before, seconds), sources(now, before), UNKNOWN]
    return Group(*filter(None, parts))
