"""Charts as small SVG files: values with intervals by row, and lines. Their background is their own, light or dark as
the reader's system; the range of an axis holds every interval whole."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 800, 190, 64
# Okabe and Ito's colours, safe for the colour-blind; the second of each pair is for dark backgrounds.
COLOURS = [("#0072B2", "#56B4E9"), ("#D55E00", "#F28E4B"), ("#B07700", "#E6B43C"), ("#007A5A", "#35C99F")]
COLOURS += [("#6E7781", "#9AA4AE"), ("#A8467F", "#E38DBF"), ("#7A4B34", "#C99B84"), ("#4B4BA8", "#A3A3F5")]
PAGE = {"bg": ("#ffffff", "#12171e"), "ink": ("#1f2328", "#e6edf3"), "soft": ("#59636e", "#9aa4ae")}
PAGE["grid"] = ("#e4e7eb", "#2b333d")


def style(theme: int) -> str:
    rules = [f".{name}{{fill:{pair[theme]}}}.l-{name}{{stroke:{pair[theme]}}}" for name, pair in PAGE.items()]
    rules += [f".s{i}{{fill:{pair[theme]}}}.l-s{i}{{stroke:{pair[theme]}}}" for i, pair in enumerate(COLOURS)]
    halo = f"text{{stroke:{PAGE['bg'][theme]};stroke-width:3px;paint-order:stroke;stroke-linejoin:round}}"
    return "".join([halo, *rules])


class Value(NamedTuple):
    """A figure with the bounds of its interval, if it has one."""

    at: float
    low: float | None = None
    high: float | None = None

    def span(self) -> tuple[float, float]:
        return (self.at if self.low is None else self.low, self.at if self.high is None else self.high)


def text(x: float, y: float, said: str, kind: str = "ink", anchor: str = "start", size: int = 14) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" class="{kind}"'
    return f'<text {place} font-size="{size}" text-anchor="{anchor}">{escape(said)}</text>\n'


def line(x: float, y: float, x2: float, y2: float, kind: str = "grid", width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="l-{kind}" stroke-width="{width}"{dashed}/>\n'


def heat_maps(chart: str, title: str, maps: Mapping[str, Mapping[tuple[int, int], float]], across: str) -> str:
    """Return `chart` with heat maps below it, side by side: ratios by row and column, blue above 1 and orange below,
    the stronger the further away. maps: by name; across: what the columns are."""
    rows, columns = (sorted({key[i] for found in maps.values() for key in found}) for i in (0, 1))
    width, height, gap, top, left = 50, 30, 28, 76, 94
    body = text(20, 16, title)
    for number, (name, found) in enumerate(maps.items()):
        start = left + number * (width * len(columns) + gap)
        body += text(start, 44, name) + text(start + width * len(columns) / 2, top + height * len(rows) + 20, across,
                                             "soft", "middle", 13)  # fmt: skip
        for column, at in enumerate(columns):
            body += text(start + width * (column + 0.5), top - 10, f"{at:,}", "soft", "middle", 13)
        for row, of in enumerate(rows):
            y = top + height * row
            body += text(left - 10, y + 20, f"{of:,}", "soft", "end", 13) if number == 0 else ""
            for column, at in enumerate(columns):
                ratio, x = found[of, at], start + width * column
                strength = min(1.0, 0.04 + abs(math.log(ratio)) / math.log(1.8))
                body += f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" rx="3" '
                body += f'class="s{int(ratio < 1)}" fill-opacity="{strength:.2f}"/>\n'
                body += text(x + width / 2 - 1, y + 19, f"{ratio:.2f}", anchor="middle")
    old = float(re.findall(r'height="(\d+)"', chart)[0])
    new = old + top + height * len(rows) + 34
    head, rest = chart.split("<title>", 1)
    tall = rest.replace(f'height="{old:.0f}" rx', f'height="{new:.0f}" rx', 1).removesuffix("</svg>\n")
    return (
        f"{head.replace(f'{old:.0f}', f'{new:.0f}')}<title>{tall}"
        f'<g transform="translate(0 {old + 10:.0f})">\n{body}</g>\n</svg>\n'
    )


def svg(title: str, subtitle: str, names: Sequence[str], body: str, height: float) -> str:
    legend, x = "", 20.0
    for i, name in enumerate(names):
        if len(names) == 1 or f'class="s{i}"' not in body:
            continue
        legend += f'<rect x="{x:.0f}" y="62" width="14" height="14" class="s{i}"/>\n' + text(x + 20, 74, name)
        x += 46 + 7.6 * len(name)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n<style>{style(0)}@media(prefers-color-scheme:dark){{{style(1)}}}</style>\n"
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" class="bg"/>\n'
    )
    titles = text(20, 28, title, size=18) + text(20, 50, subtitle, "soft", size=13)
    return f"{head}{titles}{legend}{body}</svg>\n"


class Axis:
    """Places of values between two pixels, by logarithm or not, in round steps."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool = True, least: float = 0.0) -> None:
        self.start, self.end, self.log = start, end, log
        low, high = min(values), max(values)
        if log:
            self.low, self.high = low / (high / low) ** 0.04, high * (high / low) ** 0.04
        else:
            self.low, self.high = min(low, least), high + 0.06 * (high - min(low, least))

    def place(self, value: float) -> float:
        def scaled(v: float) -> float:
            return math.log(v) if self.log else v

        share = (scaled(value) - scaled(self.low)) / (scaled(self.high) - scaled(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            span = self.high - self.low
            power = 10 ** math.floor(math.log10(span))
            step = next(s for s in (power / 5, power / 2, power, 2 * power) if span / s <= 8)
            return [round(step * i, 9) for i in range(math.ceil(self.low / step), int(self.high / step) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]
            if len(found) <= 9:
                break
        return [round(tick, 9) for tick in found]


def intervals(
    title: str,
    subtitle: str,
    rows: Sequence[tuple[str, Mapping[str, Value]]],
    *,
    names: Sequence[str],
    scale: str,
    bars: bool = False,
    log: bool = True,
    reference: float | None = 1.0,
    form: str = "{:.2f}",
) -> str:
    """Return a chart with a row for each label and a mark for each series in it, with its interval. names: the series
    in the order of their colours; bars: from the left edge instead of dots; reference: a line to compare with."""
    top, step = 96 if len(names) > 1 else 72, 22 if len(names) == 1 else 15
    every = [edge for _, values in rows for value in values.values() for edge in value.span()]
    axis = Axis([*every, *([reference] if reference else [])], LEFT, WIDTH - RIGHT, log)
    bottom = top + sum(step * len(values) + 10 for _, values in rows)
    body = ""
    for tick in axis.ticks():
        x = axis.place(tick)
        body += line(x, top - 4, x, bottom) + text(x, bottom + 18, f"{tick:,g}", "soft", "middle", 13)
    if reference:
        body += line(axis.place(reference), top - 4, axis.place(reference), bottom, "ink", 1.5, "5 4")
    body += text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, scale, "soft", "middle", 13)
    y = float(top)
    for label, values in rows:
        body += text(LEFT - 12, y + step * len(values) / 2 + 5, label, anchor="end")
        for name, value in values.items():
            kind, x, middle = f"s{names.index(name)}", axis.place(value.at), y + step / 2
            low, high = (axis.place(edge) for edge in value.span())
            if bars:
                left = axis.place(max(axis.low, 0) if not log else axis.low)
                body += f'<rect x="{left:.1f}" y="{y + 1:.1f}" width="{x - left:.1f}" height="{step - 3}" '
                body += f'class="{kind}"/>\n'
                body += line(low, middle, high, middle, "ink", 1.5) if high > low else ""
            else:
                body += line(low, middle, high, middle, kind, 2.5)
                body += f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="5" class="{kind}"/>\n'
            if bars or len(values) == 1:
                body += text(max(x, high) + 8, middle + 5, form.format(value.at), size=13)
            y += step
        y += 10
    return svg(title, subtitle, names, body, bottom + 52)


def lines(
    title: str,
    subtitle: str,
    panels: Mapping[str, Mapping[str, Mapping[float, Value]]],
    *,
    names: Sequence[str],
    across: str,
    scale: str,
    log: tuple[bool, bool] = (True, True),
    reference: float | None = None,
) -> str:
    """Return a chart of lines: by panel and series, values by their place across. names: the series in the order of
    their colours; log: of the two axes; all panels share the scale."""
    top, bottom, gap = 140 if len(panels) > 1 else 116, 390, 56
    width = (WIDTH - 64 - 28 - gap * (len(panels) - 1)) / len(panels)
    values = [v for panel in panels.values() for found in panel.values() for v in found.values()]
    edges = [edge for value in values for edge in value.span()] + ([reference] if reference else [])
    up, body = Axis(edges, bottom, top, log[1], reference or 0.0), ""
    for number, (name, series) in enumerate(panels.items()):
        left = 64 + number * (width + gap)
        places = sorted({at for found in series.values() for at in found})
        along = Axis(places, left, left + width, log[0])
        body += text(left, top - 14, name, "ink") if len(panels) > 1 else ""
        for tick in up.ticks():
            body += line(left, up.place(tick), left + width, up.place(tick))
            body += text(left - 8, up.place(tick) + 5, f"{tick:,g}", "soft", "end", 13)
        for at in places if log[0] else along.ticks():
            body += text(along.place(at), bottom + 20, f"{at:,g}", "soft", "middle", 13)
        body += text(left + width / 2, bottom + 42, across, "soft", "middle", 13)
        if reference:
            body += line(left, up.place(reference), left + width, up.place(reference), "ink", 1.5, "5 4")
        for arm, found in series.items():
            kind = f"s{names.index(arm)}"
            points = [(along.place(at), up.place(value.at)) for at, value in sorted(found.items())]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            body += f'<polyline points="{path}" fill="none" class="l-{kind}" stroke-width="2.5"/>\n'
            for (x, y), value in zip(points, (value for _, value in sorted(found.items())), strict=True):
                low, high = (up.place(edge) for edge in value.span())
                body += line(x, low, x, high, kind, 2) if low > high else ""
                body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>\n'
    body += text(20, top - 14 if len(panels) == 1 else top - 38, scale, "soft", size=13) if scale else ""
    return svg(title, subtitle, names, body, bottom + 58)
