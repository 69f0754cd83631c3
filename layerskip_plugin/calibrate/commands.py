"""`freedraft calibrate`: the offline searches of skip sets and of DISCO's classifier, and a look at their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freedraft.extras import require
from layerskip_plugin.skip_set import SkipSet

if TYPE_CHECKING:
    from layerskip_plugin.calibrate.prompts import Answered

ModelOption = Annotated[Path, typer.Option(help="Hugging Face folder of the model that will be served.")]
OutOption = Annotated[Path, typer.Option(help="The file to write (JSON).")]
DataArgument = Annotated[
    list[Path], typer.Argument(help='JSONL files with "prompt", "question", "turns" or "text" in each line.')
]
TokensOption = Annotated[int, typer.Option(help="Calibration tokens, at least 24.")]
PromptsOption = Annotated[int, typer.Option(help="Prompts of each file; the model answers them.")]
ShareOption = Annotated[
    float | None,
    typer.Option(help="Share of the 2L sublayers to skip; without it, what brings most tokens per time here."),
]
SeedOption = Annotated[int, typer.Option(help="Of all randomness.")]
DeviceOption = Annotated[str, typer.Option(help="Of transformers: cpu or cuda; auto takes cuda where there is one.")]
EngineOption = Annotated[
    str | None,
    typer.Option(help="vllm or sglang: in the engine that will serve, its dtype and kernels; default: transformers."),
]
EngineArgsOption = Annotated[
    str, typer.Option(help='What the engine will be served with, as JSON: {"dtype": "bfloat16"}.')
]
SurvivorsOption = Annotated[int, typer.Option(help="Partial sets kept per weight; 1 is the paper's.")]


def skip_set(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    share: ShareOption = None,
    tokens: TokensOption = 64,
    prompts: PromptsOption = 8,
    survivors: SurvivorsOption = 4,
    engine: EngineOption = None,
    engine_args: EngineArgsOption = "",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """Search one skip set, of a given size or of most tokens per time, for the option "skip_set" (knapsack search)."""
    from layerskip_plugin.calibrate.run import Run

    with Run("skip-set", locals()) as run:
        calibrated, size = run.model, None if share is None else run.size(share)
        sample = run.sample(tokens, prompts)
        protected = run.protected(sample)
        found = run.search("searching", sample, max_weight=size, protected=protected, survivors=survivors)
        best, gain = run.fastest(found, len(sample)) if size is None else (found[-1], None)
        if size is not None and best.weight < size:
            raise ValueError(
                f"only {best.weight} of the {size} sublayers wanted can be skipped without ruining the draft; "
                "ask for a smaller --share"
            )
        about = run.about(agreement=round(best.agreement, 3), cosine=round(best.cosine, 4), protected=protected)
        best.skip.save(out, about if gain is None else about | {"expected_over_plain": round(gain, 3)})
        typer.echo(
            f"wrote {out}: {len(best.skip)} of {calibrated.sublayers} sublayers skipped, {best.agreement:.2f} agreement"
            + ("" if gain is None else f", {gain:.2f} of plain expected by times measured here")
        )


def bayesian(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    share: Annotated[float | None, typer.Option(help="Share to skip; without it, the fastest set of any size.")] = None,
    iterations: Annotated[int, typer.Option(help="Sets to evaluate.")] = 200,
    tokens: TokensOption = 64,
    prompts: PromptsOption = 8,
    engine: EngineOption = None,
    engine_args: EngineArgsOption = "",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """Self-SD: offline Bayesian optimisation of measured seconds per token, or of acceptance at a given share."""
    require("calibrate bayesian", "calibrate", "bayes_opt.acquisition", "sklearn.gaussian_process")
    from layerskip_plugin.calibrate.bayesian import search
    from layerskip_plugin.calibrate.run import TIMED_CONTEXT, Run
    from layerskip_plugin.selection.bit_search import BitSearch

    with Run("bayesian", locals()) as run:
        calibrated, size = run.model, None if share is None else run.size(share)
        sample = run.sample(tokens, prompts)
        space = BitSearch(calibrated.n_layers, calibrated.fingerprint, size=size, seed=seed)
        space.restore(run.checkpoint.steps.get("evaluated", []))
        times = calibrated.pass_times(TIMED_CONTEXT) if share is None else None

        def evaluate(skips: Sequence[SkipSet]) -> Any:
            return calibrated.scores(skips, sample)[0]

        def search_on(tick: Callable[[], object]) -> SkipSet:
            for _ in space.values:
                tick()

            def evaluated() -> None:
                tick()
                if len(space.values) % 10 == 0:
                    run.checkpoint.put("evaluated", space.state())

            return search(evaluate, space, iterations, times, evaluated)

        best = run.progress("evaluating", iterations, search_on)
        run.checkpoint.put("evaluated", space.state())
        agreement = float(evaluate([best])[0])
        best.save(out, run.about(iterations=iterations, agreement=round(agreement, 3)))
        typer.echo(f"wrote {out}: {len(best)} of {calibrated.sublayers} sublayers skipped, {agreement:.2f} agreement")


def knapsack(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    contexts: Annotated[str, typer.Option(help="Context lengths, with commas.")] = "256,1024,4096",
    tokens: TokensOption = 64,
    prompts: PromptsOption = 8,
    longest: Annotated[int, typer.Option(help="Largest draft length.")] = 10,
    survivors: SurvivorsOption = 1,
    engine: EngineOption = None,
    engine_args: EngineArgsOption = "",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """KnapSpec: the set and draft length of most tokens per time at each context length, from times measured here."""
    from freedraft.fingerprints import hardware_name
    from layerskip_plugin.calibrate.knapsack import best_choice
    from layerskip_plugin.calibrate.run import Run
    from layerskip_plugin.knapsack_search import integer_weights
    from layerskip_plugin.selection.knapsack import Plan

    try:
        lengths = sorted({int(c) for c in contexts.split(",")})
    except ValueError:
        raise ValueError(f"contexts: {contexts!r} is no list of numbers with commas") from None
    with Run("knapsack", locals() | {"contexts": lengths}) as run:
        calibrated, sample = run.model, run.sample(tokens, prompts)
        protected = run.protected(sample)
        choices, details = [], []
        for context in lengths:
            times = calibrated.pass_times(context)
            weights = integer_weights(times.attention, times.mlp)
            options = {"weights": weights, "protected": protected, "survivors": survivors}
            candidates = run.search(f"context {context}", sample, **options)
            choice = best_choice(candidates, times, longest, len(sample))
            choices.append(choice)
            baseline = 1 / times.verify(1)
            rate = round(baseline, 2)
            details.append({"context": context, "weights": list(weights), "plain_tokens_per_second": rate})
            what = f"{len(choice.skip)} skipped, draft {choice.length}" if choice.length else "plain"
            typer.echo(f"context {context}: {what}, {choice.rate / baseline:.2f} of plain expected")
        plan = Plan(tuple(lengths), tuple(choices), hardware_name(calibrated.device))
        plan.save(out, run.about(times=details, protected=protected))
        typer.echo(f"wrote {out}")


def knn(
    data: DataArgument,
    model: ModelOption,
    out: OutOption,
    share: ShareOption = None,
    tokens: TokensOption = 48,
    prompts: PromptsOption = 24,
    clusters: Annotated[
        int | None, typer.Option(help="The files are a log without labels: so many domains are found in it.")
    ] = None,
    answered: Annotated[int, typer.Option(help="Prompts of each domain that the model answers for its set.")] = 8,
    survivors: SurvivorsOption = 2,
    engine: EngineOption = None,
    engine_args: EngineArgsOption = "",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
) -> None:
    """KNN-SSD: anchors and a skip set per domain, from a file of prompts per domain, or from a log with --clusters."""
    require("calibrate knn", "calibrate", "sklearn.cluster")
    import numpy as np

    from layerskip_plugin.calibrate import knn as offline
    from layerskip_plugin.calibrate.knapsack import protected_sublayers
    from layerskip_plugin.calibrate.prompts import Prompts, encode
    from layerskip_plugin.calibrate.run import Run
    from layerskip_plugin.selection.knn import ALL_DOMAINS

    with Run("knn", locals()) as run:
        calibrated, size = run.model, None if share is None else run.size(share)

        def last_states(texts: Sequence[str]) -> Any:
            def read(tick: Callable[[], object]) -> Any:
                rows = []
                for text in texts:
                    rows.append(calibrated.read(encode(run.tokenizer, text)).final[-1].float().numpy(force=True))
                    tick()
                return np.stack(rows)

            return run.progress("reading", len(texts), read)

        if clusters is None:
            parts = [Prompts(p.texts[:prompts], p.name, p.sha256) for p in run.prompts]
            if len({p.name for p in parts}) < len(parts):
                raise ValueError("data: two files have the same name, and it names the domain; rename one")
            offline.require_prompts({p.name: len(p.texts) for p in parts})
            hidden = [last_states(p.texts) for p in parts]
        else:
            log = [text for p in run.prompts for text in p.texts]
            log = [log[i] for i in np.random.default_rng(seed).permutation(len(log))[: prompts * clusters]]
            states = last_states(log)
            members = offline.clusters(states, clusters, seed)
            hidden = [states[m] for m in members]
            parts = [Prompts([log[i] for i in m], f"cluster {n}", "") for n, m in enumerate(members, 1)]

        def best_set(name: str, answers: list[Answered]) -> list[int]:
            sample = run.sample_of(answers, tokens)
            options = {"max_weight": size, "protected": protected_sublayers(calibrated, sample), "survivors": survivors}
            found = run.search(f"set of {name}", sample, **options)
            best = found[-1] if size is not None else run.fastest(found, len(sample))[0]
            return list(best.skip.sublayers)

        answers = [run.answers(domain, min(answered, len(domain.texts))) for domain in parts]
        answers.append([a for part in answers for a in part])
        names = [domain.name for domain in parts]
        sets = [
            calibrated.skip(run.checkpoint.step(f"set {name}", partial(best_set, name, part)))
            for name, part in zip([*names, ALL_DOMAINS], answers, strict=True)
        ]
        domains = offline.fit(hidden, names, sets, seed=seed)
        domains.save(out, run.about())
        correct = [(domains.route(h) == i).mean() for i, h in enumerate(hidden)]
        typer.echo(
            f"wrote {out}: {len(names)} domains, {len(domains.anchors)} anchors; "
            f"{np.mean(correct):.0%} of these prompts find their domain"
        )


def disco(
    records: Annotated[Path, typer.Argument(help='Recorded verifications (.npz): the option "record" of the engines.')],
    out: OutOption,
    draft_pass: Annotated[
        float | None, typer.Option(min=0.0, help="Time of a draft pass in plain steps; default: as recorded.")
    ] = None,
    query_token: Annotated[
        float | None, typer.Option(min=0.0, help="Of a further token in verification; default: as recorded.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """DISCO: train the classifier that says when to stop drafting; refused when a plain threshold, a fixed length or no
    drafting does as well, in tokens per time."""
    require("calibrate disco", "calibrate", "sklearn.neural_network")
    from layerskip_plugin.lookahead.disco import Prices, train
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


def inspect(
    file: Annotated[Path, typer.Argument(help="What calibrate skip-set, bayesian, knn or knapsack wrote.")],
) -> None:
    """Show the skip sets in a file: retained, skipped attention and skipped MLP, layer by layer."""
    from layerskip_plugin.calibrate.report import load_sets

    sets, about = load_sets(file)
    for name, skip in sets.items():
        typer.echo(f"{name}: {len(skip)} of {2 * skip.n_layers} sublayers skipped ({skip.share:.0%})")
        for kind, bits in (("attention", skip.bits[::2]), ("MLP", skip.bits[1::2])):
            typer.echo(f"  {kind:<9} {''.join('.' if bit else '#' for bit in bits)}")
    typer.echo("  (# retained, . skipped)")
    for key, value in about.items():
        typer.echo(f"{key}: {value}")
