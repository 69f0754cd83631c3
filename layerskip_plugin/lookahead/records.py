"""Recorded verifications: features of drafted tokens, and whether they were accepted."""

import io
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_model import PassOutputs
from freedraft.files import write_atomically
from layerskip_plugin.rounds import Outcome

logger = logging.getLogger("freedraft.layerskip")

TOP = 10  # probabilities kept per token
JUDGED = PassOutputs(TOP, entropy=True)  # of passes whose tokens are recorded, or judged by a classifier
FORMAT = "freedraft verifications 1"
ARRAYS = ("top", "entropy", "position", "accepted", "request", "round")
SAVE_SECONDS = 10.0  # between writes while requests run
MAX_TOKENS = 200_000  # of a file; later ones are dropped


@dataclass(frozen=True)
class Verifications:
    """One entry per judged token: accepted ones, and the first rejected one of each round."""

    top: NDArray[np.float32]  # [N, 10], largest probabilities of its distribution, descending
    entropy: NDArray[np.float32]  # [N], nats
    position: NDArray[np.int32]  # [N], place in the draft, from 0
    accepted: NDArray[np.bool_]  # [N]
    request: NDArray[np.int32]  # [N]
    round: NDArray[np.int32]  # [N], within the request
    model: str = ""  # fingerprint of the model; "" if unknown
    prices: tuple[float, float] | None = None  # of a draft pass and a query token of a request, in plain steps

    def __len__(self) -> int:
        return len(self.accepted)

    def where(self, chosen: NDArray[Any]) -> Self:
        return replace(self, **{name: getattr(self, name)[chosen] for name in ARRAYS})

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name) for name in ARRAYS}
        about = json.dumps({"format": FORMAT, "model": self.model, "prices": self.prices})
        file = io.BytesIO()
        np.savez(file, about=np.array(about), **arrays)
        write_atomically(path, file.getvalue(), mode=0o666)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; raises ValueError, one line that names the file, if it is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about.get("format") != FORMAT:
                    raise ValueError(f"{path} holds {about.get('format')!r}, not {FORMAT!r}")
                arrays = {name: file[name] for name in ARRAYS}
                prices = about.get("prices")
                loaded = cls(**arrays, model=about["model"], prices=prices and (float(prices[0]), float(prices[1])))
        except OSError as error:
            raise ValueError(f"records: cannot read {path}: {error.strerror or error}") from None
        except Exception as error:
            raise ValueError(f"records: {path} was not written by option record: {error}") from None
        n = len(loaded)
        if loaded.top.shape != (n, TOP) or any(len(array) != n for array in arrays.values()):
            raise ValueError(
                f"records: {path} is damaged, its arrays do not fit together: record again with option 'record'"
            )
        return loaded


class Recorder:
    """Records verifications for `freedraft calibrate disco`; writes them when no request is left, and every
    `SAVE_SECONDS` while some run. prices: see `Verifications`."""

    def __init__(self, path: Path, model: str, prices: Callable[[], tuple[float, float] | None]) -> None:
        self.path, self.model, self.prices = path, model, prices
        self.kept = self._written = 0
        self._parts: list[tuple[NDArray[Any], ...]] = []  # in the order of `ARRAYS`
        self._numbers: dict[str, tuple[int, int]] = {}  # by request: its number, and that of its newest round
        self._requests = count()
        self._saved = 0.0

    def record(self, outcome: Outcome) -> None:
        row, position, good = outcome.judged()
        if not len(good) or self.kept >= MAX_TOKENS:
            return
        numbers = np.zeros((len(outcome.request_ids), 2), np.int32)
        for i in np.unique(row):
            request_id = outcome.request_ids[i]
            number, newest = self._numbers.get(request_id) or (next(self._requests), -1)
            self._numbers[request_id] = numbers[i] = number, newest + 1
        top, entropy = outcome.top[row, position, :TOP], outcome.entropy[row, position]
        self._parts.append((top, entropy, position.astype(np.int32), good, *numbers[row].T))
        self.kept += len(good)

    def finish(self, request_id: str, *, idle: bool) -> None:
        """A request has ended; idle: it was the last one."""
        self._numbers.pop(request_id, None)
        if idle or time.monotonic() > self._saved + SAVE_SECONDS:
            self.close()

    def close(self) -> None:
        if self.kept == self._written:
            return
        self._saved = time.monotonic()
        columns = zip(ARRAYS, zip(*self._parts, strict=True), strict=True)
        arrays: dict[str, Any] = {name: np.concatenate(column) for name, column in columns}
        try:
            Verifications(**arrays, model=self.model, prices=self.prices()).save(self.path)
        except OSError as error:
            logger.warning("freedraft: cannot write %s: %s; it is tried again", self.path, error.strerror or error)
        else:
            self._written = self.kept
