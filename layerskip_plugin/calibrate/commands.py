"""`freedraft calibrate`: offline searches of skip sets, training of DISCO's classifier, and `inspect`."""

from __future__ import annotations

import inspect as python
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from freedraft.extras import require
from layerskip_plugin.calibrate.common import Common, Out, Seed

if TYPE_CHECKING:
    from layerskip_plugin.calibrate.run import Run

Share = Annotated[
    float | None,
    typer.Option(help="Share of the sublayers to skip. Default: the one with the best expected speed here."),
]
Survivors = Annotated[int, typer.Option(help="Width of the search: partial sets kept per weight (paper: 1).")]


def command(*modules: str, **defaults: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: make a command of `search(run, **own)`, with the options of `Common` and its own ones.

    Args:
        modules: required modules of the extra "calibrate".
        defaults: of common options, if they differ from those of `Common`.
    """

    def decorate(search: Callable[..., None]) -> Callable[..., None]:
        name = search.__name__.replace("_", "-")

        def run_search(**given: Any) -> None:
            require(f"calibrate {name}", "calibrate", *modules)
            from layerskip_plugin.calibrate.run import Run

            common = Common(**{f.name: given.pop(f.name) for f in fields(Common)})
            search(Run(name, common), **given)

        common = python.signature(Common, eval_str=True).parameters.values()
        _, *own = python.signature(search, locals={"Run": Any}, eval_str=True).parameters.values()
        shared = [p.replace(default=defaults.get(p.name, p.default)) for p in common]
        parameters = [*shared, *(p.replace(kind=python.Parameter.KEYWORD_ONLY) for p in own)]
        run_search.__doc__ = search.__doc__
        run_search.__signature__ = python.Signature(parameters)  # type: ignore[attr-defined]
        run_search.__annotations__ = {p.name: p.annotation for p in parameters}
        return run_search

    return decorate


@command()
def skip_set(run: Run, share: Share = None, survivors: Survivors = 4) -> None:
    """Find the layers to skip, and write the file for option skip_set (a knapsack search)."""
    from layerskip_plugin.calibrate.knapsack import protected_sublayers

    size, sample = run.size(share), run.sample()
    protected = sorted(protected_sublayers(run.model, sample))
    found = run.search("searching", sample, max_weight=size, protected=protected, survivors=survivors)
    best, gain = run.fastest(found, len(sample)) if size is None else (found[-1], None)
    if size is not None and best.weight < size:
        raise ValueError(
            f"only {best.weight} of the {size} sublayers wanted can be skipped without ruining the draft; "
            "ask for a smaller --share"
        )
    about = run.about(agreement=round(best.agreement, 3), cosine=round(best.cosine, 4), protected=protected)
    best.skip.save(run.common.out, about if gain is None else about | {"expected_over_plain": round(gain, 3)})
    typer.echo(
        f"wrote {run.common.out}: {len(best.skip)} of {run.model.sublayers} sublayers skipped, "
        f"{best.agreement:.2f} agreement"
        + ("" if gain is None else f", {gain:.2f} of plain expected by times measured here")
    )


@command()
def knapsack(
    run: Run,
    contexts: Annotated[str, typer.Option(help="Context lengths, separated by commas.")] = "256,1024,4096",
    longest: Annotated[int, typer.Option(help="Most draft tokens.")] = 10,
    survivors: Survivors = 1,
) -> None:
    """Find the fastest skip set and draft length for each context length, by times measured here (KnapSpec)."""
    from freedraft.fingerprints import hardware_name
    from layerskip_plugin.calibrate.host_model import pass_times
    from layerskip_plugin.calibrate.knapsack import best_choice, protected_sublayers
    from layerskip_plugin.knapsack_search import integer_weights
    from layerskip_plugin.selection.knapsack import Plan

    try:
        lengths = sorted({int(c) for c in contexts.split(",")})
    except ValueError:
        raise ValueError(f"contexts: {contexts!r} must be numbers separated by commas") from None
    sample = run.sample()
    protected = sorted(protected_sublayers(run.model, sample))
    choices, details = [], []
    for context in lengths:
        times = pass_times(run.model, context)
        weights = integer_weights(times.attention, times.mlp)
        options = {"weights": weights, "protected": protected, "survivors": survivors}
        choice = best_choice(run.search(f"context {context}", sample, **options), times, len(sample), longest)
        choices.append(choice)
        plain = 1 / times.verify(1)
        details.append({"context": context, "weights": list(weights), "plain_tokens_per_second": round(plain, 2)})
        what = f"{len(choice.skip)} skipped, draft {choice.length}" if choice.length else "plain"
        typer.echo(f"context {context}: {what}, {choice.rate / plain:.2f} of plain expected")
    plan = Plan(tuple(lengths), tuple(choices), hardware_name(run.model.device))
    plan.save(run.common.out, run.about(times=details, protected=protected))
    typer.echo(f"wrote {run.common.out}")


@command("sklearn.cluster", tokens=48, prompts=24)
def knn(
    run: Run,
    share: Share = None,
    clusters: Annotated[int | None, typer.Option(help="Number of domains to find in one log without labels.")] = None,
    answered: Annotated[int, typer.Option(help="Prompts of a domain that its set is searched with.")] = 8,
    anchors: Annotated[
        Literal["kmeans", "nearest"],
        typer.Option(help="What prompts are compared with: centroids, or the states nearest to the domain's (paper)."),
    ] = "kmeans",
    survivors: Survivors = 2,
) -> None:
    """Find a skip set per domain, from one file of prompts per domain, or from one log with --clusters (KNN-SSD)."""
    from layerskip_plugin.calibrate.knn import calibrate

    domains, found = calibrate(run, run.size(share), clusters, answered, anchors, survivors)
    domains.save(run.common.out, run.about(anchors=anchors))
    typer.echo(
        f"wrote {run.common.out}: {len(domains.names)} domains, {len(domains.anchors)} anchors; "
        f"{found:.0%} of these prompts find their domain"
    )


def disco(
    records: Annotated[Path, typer.Argument(help="File (.npz) that a server with option 'record' wrote.")],
    out: Out,
    draft_pass: Annotated[
        float | None, typer.Option(min=0.0, help="Time of a draft pass, in steps without drafts. Default: as recorded.")
    ] = None,
    query_token: Annotated[
        float | None, typer.Option(min=0.0, help="Time of one more verified token, in the same unit.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train the classifier that says when to stop drafting (DISCO).

    Nothing is written if a threshold, a fixed length or no drafting does as well.
    """
    require("calibrate disco", "calibrate", "sklearn.neural_network")
    from layerskip_plugin.calibrate.disco import Prices, train
    from layerskip_plugin.lookahead.records import Verifications

    if not out.parent.is_dir():
        raise ValueError(f"out: folder {out.parent} does not exist")
    verifications = Verifications.load(records)
    recorded = verifications.prices or (None, None)
    pairs = zip((draft_pass, query_token), recorded, strict=True)
    prices = [known if given is None else given for given, known in pairs]
    if prices[0] is None or prices[1] is None:
        raise ValueError(
            f"disco: {records} does not say what a draft pass and a token take (no steps without drafts were timed): "
            "give --draft-pass and --query-token, in plain steps, as 0.6 and 0.02"
        )
    classifier, measured = train(verifications, Prices(prices[0], prices[1]), seed)
    if not measured.better:
        raise ValueError(
            f"disco: on held-out requests the classifier brings {measured.classifier:.3f} tokens per plain step, a "
            f"confidence threshold {measured.confidence:.3f}, a fixed length {measured.fixed:.3f}, no drafting 1 "
            f"(standard error {measured.error:.3f}); nothing is written: use the lookahead cost, or record more traffic"
        )
    about = {name: round(value, 4) for name, value in asdict(measured).items()}
    classifier.save(out, {"records": records.name, "tokens": len(verifications), "tokens_per_plain_step": about})
    typer.echo(
        f"wrote {out}: {measured.classifier:.3f} tokens per plain step, confidence alone {measured.confidence:.3f}, "
        f"drafts of at most {classifier.max_length}"
    )


def inspect(file: Annotated[Path, typer.Argument(help="File that another calibrate command wrote.")]) -> None:
    """Show the skip sets in a file, layer by layer."""
    from layerskip_plugin.selection import knapsack, knn
    from layerskip_plugin.skip_set import FORMAT, SkipSet

    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        form, about = values["format"], dict(values["about"])
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} was not written by freedraft calibrate") from None
    if form == FORMAT:
        sets = {file.stem: SkipSet.load(file)}
    elif form == knn.FORMAT:
        domains = knn.Domains.load(file)
        sets = dict(zip([*domains.names, knn.ALL_DOMAINS], domains.sets, strict=True))
    elif form == knapsack.FORMAT:
        plan = knapsack.Plan.load(file)
        sets = {f"context {c}, draft {x.length}": x.skip for c, x in zip(plan.contexts, plan.choices, strict=True)}
        about["hardware"] = plan.hardware
    else:
        raise ValueError(f"{file} holds no skip sets, but {form!r}")
    for name, skip in sets.items():
        total = 2 * skip.n_layers
        typer.echo(f"{name}: {len(skip)} of {total} sublayers skipped ({len(skip) / total:.0%})")
        for kind, bits in (("attention", skip.bits[::2]), ("MLP", skip.bits[1::2])):
            typer.echo(f"  {kind:<9} {''.join('.' if bit else '#' for bit in bits)}")
    typer.echo("  (# kept, . skipped)")
    for key, value in about.items():
        typer.echo(f"{key}: {value}")
