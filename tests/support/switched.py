"""Several methods in one engine: a client's parameter `method` names the one that drafts, while nothing else runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.config import PluginOptions
from freedraft.method import METHODS, MethodSpec
from freedraft.metrics import Metrics
from freedraft.on_top import OnTop
from freedraft.step import EngineContext, Step
from layerskip_plugin.method import LayerSkipMethod
from sssd_plugin.method import SssdMethod
from tests.support import repeat_drafter


class SwitchedOptions(PluginOptions):
    parts: str = ""
    """A file: JSON of each method's options and its name, by names of the tests' own."""
    window: int | None = None
    """The largest window of a method, for which engines may reserve."""


class Switched:
    """The method that serves, but for what is defined here."""

    def __init__(self, options: SwitchedOptions, context: EngineContext, controller: Any = None) -> None:
        given = json.loads(Path(options.parts).read_text())
        self.parts = {name: make(context, **part) for name, part in given.items()}
        self.now, self.running = next(iter(self.parts.values())), set[str]()
        self.metrics = Metrics(SPEC.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["now"], name)

    @property
    def needs_prompt_states(self) -> bool:
        return any(part.needs_prompt_states for part in self.parts.values())

    def prepare(self, model: Any) -> None:
        for part in self.parts.values():
            part.prepare(model)

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        wanted = self.parts.get(extra.get("method", ""), self.now)
        assert wanted is self.now or not self.running, "requests of another method have not ended"
        self.now = wanted
        self.running.add(request_id)
        self.now.begin(request_id, tokens, tenant, extra)

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        self.running.discard(request_id)
        self.now.finish(request_id, output)

    def split(self, step: Step) -> Any:
        self.metrics.add(step)  # all drafts: of n-grams, and of what they are on top of
        return self.now.split(step)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def kept_by(method: Any) -> int:
    """How many requests a method, or a part of it, still knows."""
    match method:
        case Switched():
            return sum(map(kept_by, method.parts.values()))
        case OnTop():
            return kept_by(method.above) + kept_by(method.below)
        case SssdMethod():
            return len(method.drafter) + len(method._begun)
        case LayerSkipMethod():
            return len(method.selection.requests) + len(method._running)
    return 0


def sssd_in(method: Any) -> SssdMethod | None:
    """The method that drafts n-grams, if this one, or the one that serves in it, does."""
    now = method.now if isinstance(method, Switched) else method
    now = now.above if isinstance(now, OnTop) else now
    return now if isinstance(now, SssdMethod) else None


SPECS = {"repeat": repeat_drafter.SPEC}
SPEC = MethodSpec("switched", f"{__name__}:Switched", SwitchedOptions, runs_model=True, takes_corpora=True)


def by_source(metrics: Metrics) -> dict[str, int]:
    """Of n-grams on top of draft passes: their tokens, and drafts of passes."""
    names = "layerskip", ""  # none where a method of several is named
    below = sum(int(metrics.head_lengths(name, str(n))._value.get()) for name in names for n in range(64))
    return {"of n-grams": int(Metrics("sssd").drafted._value.get()), "of passes": below}


def make(context: EngineContext, method: str, **options: Any) -> Any:
    spec = SPECS.get(method) or METHODS[method]
    return spec.make(spec.options.parse(options), context)
