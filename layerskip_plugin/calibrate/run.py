"""`Run`: shared parts of searches: the model, its answers to the prompts, and progress bars."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from freedraft.fingerprints import hardware_name
from layerskip_plugin.calibrate.common import Common
from layerskip_plugin.calibrate.host_model import HostModel, Sample, pass_times
from layerskip_plugin.calibrate.knapsack import MIN_TOKENS, ScoredSet, best_drafting, search
from layerskip_plugin.calibrate.prompts import Answered, Prompts, encode
from layerskip_plugin.pass_times import PassTimes

ANSWER_TOKENS, ANSWERED_TOGETHER = 96, 8
TIMED_CONTEXT = 512


class Run:
    """One search, by the command of this name. Raises ValueError for too few tokens, and for unusable data, folders or
    models."""

    def __init__(self, name: str, common: Common) -> None:
        if common.tokens < MIN_TOKENS:
            raise ValueError(f"{common.tokens} calibration tokens are too few; give at least {MIN_TOKENS} (--tokens)")
        if not common.out.parent.is_dir():
            raise ValueError(f"out: folder {common.out.parent} does not exist")
        self.name, self.common = name, common
        self.prompts = [Prompts.load(path) for path in common.data]
        self.model = HostModel.load(common.model, common.device)
        self.tokenizer = AutoTokenizer.from_pretrained(common.model)

    def size(self, share: float | None) -> int | None:
        """The number of sublayers in `share` of them. Raises ValueError for 0 or more than half."""
        if share is None:
            return None
        total = self.model.sublayers
        size = round(share * total)
        if not 0 < size <= total // 2:
            raise ValueError(f"share: {share} of {total} sublayers is {size}; choose between 1 and half of them")
        return size

    def answers(self, domain: Prompts, count: int) -> list[Answered]:
        prompts, answers = [encode(self.tokenizer, text) for text in domain.texts[:count]], list[Answered]()
        with bar(f"answering {domain.name}", len(prompts)) as advance:
            for start in range(0, len(prompts), ANSWERED_TOGETHER):
                group = prompts[start : start + ANSWERED_TOGETHER]
                new = self.model.generate(group, ANSWER_TOKENS)
                answers += [Answered(prompt + more, len(prompt)) for prompt, more in zip(group, new, strict=True)]
                advance(len(group))
        return answers

    def sample(self, answers: Sequence[Answered] | None = None) -> Sample:
        """Tokens of these answers, by default of the answers to the first prompts of each file."""
        if answers is None:
            answers = [a for domain in self.prompts for a in self.answers(domain, self.common.prompts)]
        texts, first = [a.tokens for a in answers], [a.prompt for a in answers]
        return self.model.sample(texts, self.common.tokens, first, self.common.seed)

    def search(self, label: str, sample: Sample, **options: Any) -> list[ScoredSet]:
        """`knapsack.search` under a progress bar."""
        with bar(label, self.model.sublayers) as advance:
            return search(self.model, sample, progress=advance, **options)

    @cached_property
    def times(self) -> PassTimes:
        return pass_times(self.model, TIMED_CONTEXT)

    def fastest(self, candidates: Sequence[ScoredSet], trials: int) -> tuple[ScoredSet, float]:
        """The non-empty set of most tokens per time, and its gain over decoding without drafts; see `best_drafting`.
        Raises ValueError if there is none."""
        choice = best_drafting(candidates, self.times, trials)
        if choice is None:
            raise ValueError("no sublayer can be skipped without ruining the draft: this model is too small for it")
        best = next(candidate for candidate in candidates if candidate.skip == choice.skip)
        return best, choice.rate * self.times.verify(1)

    def about(self, **more: Any) -> dict[str, Any]:
        source = {
            "search": self.name,
            "model": self.common.model.resolve().name,
            "dtype": str(self.model.model.dtype).removeprefix("torch."),
            "hardware": hardware_name(self.model.device),
            "data": [{"file": p.name, "sha256": p.sha256} for p in self.prompts],
        }
        return source | more


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[..., object]]:
    """A progress bar; yields a function that advances it (by 1 by default)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(label, total=total)
        yield partial(progress.advance, task)
        progress.update(task, completed=total)
