"""Reader of files with a JSON object per line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class FileError(ValueError):
    """A file cannot be used. The message is one line: the file, the line, the required form."""


def read(path: Path, form: str, parse: Callable[[int, Any], T]) -> list[T]:
    """Call `parse` with number (from 1) and JSON of each non-empty line. form: description of a line, for errors.

    Raises FileError: the file cannot be read, has a line that `parse` rejects, or no line at all."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    parsed = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                parsed.append(parse(number, json.loads(line)))
            except (ValueError, OverflowError, LookupError, TypeError) as error:
                raise FileError(f"{path} line {number}: not {form} ({error!r})") from None
    if not parsed:
        raise FileError(f"{path}: there is nothing in it, each line should be {form}")
    return parsed
