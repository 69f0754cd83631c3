"""Tables of results: each column is a title and a format of row values, "title={format}"."""

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


class _Cells(string.Formatter):
    """`str.format` with None as the empty text, optional fields `{?name}`, and "yes" or "no" for `{name!y}`."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name.removeprefix("?"), args, kwargs)
        except (KeyError, TypeError):
            if not field_name.startswith("?"):
                raise
            return None, field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "y" and value is not None:
            return "yes" if value else "no"
        return value if conversion == "y" else super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        return "" if value is None else super().format_field(value, format_spec)


cell = _Cells().vformat


def columns(forms: Iterable[str]) -> dict[str, str]:
    """Return formats by title, from "title={format} | title={format}"."""
    return {title: form for part in forms for title, _, form in (one.partition("=") for one in part.split(" | "))}


def lines(rows: Iterable[Row], *forms: str) -> list[list[str]]:
    """Return the cells of each row; `{ratio[fixed 4]:.2f}` formats row["ratio"]["fixed 4"]. forms: columns,
    "title={format} | title={format}". Raises KeyError: a row lacks a value."""
    return [[cell(form, (), row) for form in columns(forms).values()] for row in rows]


def markdown(head: Iterable[str], body: Iterable[Sequence[Any]]) -> str:
    titles = list(head)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (titles, ["---"] * len(titles), *body))


def table(rows: Iterable[Row], *forms: str) -> str:
    """Return a Markdown table. Args and errors: see `lines`."""
    return markdown(columns(forms), lines(rows, *forms))


def pivot(rows: Iterable[Row], form: str, by: str, value: str, title: str = "{}") -> str:
    """Return a Markdown table with one line for all rows that have the same cells of `form`, and a column for each
    value of the field `by`; numbers are sorted."""
    cells: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        (key,) = lines([row], form)
        cells.setdefault(tuple(key), {})[row[by]] = cell(value, (), row)
    seen = dict.fromkeys(at for line in cells.values() for at in line)
    across = sorted(seen, key=lambda at: 0 if isinstance(at, str) else at)
    body = [[*key, *(line.get(at, "") for at in across)] for key, line in cells.items()]
    return markdown([*columns([form]), *(title.format(at) for at in across)], body)
