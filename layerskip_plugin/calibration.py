"""`freedraft calibrate`: the offline searches of skip sets and of DISCO's classifier, and a look at their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerskip_plugin.skip_set import FORMAT as SKIP_SET
from layerskip_plugin.skip_set import SkipSet

if TYPE_CHECKING:
    from layerskip_plugin.selection.host_model import HostModel, Sample
    from layerskip_plugin.selection.resume import Resumable
    from layerskip_plugin.selection.texts import Prompts

INTERRUPTED = 130
GROUP = 8
"""Prompts answered in one batch, and the unit in which answers are kept."""

ModelOption = Annotated[Path, typer.Option(help="Hugging Face folder of the model that will be served.")]
OutOption = Annotated[Path, typer.Option(help="The file to write (JSON).")]
DataArgument = Annotated[
    list[Path], typer.Argument(help='JSONL files with "prompt", "question", "turns" or "text" in each line.')
]
TokensOption = Annotated[int, typer.Option(help="Calibration tokens, at least 24.")]
PromptsOption = Annotated[int, typer.Option(help="Prompts of each file; the model answers them.")]
ShareOption = Annotated[float, typer.Option(help="Share of the 2L sublayers to skip.")]
SeedOption = Annotated[int, typer.Option(help="Of all randomness.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda; auto takes cuda where there is one.")]
SurvivorsOption = Annotated[int, typer.Option(help="Partial sets kept per weight; 1 is the paper's.")]


def skip_set(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    share: ShareOption = 0.2,
    tokens: TokensOption = 64,
    prompts: PromptsOption = 8,
    survivors: SurvivorsOption = 4,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """Search one skip set of a given size, for the options "skip_set" of the engines' flags (knapsack search)."""
    from layerskip_plugin.selection.knapsack import protected, require_tokens, search

    require_tokens(tokens)
    with _calibration("skip-set", data, model, out, locals()) as work:
        host, sample = work.host, work.sample(tokens, prompts, seed)
        kept = work.steps.step(
            "protected", lambda: work.during("protecting", 1, lambda tick: sorted(protected(host, sample)))
        )
        wanted = _count(share, host)
        found = work.during(
            "searching",
            host.sublayers,
            lambda tick: search(host, sample, most=wanted, kept=kept, survivors=survivors, progress=tick),
        )
        best = found[-1]
        if best.weight < wanted:
            raise ValueError(
                f"only {best.weight} of the {wanted} sublayers wanted can be skipped without ruining the draft; "
                f"ask for a smaller --share"
            )
        about = work.about(agreement=round(best.agreement, 3), cosine=round(best.cosine, 4), protected=kept)
        best.skip.save(out, about)
        typer.echo(
            f"wrote {out}: {len(best.skip)} of {host.sublayers} sublayers skipped, {best.agreement:.2f} agreement"
        )


