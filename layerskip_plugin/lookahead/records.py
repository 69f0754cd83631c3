"""Recorded verifications: what drafted tokens looked like, and whether they were accepted."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_pass import RestOfBatch
from freedraft.files import write_atomically
from layerskip_plugin.lookahead.base import ALONE, Candidate, Flags, Floats, Ints, Lookahead, RoundLog
from layerskip_plugin.skip_set import SkipSet

TOP = 10
FORMAT = "freedraft verifications 1"
ABOUT = ("model", "prices")


@dataclass(frozen=True)
class Verifications:
    """One entry per drafted token that has a verdict: the accepted ones, and the first rejected one of each round.

    Attributes:
        top: float32[N, 10], largest probabilities of its distribution, descending.
        entropy: float32[N], nats.
        position: int32[N], place in the draft, from 0.
        accepted: bool[N].
        request: int32[N].
        round: int32[N], within the request; a token's round starts where its position is 0.
        model: fingerprint of the model; "" when it is not known.
        prices: (a draft pass, a further query token of a request) in plain steps, as the engine measured them; None
            where it did not.
    """

    top: NDArray[np.float32]
    entropy: NDArray[np.float32]
    position: NDArray[np.int32]
    accepted: NDArray[np.bool_]
    request: NDArray[np.int32]
    round: NDArray[np.int32]
    model: str = ""
    prices: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.accepted)

    def where(self, chosen: NDArray[Any]) -> Verifications:
        """The entries that a mask or an index chooses."""
        arrays: dict[str, Any] = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name not in ABOUT}
        return replace(self, **arrays)

    def save(self, path: Path) -> None:
        """Write a compressed .npz, which nobody sees in part."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ABOUT}
        about = json.dumps({"format": FORMAT, "model": self.model, "prices": self.prices})
        file = io.BytesIO()
        np.savez_compressed(file, about=np.array(about), **arrays)
        write_atomically(path, file.getvalue(), mode=0o666)

    @classmethod
    def load(cls, path: Path) -> Verifications:
        """Read what `save` wrote.

        Raises:
            ValueError: one line that names the file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about.get("format") != FORMAT:
                    raise ValueError(f"{path} holds {about.get('format')!r}, not {FORMAT!r}")
                arrays: dict[str, Any] = {f.name: file[f.name] for f in fields(cls) if f.name not in ABOUT}
                prices = about.get("prices")
                loaded = cls(**arrays, model=about["model"], prices=prices and (float(prices[0]), float(prices[1])))
        except OSError as error:
            raise ValueError(f"records: cannot read {path}: {error.strerror or error}") from None
        except Exception as error:
            raise ValueError(f"records: {path} is no file of recorded verifications: {error}") from None
        n = len(loaded)
        if loaded.top.shape != (n, TOP) or any(
            len(getattr(loaded, f.name)) != n for f in fields(cls) if f.name not in ABOUT
        ):
            raise ValueError(
                f"records: {path} is damaged, its arrays do not fit together: record again with option 'record'"
            )
        return loaded


class Recording(Lookahead):
    """Any policy, with the verifications of the first recipe's drafts kept for `freedraft calibrate disco`.

    Args:
        inner: the policy that decides; first: the first recipe.
        path: where `save` writes.
        model: fingerprint of the model.
        max_tokens: tokens kept; later ones are not recorded.
    """

    needs_top = TOP
    needs_entropy = True

    def __init__(
        self, inner: Lookahead, first: SkipSet, path: Path, model: str = "", max_tokens: int = 200_000
    ) -> None:
        self.first = first
        self.inner, self.path, self.model, self.max_tokens = inner, path, model, max_tokens
        self.log = RoundLog(TOP + 1)
        self.parts: list[tuple[NDArray[Any], ...]] = []
        self.kept = 0
        self.numbers: dict[str, list[int]] = {}
        self.requests = 0

    def use(self, recipes: Sequence[SkipSet]) -> None:
        self.first = recipes[0]
        self.inner.use(recipes)

    def choose(self, candidates: Sequence[Candidate], batch: int, context: float) -> SkipSet | None:
        return self.inner.choose(candidates, batch, context)

    def begin(self, request_ids: Sequence[str], recipe: SkipSet, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, recipe, max_draft_len, rest)
        self.log.begin(request_ids if recipe == self.first else (), max_draft_len)
        self.inner.begin(request_ids, recipe, max_draft_len, rest)
        self.kind = self.inner.kind

    def end(self, length: int) -> None:
        self.inner.end(length)

    def expected_len(self) -> int:
        return self.inner.expected_len()

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        assert entropy is not None
        if self.log.row:
            self.log.put(position, rows, np.concatenate([top, entropy[:, None]], 1))
        needed = entropy if self.inner.needs_entropy else None
        return self.inner.should_continue(position, rows, top[:, : self.inner.needs_top], needed)

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        self.inner.record_acceptance(request_ids, drafted, accepted, path)
        features, position, good, place = self.log.verified(request_ids, drafted, accepted)
        if not len(good) or self.kept >= self.max_tokens:
            return
        numbers = np.zeros((len(request_ids), 2), np.int32)
        for i in np.unique(place):
            numbers[i] = self._count(request_ids[i])
        self.parts.append(
            (features[:, :TOP], features[:, TOP], position.astype(np.int32), good, numbers[place, 0], numbers[place, 1])
        )
        self.kept += len(good)  # after it: another thread takes this for what `save` would write

    def finish(self, request_ids: Sequence[str]) -> None:
        self.inner.finish(request_ids)
        for request in request_ids:
            self.numbers.pop(request, None)

    def save(self, prices: tuple[float, float] | None = None) -> Verifications:
        """Write what was recorded so far to `path`, and return it; see `Verifications.prices`."""
        empty = (np.zeros((0, TOP), np.float32), np.zeros(0, np.float32))
        ints = np.zeros(0, np.int32)
        first = (*empty, ints, np.zeros(0, np.bool_), ints, ints)
        columns = zip(first, *self.parts, strict=True)
        top, entropy, position, good, request, number = (np.concatenate(column) for column in columns)
        records = Verifications(top, entropy, position, good, request, number, self.model, prices)
        records.save(self.path)
        return records

    def _count(self, request: str) -> list[int]:
        if request not in self.numbers:
            self.numbers[request] = [self.requests, -1]
            self.requests += 1
        self.numbers[request][1] += 1
        return self.numbers[request]
