"""What the searches share: the model, its answers to the prompts, a checkpoint and progress bars."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from freedraft.fingerprints import hardware_name
from layerskip_plugin.calibrate.common import Common
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.knapsack import Candidate, best_drafting, protected_sublayers, require_tokens, search
from layerskip_plugin.calibrate.prompts import Answered, Prompts, answer, load_tokenizer
from layerskip_plugin.calibrate.sample import Sample
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.skip_set import read_json, write_json

FORMAT = "freedraft calibration in progress 1"
INTERRUPTED = 130
GROUP = 8  # prompts answered in one batch, and the unit in which answers are saved
ANSWER_TOKENS = 96
TIMED_CONTEXT = 512


class Checkpoint:
    """Results of finished steps, in a file beside `out`: the same command goes on where it was interrupted. Results
    under other settings are thrown away. Raises ValueError if the folder of `out` does not exist."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        if not out.parent.is_dir():
            raise ValueError(f"out: folder {out.parent} does not exist")
        self.path = out.with_name(out.name + ".progress")
        self.settings = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.steps: dict[str, Any] = {}
        # Without a file, or with one that cannot be read, it begins anew.
        with suppress(ValueError):
            saved = read_json(self.path, FORMAT, "calibration")
            if saved.get("settings") == self.settings:
                self.steps = saved["steps"]

    def step(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a step, which must be JSON, computed if it is not saved yet."""
        if name not in self.steps:
            self.put(name, compute())
        return self.steps[name]

    def put(self, name: str, result: Any) -> None:
        self.steps[name] = result
        write_json(self.path, {"format": FORMAT, "settings": self.settings, "steps": self.steps})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Run:
    """One search at work. As a context it removes the checkpoint when all has ended well, and turns an interruption
    into exit code 130. Raises ValueError for too few tokens, and for data or a folder that there is not.

    Args:
        common, own: options of the command. With the data, they decide whether a checkpoint is of the same calibration.
    """

    def __init__(self, name: str, common: Common, own: Mapping[str, Any]) -> None:
        require_tokens(common.tokens)
        self.name, self.common = name, common
        self.prompts = [Prompts.load(path) for path in common.data]
        settings = {"search": name, "data": [p.sha256 for p in self.prompts], "model": str(common.model.resolve())}
        settings |= {key: getattr(common, key) for key in ("tokens", "prompts", "device", "seed")}
        self.checkpoint = Checkpoint(common.out, settings | dict(own))
        self._times: dict[int, PassTimes] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.checkpoint.remove()
        elif issubclass(kind, KeyboardInterrupt):
            path = self.checkpoint.path
            typer.echo(f"interrupted: run the same command again to go on ({path} holds what is done)", err=True)
            raise typer.Exit(INTERRUPTED) from None

    @cached_property
    def model(self) -> HostModel:
        return HostModel.load(self.common.model, self.common.device)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.common.model)

    def size(self, share: float | None) -> int | None:
        """The number of sublayers in `share` of them; None for None. Raises ValueError for 0 or more than half."""
        if share is None:
            return None
        total = self.model.sublayers
        size = round(share * total)
        if not 0 < size <= total // 2:
            raise ValueError(f"share: {share} of {total} sublayers is {size}; choose between 1 and half of them")
        return size

    def progress(self, label: str, total: int, compute: Callable[[Callable[..., object]], Any]) -> Any:
        """Compute under a progress bar; `compute` gets the function that advances it, by one without an argument."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(label, total=total)
            result = compute(partial(bar.advance, task))
            bar.update(task, completed=total)
            return result

    def answers(self, domain: Prompts, count: int) -> list[Answered]:
        """The model's answers to the first `count` prompts of a file, saved group by group."""

        def compute(group: Sequence[str], tick: Callable[[], object]) -> list[Any]:
            answers = answer(self.model, self.tokenizer, group, ANSWER_TOKENS, batch=GROUP, progress=tick)
            return [[a.prompt, a.tokens] for a in answers]

        texts, rows = domain.texts[:count], []
        for start in range(0, len(texts), GROUP):
            group = texts[start : start + GROUP]
            under_bar = partial(self.progress, f"answering {domain.name}", len(group), partial(compute, group))
            rows += self.checkpoint.step(f"answers {domain.name} {start} {len(group)}", under_bar)
        return [Answered(list(tokens), int(prompt)) for prompt, tokens in rows]

    def sample(self, answers: Sequence[Answered] | None = None) -> Sample:
        """Tokens of these answers, by default of those to the first prompts of each file."""
        if answers is None:
            answers = [a for domain in self.prompts for a in self.answers(domain, self.common.prompts)]
        texts, first = [a.tokens for a in answers], [a.prompt for a in answers]
        return self.model.sample(texts, self.common.tokens, first, self.common.seed)

    def protected(self, sample: Sample) -> list[int]:
        """The sublayers that no set may skip."""
        return list(self.checkpoint.step("protected", lambda: sorted(protected_sublayers(self.model, sample))))

    def search(self, label: str, sample: Sample, **options: Any) -> list[Candidate]:
        """The knapsack search under a progress bar; see `knapsack.search`."""
        run = partial(search, self.model, sample, **options)
        return list(self.progress(label, self.model.sublayers, lambda tick: run(progress=tick)))

    def times(self, context: int = TIMED_CONTEXT) -> PassTimes:
        if context not in self._times:
            self._times[context] = self.model.pass_times(context)
        return self._times[context]

    def fastest(self, candidates: Sequence[Candidate], trials: int) -> tuple[Candidate, float]:
        """The set that skips something of most tokens per time, and its gain over decoding without drafts; see
        `best_drafting`. Raises ValueError if none skips anything."""
        choice = best_drafting(candidates, self.times(), trials=trials)
        if choice is None:
            raise ValueError("no sublayer can be skipped without ruining the draft: this model is too small for it")
        best = next(candidate for candidate in candidates if candidate.skip == choice.skip)
        return best, choice.rate * self.times().verify(1)

    def about(self, **more: Any) -> dict[str, Any]:
        """Where a file comes from."""
        source = {
            "search": self.name,
            "model": self.common.model.resolve().name,
            "dtype": str(self.model.model.dtype).removeprefix("torch."),
            "hardware": hardware_name(self.model.device),
            "data": [{"file": p.name, "sha256": p.sha256} for p in self.prompts],
        }
        return source | more