def bayesian(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    share: Annotated[float | None, typer.Option(help="Share to skip; without it, the fastest set of any size.")] = None,
    iterations: Annotated[int, typer.Option(help="Sets to evaluate.")] = 200,
    tokens: TokensOption = 64,
    prompts: PromptsOption = 8,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """Self-SD: offline Bayesian optimisation of measured seconds per token, or of acceptance at a given share."""
    from layerskip_plugin.selection import bayesian as self_sd
    from layerskip_plugin.selection.bit_search import BitSearch
    from layerskip_plugin.selection.knapsack import require_tokens
    from layerskip_plugin.selection.latency import measure

    require_tokens(tokens)
    with _calibration("bayesian", data, model, out, locals()) as work:
        host, sample = work.host, work.sample(tokens, prompts, seed)
        space = BitSearch(
            host.n_layers, host.fingerprint, skipped=None if share is None else _count(share, host), seed=seed
        )
        space.restore(work.steps.steps.get("evaluated", []))
        times = measure(host, 512) if share is None else None

        def evaluate(skips: Any) -> Any:
            return host.scores(skips, sample)[0]

        def run(tick: Callable[[], object]) -> SkipSet:
            for _ in range(len(space.values)):
                tick()

            def one() -> None:
                tick()
                if len(space.values) % 10 == 0:
                    work.steps.put("evaluated", space.state())

            return self_sd.search(evaluate, space, iterations, times, one)

        best = work.during("evaluating", iterations, run)
        work.steps.put("evaluated", space.state())
        agreement = float(evaluate([best])[0])
        best.save(out, work.about(iterations=iterations, agreement=round(agreement, 3)))
        typer.echo(f"wrote {out}: {len(best)} of {host.sublayers} sublayers skipped, {agreement:.2f} agreement")


def knapsack(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    contexts: Annotated[str, typer.Option(help="Context lengths, with commas.")] = "256,1024,4096",
    tokens: TokensOption = 64,
    prompts: PromptsOption = 8,
    longest: Annotated[int, typer.Option(help="Largest draft length.")] = 10,
    survivors: SurvivorsOption = 1,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """KnapSpec: the set and draft length of most tokens per time at each context length, from times measured here."""
    from layerskip_plugin.selection.hardware import hardware
    from layerskip_plugin.selection.knapsack import choose, integer_weights, protected, require_tokens, search
    from layerskip_plugin.selection.latency import measure
    from layerskip_plugin.selection.plan import Plan

    require_tokens(tokens)
    try:
        lengths = sorted({int(c) for c in contexts.split(",")})
    except ValueError:
        raise ValueError(f"contexts: {contexts!r} is no list of numbers with commas") from None
    with _calibration("knapsack", data, model, out, locals()) as work:
        host, sample = work.host, work.sample(tokens, prompts, seed)
        kept = work.steps.step(
            "protected", lambda: work.during("protecting", 1, lambda tick: sorted(protected(host, sample)))
        )
        choices, details = [], []
        for context in lengths:
            times = measure(host, context)
            weights = integer_weights(times.attention, times.mlp)
            run = partial(search, host, sample, weights, kept=kept, survivors=survivors)
            found = work.during(f"context {context}", host.sublayers, lambda tick, run=run: run(progress=tick))  # type: ignore[misc]
            choices.append(choose(found, times, longest, len(sample)))
            plain = 1 / times.verify(1)
            details.append({"context": context, "weights": list(weights), "plain_tokens_per_second": round(plain, 2)})
            what = f"{len(choices[-1].skip)} skipped, draft {choices[-1].length}" if choices[-1].length else "plain"
            typer.echo(f"context {context}: {what}, {choices[-1].rate / plain:.2f} of plain expected")
        Plan(tuple(lengths), tuple(choices), hardware(host.device)).save(out, work.about(times=details, protected=kept))
        typer.echo(f"wrote {out}")


def knn(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    share: ShareOption = 0.2,
    tokens: TokensOption = 48,
    prompts: PromptsOption = 24,
    answered: Annotated[int, typer.Option(help="Prompts of each domain that the model answers for its set.")] = 8,
    survivors: SurvivorsOption = 2,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """KNN-SSD: one file of prompts per domain; anchors of their last hidden states, and a skip set per domain."""
    import numpy as np

    from layerskip_plugin.selection.host_model import Sample
    from layerskip_plugin.selection.knapsack import protected, require_tokens, search
    from layerskip_plugin.selection.knn import fit, require_prompts
    from layerskip_plugin.selection.texts import encode

    require_tokens(tokens)
    with _calibration("knn", data, model, out, locals()) as work:
        counts = {p.name: min(prompts, len(p.texts)) for p in work.prompts}
        require_prompts(counts)
        if len(counts) < len(work.prompts):
            raise ValueError("data: two files have the same name, and it names the domain; rename one")
        host, hidden, parts, sets = work.host, [], [], []
        total = sum(counts.values())

        def states(tick: Callable[[], object]) -> None:
            for domain in work.prompts:
                rows = []
                for text in domain.texts[: counts[domain.name]]:
                    rows.append(host.read(encode(work.tokenizer, text, 384)).final[-1].numpy(force=True))
                    tick()
                hidden.append(np.stack(rows))

        work.during("reading", total, states)
        for domain in work.prompts:
            answers = work.answers([domain], min(answered, counts[domain.name]))
            parts.append(answers)
        everything = [a for part in parts for a in part]
        for i, part in enumerate([*parts, everything]):
            name = work.prompts[i].name if i < len(parts) else "all domains"

            def one(tick: Callable[[], object], part: Any = part) -> list[int]:
                sample = Sample.spread(host, [a.tokens for a in part], tokens, [a.prompt for a in part], seed)
                kept = protected(host, sample)
                most = _count(share, host)
                found = search(host, sample, most=most, kept=kept, survivors=survivors, progress=tick)
                return list(found[-1].skip.sublayers)

            run = partial(work.during, f"set of {name}", host.sublayers, one)
            chosen = work.steps.step(f"set {name}", run)
            sets.append(host.skip(chosen))
        domains = fit(hidden, [p.name for p in work.prompts], sets, seed=seed)
        domains.save(out, work.about())
        right = [(domains.route(h) == i).mean() for i, h in enumerate(hidden)]
        typer.echo(
            f"wrote {out}: {len(domains.anchors)} anchors; {np.mean(right):.0%} of these prompts find their domain"
        )


def disco(
    records: Annotated[Path, typer.Argument(help='Recorded verifications (.npz): the option "record" of the engines.')],
    out: OutOption,
    seed: SeedOption = 0,
) -> None:
    """DISCO: train the classifier that says when to stop drafting; refused when a plain threshold does as well."""
    from layerskip_plugin.lookahead.disco import train
    from layerskip_plugin.lookahead.records import Verifications

    if not out.parent.is_dir():
        raise ValueError(f"out: folder {out.parent} does not exist")
    loaded = Verifications.load(records)
    classifier, measured = train(loaded, seed)
    scores = {"classifier": measured.classifier, "confidence": measured.confidence, "fixed": measured.fixed}
    rounded = {f"f1_{name}": round(value, 4) for name, value in scores.items()}
    if not measured.better:
        raise ValueError(
            f"disco: on held-out requests the classifier (F1 {measured.classifier:.3f}) is no better than a confidence "
            f"threshold ({measured.confidence:.3f}, standard error of the difference {measured.error:.3f}); nothing is "
            "written: use the lookahead cost or confidence, or record more traffic"
        )
    classifier.save(
        out, {"records": records.name, "tokens": len(loaded), "f1_error": round(measured.error, 4)} | rounded
    )
    typer.echo(f"wrote {out}: F1 {measured.classifier:.3f}, threshold alone {measured.confidence:.3f}")


def inspect(
    file: Annotated[Path, typer.Argument(help="What calibrate skip-set, bayesian, knn or knapsack wrote.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the sets into this picture (PNG, SVG, PDF).")] = None,
) -> None:
    """Show the skip sets in a file: retained, skipped attention and skipped MLP, layer by layer."""
    sets, about = load_sets(file)
    for name, skip in sets.items():
        typer.echo(f"{name}: {len(skip)} of {2 * skip.n_layers} sublayers skipped ({skip.share:.0%})")
        for kind, bits in (("attention", skip.bits[::2]), ("MLP", skip.bits[1::2])):
            typer.echo(f"  {kind:<9} {''.join('.' if bit else '#' for bit in bits)}")
    typer.echo("  (# retained, . skipped)")
    for key, value in about.items():
        typer.echo(f"{key}: {value}")
    if plot is not None:
        draw(sets, plot)
        typer.echo(f"wrote {plot}")


def load_sets(file: Path) -> tuple[dict[str, SkipSet], dict[str, Any]]:
    """The sets in any file of a calibration by name, and what is said about them.

    Raises:
        ValueError: no such file, or none of ours.
    """
    from layerskip_plugin.selection.knn import FORMAT as KNN
    from layerskip_plugin.selection.knn import Domains
    from layerskip_plugin.selection.plan import FORMAT as PLAN
    from layerskip_plugin.selection.plan import Plan

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        form, about = values["format"], dict(values["about"])
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is no file of freedraft calibrate") from None
    if form == SKIP_SET:
        return {file.stem: SkipSet.load(file)}, about
    if form == KNN:
        domains = Domains.load(file)
        return dict(zip([*domains.names, "all domains"], domains.sets, strict=True)), about
    if form == PLAN:
        plan = Plan.load(file)
        pairs = zip(plan.contexts, plan.choices, strict=True)
        return {f"context {c}, draft {x.length}": x.skip for c, x in pairs}, about | {"hardware": plan.hardware}
    raise ValueError(f"{file} holds {form!r}: there are no skip sets in it")


def draw(sets: dict[str, SkipSet], path: Path) -> None:
    """A strip of two rows per set, layer by layer: retained, skipped attention, skipped MLP.

    Raises:
        ValueError: the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colors = {"retained": "#dddddd", "attention skipped": "#c0392b", "MLP skipped": "#2471a3"}
    layers = max(skip.n_layers for skip in sets.values())
    figure, axes = pyplot.subplots(
        len(sets), 1, figsize=(2 + 0.25 * layers, 0.6 + 0.9 * len(sets)), squeeze=False, layout="constrained"
    )
    for (name, skip), axis in zip(sets.items(), axes[:, 0], strict=True):
        bits = np.array(skip.bits).reshape(-1, 2).T
        axis.imshow(
            bits * np.array([[1], [2]]), cmap=ListedColormap(list(colors.values())), vmin=0, vmax=2, aspect="auto"
        )
        axis.set_yticks([0, 1], ["attention", "MLP"])
        axis.set_xticks(range(0, skip.n_layers, 5))
        axis.set_xticks(np.arange(skip.n_layers) - 0.5, minor=True)
        axis.set_yticks([0.5], minor=True)
        axis.grid(which="minor", color="white", linewidth=1)
        axis.tick_params(which="both", length=0)
        axis.set_title(f"{name}: {len(skip)} of {2 * skip.n_layers} skipped", loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("layer")
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"plot: cannot write {path}: {error}") from None
    finally:
        pyplot.close(figure)


class _Work:
    """What all searches share: the model, the prompts, kept steps, progress bars."""

    def __init__(
        self, host: HostModel, tokenizer: Any, prompts: list[Prompts], steps: Resumable, model: Path, name: str
    ) -> None:
        self.host, self.tokenizer, self.prompts, self.steps = host, tokenizer, prompts, steps
        self.model, self.name = model, name

    def during(self, what: str, total: int, compute: Callable[[Callable[[], object]], Any]) -> Any:
        """Compute under a progress bar; `compute` gets the function that moves it on."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as bar:
            task = bar.add_task(what, total=total)
            result = compute(lambda: bar.advance(task))
            bar.update(task, completed=total)
            return result

    def answers(self, prompts: list[Prompts], count: int) -> list[Any]:
        """The model's answers to the first `count` prompts of each file, kept group by group."""
        from layerskip_plugin.selection.texts import Answered, answer

        out: list[Any] = []
        for domain in prompts:
            texts = domain.slice(0, min(count, len(domain.texts))).texts
            for start in range(0, len(texts), GROUP):
                group = texts[start : start + GROUP]

                def compute(tick: Callable[[], object], group: list[str] = group) -> list[Any]:
                    made = answer(self.host, self.tokenizer, group, 96, batch=GROUP, progress=tick)
                    return [[a.prompt, a.tokens] for a in made]

                what = f"answering {domain.name}"
                held = self.steps.step(
                    f"answers {domain.name} {start} {len(group)}",
                    lambda w=what, g=group, c=compute: self.during(w, len(g), c),  # type: ignore[misc]
                )
                out += [Answered(list(tokens), int(prompt)) for prompt, tokens in held]
        return out

    def sample(self, tokens: int, prompts: int, seed: int) -> Sample:
        """`tokens` tokens of the model's own answers."""
        from layerskip_plugin.selection.host_model import Sample

        answers = self.answers(self.prompts, prompts)
        return Sample.spread(self.host, [a.tokens for a in answers], tokens, [a.prompt for a in answers], seed)

    def about(self, **more: Any) -> dict[str, Any]:
        """Where a file comes from: model, hardware, data."""
        from layerskip_plugin.selection.hardware import hardware

        data = [{"file": p.name, "sha256": p.sha256} for p in self.prompts]
        return {
            "search": self.name,
            "model": self.model.resolve().name,
            "hardware": hardware(self.host.device),
            "data": data,
        } | more


@contextmanager
def _calibration(name: str, data: list[Path], model: Path, out: Path, settings: dict[str, Any]) -> Iterator[_Work]:
    from layerskip_plugin.selection.host_model import HostModel
    from layerskip_plugin.selection.resume import Resumable
    from layerskip_plugin.selection.texts import Prompts, load_tokenizer

    prompts = [Prompts.load(path) for path in data]
    plain = {key: value for key, value in settings.items() if isinstance(value, (int, float, str, type(None)))}
    steps = Resumable(out, plain | {"search": name, "data": [p.sha256 for p in prompts], "model": str(model.resolve())})
    host = HostModel.load(model, settings["device"])
    try:
        yield _Work(host, load_tokenizer(model), prompts, steps, model, name)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: run the same command again to go on ({steps.path} holds what is done)", err=True)
        raise typer.Exit(INTERRUPTED) from None
    steps.done()


def _count(share: float, host: HostModel) -> int:
    count = round(share * host.sublayers)
    if not 0 < count <= host.sublayers // 2:
        raise ValueError(f"share: {share} of {host.sublayers} sublayers is {count}; choose between 1 and half of them")
    return count
