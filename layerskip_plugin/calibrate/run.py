"""What the calibrations share: the model, its answers to the prompts, a checkpoint and progress bars."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from freedraft.fingerprints import hardware_name
from layerskip_plugin.calibrate.checkpoint import Checkpoint
from layerskip_plugin.calibrate.knapsack import Candidate, best_drafting, protected_sublayers, require_tokens, search
from layerskip_plugin.calibrate.model import CalibrationModel
from layerskip_plugin.calibrate.pass_times import VERIFIED, PassTimes
from layerskip_plugin.calibrate.prompts import MAX_PROMPT_TOKENS, Answered, Prompts, answer, load_tokenizer
from layerskip_plugin.calibrate.sample import Sample

INTERRUPTED = 130
GROUP = 8
"""Prompts answered in one batch, and the unit in which answers are saved."""
ANSWER_TOKENS = 96
TIMED_CONTEXT = 512

Compute = Callable[[Callable[[], object]], Any]
"""Work under a progress bar; it gets the function that advances the bar by one."""


class Run:
    """One calibration command at work.

    As a context it closes the model, removes the checkpoint when all has ended well, and turns an interruption into
    exit code 130.

    Args:
        name: of the command.
        settings: its arguments by name, "model", "data", "out", "tokens", "device", "engine", "engine_args" and "seed"
            among them; with the data, those that are numbers or texts decide whether a checkpoint is of the same
            calibration.

    Raises:
        ValueError: too few tokens, or data, a model, a device or a folder that there is not.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        require_tokens(settings["tokens"])
        self.name, self.folder, self.seed = name, settings["model"], settings["seed"]
        self.prompts = [Prompts.load(path) for path in settings["data"]]
        plain = {key: value for key, value in settings.items() if isinstance(value, (int, float, str, type(None)))}
        source = {"search": name, "data": [p.sha256 for p in self.prompts], "model": str(self.folder.resolve())}
        self.checkpoint = Checkpoint(settings["out"], plain | source)
        self.tokenizer = load_tokenizer(self.folder)
        self.engine = settings["engine"] or "transformers"
        self.model = load_model(self.folder, settings)
        self._times: PassTimes | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.model.close()
        if kind is None:
            self.checkpoint.remove()
        elif issubclass(kind, KeyboardInterrupt):
            path = self.checkpoint.path
            typer.echo(f"interrupted: run the same command again to go on ({path} holds what is done)", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def size(self, share: float) -> int:
        """The number of sublayers in `share` of them.

        Raises:
            ValueError: none, or more than half of them.
        """
        total = self.model.sublayers
        size = round(share * total)
        if not 0 < size <= total // 2:
            raise ValueError(f"share: {share} of {total} sublayers is {size}; choose between 1 and half of them")
        return size

    def progress(self, label: str, total: int, compute: Compute) -> Any:
        """Compute under a progress bar."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(label, total=total)
            result = compute(lambda: bar.advance(task))
            bar.update(task, completed=total)
            return result

    def step(self, name: str, label: str, total: int, compute: Compute) -> Any:
        """Compute under a progress bar, unless the checkpoint holds the result (JSON) of step `name`."""
        return self.checkpoint.step(name, lambda: self.progress(label, total, compute))

    def answers(self, domain: Prompts, count: int) -> list[Answered]:
        """The model's answers to the first `count` prompts of a file, saved group by group."""

        def compute(group: Sequence[str], tick: Callable[[], object]) -> list[Any]:
            answers = answer(self.model, self.tokenizer, group, ANSWER_TOKENS, batch=GROUP, progress=tick)
            return [[a.prompt, a.tokens] for a in answers]

        texts, rows = domain.texts[:count], []
        for start in range(0, len(texts), GROUP):
            group = texts[start : start + GROUP]
            name = f"answers {domain.name} {start} {len(group)}"
            rows += self.step(name, f"answering {domain.name}", len(group), partial(compute, group))
        return [Answered(list(tokens), int(prompt)) for prompt, tokens in rows]

    def sample_of(self, answers: Sequence[Answered], tokens: int) -> Sample:
        """`tokens` tokens of these answers."""
        return Sample.spread(self.model, [a.tokens for a in answers], tokens, [a.prompt for a in answers], self.seed)

    def sample(self, tokens: int, prompts: int) -> Sample:
        """`tokens` tokens of the model's answers to the first `prompts` prompts of each file."""
        return self.sample_of([a for domain in self.prompts for a in self.answers(domain, prompts)], tokens)

    def protected(self, sample: Sample) -> list[int]:
        """The sublayers that no set may skip."""
        return self.step("protected", "protecting", 1, lambda tick: sorted(protected_sublayers(self.model, sample)))

    def search(self, label: str, sample: Sample, **options: Any) -> list[Candidate]:
        """Run the knapsack search with these options under a progress bar."""
        run = partial(search, self.model, sample, **options)
        return self.progress(label, self.model.sublayers, lambda tick: run(progress=tick))

    def fastest(self, candidates: Sequence[Candidate], trials: int) -> tuple[Candidate, float]:
        """Of sets that skip something the one of most tokens per time, by times measured here at 512 tokens of context,
        and its gain over decoding without drafts.

        Args:
            trials: tokens that agreement was measured on.

        Raises:
            ValueError: none skips anything.
        """
        if self._times is None:
            self._times = self.model.pass_times(TIMED_CONTEXT)
        choice = best_drafting(candidates, self._times, trials=trials)
        if choice is None:
            raise ValueError("no sublayer can be skipped without ruining the draft: this model is too small for it")
        (best,) = (candidate for candidate in candidates if candidate.skip == choice.skip)
        return best, choice.rate * self._times.verify(1)

    def about(self, **more: Any) -> dict[str, Any]:
        """Where a file comes from: search, model, engine, hardware, data, and `more`."""
        data = [{"file": p.name, "sha256": p.sha256} for p in self.prompts]
        source = {
            "search": self.name,
            "model": self.folder.resolve().name,
            "engine": self.engine,
            "hardware": hardware_name(self.model.device),
        }
        return source | {"data": data} | more


def load_model(folder: Path, settings: Mapping[str, Any]) -> CalibrationModel:
    """The model in transformers, or in the engine that "engine" names, which takes "engine_args" (JSON).

    Raises:
        ValueError: no such engine, or wrong arguments.
    """
    engine, device = settings["engine"], settings["device"]
    if engine is None:
        if settings["engine_args"]:
            raise ValueError("engine-args: of which engine? add --engine vllm")
        from layerskip_plugin.calibrate.host_model import HostModel

        return HostModel.load(folder, device)
    if engine not in ("vllm", "sglang"):
        raise ValueError(
            f"engine: {engine} is none: calibration starts one of its own (--engine vllm or sglang), it does not run "
            "in a server that is already serving"
        )
    if device != "auto":
        raise ValueError(f"device: {device} is for transformers: leave it out with --engine {engine}")
    try:
        engine_args = json.loads(settings["engine_args"] or "{}")
    except ValueError:
        engine_args = None
    if not isinstance(engine_args, dict):
        raise ValueError('engine-args: give a JSON object, as --engine-args \'{"dtype": "bfloat16"}\'')
    if importlib.util.find_spec(engine) is None:
        raise ValueError(
            f"engine: {engine} is not installed here: pip install {engine}, or leave --engine out for transformers"
        )
    longest = max([MAX_PROMPT_TOKENS + ANSWER_TOKENS, *settings.get("contexts", [TIMED_CONTEXT])]) + VERIFIED[-1]
    if engine == "vllm":
        from layerskip_plugin.calibrate.vllm import VllmModel

        return VllmModel(folder, longest, engine_args)
    from layerskip_plugin.calibrate.sglang import SglangModel

    return SglangModel(folder, longest, engine_args)
