"""Which sublayers to skip: the searches compared on one model, without an engine.

python bench/selection.py --model build/model --data a.jsonl b.jsonl ... --json build/selection.json

Each data file is a domain (rows with "category" are split by it: pass --categories). The model (float32) answers its
prompts greedily; searches see the first prompts of each domain, figures are of the others. Parts:
agreement: top-1 agreement with the whole model at 10, 20 and 30 % of sublayers skipped, and the time of each search.
stream:    requests of several domains at mix ratios 0 to 1 (KNN-SSD, equation 8): mean accepted length M, alpha as
           accepted over all draft tokens, expected speed M alpha / ((M - 1) c + alpha) with c the share of weights that
           a draft pass reads (for n draft tokens the same as M / (n c + 1)); plain decoding beside it.
context:   the knapsack's sets at 256 to 8k tokens of context: tokens per time, predicted and of passes that are timed
           (acceptance as calibrated), and plain decoding; OFF where that is faster. Wants a quiet machine.

What is finished is kept in FILE.progress beside the JSON, so that an interrupted run goes on where it was. The JSON
holds one entry per model; a second model adds its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.answers import answers_of, sample_of
from bench.lib.machine import timed
from bench.lib.results import earlier_figures, write_json
from bench.lib.selection_stream import stream
from freedraft.fingerprints import hardware_name as hardware
from layerskip_plugin.calibrate import bayesian, knapsack
from layerskip_plugin.calibrate.checkpoint import Checkpoint
from layerskip_plugin.calibrate.host_model import VERIFIED, HostModel, seconds
from layerskip_plugin.calibrate.knapsack import Candidate
from layerskip_plugin.calibrate.prompts import Answered, Prompts, load_tokenizer
from layerskip_plugin.calibrate.sample import Sample
from layerskip_plugin.knapsack_search import integer_weights
from layerskip_plugin.pass_times import PassTimes, tokens_per_time
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.selection.swift import WINDOW, Swift
from layerskip_plugin.skip_set import SkipSet

SHARES = (0.1, 0.2, 0.3)


def read_domains(paths: Sequence[Path], categories: Sequence[str]) -> dict[str, list[str]]:
    """Prompts by domain: one per file, or one per wanted category in files that have them."""
    domains: dict[str, list[str]] = {}
    for path in paths:
        prompts = Prompts.load(path)
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if categories and all("category" in row for row in rows):
            for row, text in zip(rows, prompts.texts, strict=True):
                if row["category"] in categories:
                    domains.setdefault(row["category"], []).append(text)
        else:
            domains[prompts.name] = prompts.texts
    return domains


def swift_over(host: HostModel, answers: Sequence[Answered], size: int, kept: Sequence[int], seed: int) -> SkipSet:
    """SWIFT's search while these answers go by, a window of its newest tokens at a time, until it is settled."""
    windows = [host.newest(a.tokens, WINDOW) for a in answers if len(a.tokens) - a.prompt >= WINDOW]
    calls = iter(range(10**9))

    def evaluate(skips: Sequence[SkipSet]) -> Any:
        return host.scores(skips, windows[next(calls) % len(windows)])[0]

    swift = Swift(host.n_layers, evaluate, host.fingerprint, size / host.sublayers, kept, patience=100, seed=seed)
    found, end = swift.incumbent, time.perf_counter() + 20
    # Until its ratio would move: the figures are of sets of one size.
    while time.perf_counter() < end and len(swift.incumbent) == size:
        found = swift.incumbent
        swift.step(0.5)
        if not swift.searching:
            break
    return found


def agreement(
    host: HostModel, learn: list[Answered], held: dict[str, list[Answered]], options: Any, steps: Checkpoint
) -> dict[str, Any]:
    """One row per search: held-out agreement, over all domains and in each, cosine and search seconds at each share;
    how cosine and agreement of all these sets go together."""
    seed = options.seed
    sample = sample_of(host, learn, options.tokens, seed + 1)
    test = sample_of(host, [a for part in held.values() for a in part], options.held_out, seed + 2)
    of_domain = {name: sample_of(host, part, options.held_out, seed + 2) for name, part in held.items()}
    single, singles = steps.step("single", lambda: timed(lambda: single_agreement(host, sample)))
    kept = sorted(np.flatnonzero(np.array(single) < knapsack.PROTECT).tolist())
    print(f"protected: {kept} ({singles:.1f} s)", flush=True)
    sizes = [round(share * host.sublayers) for share in SHARES]

    def dynamic(survivors: int) -> list[list[int]]:
        # One search gives the sets of every size.
        found = knapsack.search(host, sample, max_weight=max(sizes), protected=kept, survivors=survivors)
        by: dict[int, Candidate] = {c.weight: c for c in found}
        return [list(by[n].skip.sublayers) for n in sizes]

    def one(name: str, size: int) -> list[int]:
        return list(searched(name, size).sublayers)

    def searched(name: str, size: int) -> SkipSet:
        space = BitSearch(host.n_layers, host.fingerprint, kept, size, seed)
        if name == "uniform":
            return space.uniform()
        if name == "swift":
            return swift_over(host, learn, size, kept, seed)
        if name == "best of random":
            drawn = [space.random() for _ in range(options.iterations)]
            return drawn[int(np.argmax(host.scores(drawn, sample)[0]))]
        return bayesian.search(lambda s: host.scores(s, sample)[0], space, options.iterations)

    def held_out(sets: list[list[int]]) -> list[list[float]]:
        return [x.tolist() for x in host.scores([host.skip(one) for one in sets], test)]

    def by_domain_of(sets: list[list[int]]) -> dict[str, list[float]]:
        skips = [host.skip(one) for one in sets]
        return {d: host.scores(skips, part)[0].tolist() for d, part in of_domain.items()}

    results: dict[str, tuple[list[list[int]], list[float]]] = {}
    for survivors in (1, options.survivors):
        sets, took = steps.step(f"knapsack {survivors}", partial(timed, partial(dynamic, survivors)))
        results[f"knapsack, {survivors} per weight"] = sets, [singles + took] * len(sizes)
    ranked = np.argsort(-np.array(single), kind="stable")
    results["ranked by single skip"] = [ranked[:n].tolist() for n in sizes], [singles] * len(sizes)
    for name in ("uniform", "best of random", "bayesian (Self-SD)", "swift"):
        pairs = [steps.step(f"{name} {size}", partial(timed, partial(one, name, size))) for size in sizes]
        results[name] = [p[0] for p in pairs], [p[1] + singles for p in pairs]
    rows = []
    for name, (sets, took) in results.items():
        scores, cosine = steps.step(f"held out {name}", partial(held_out, sets))
        by_domain = steps.step(f"held out {name}, by domain", partial(by_domain_of, sets))
        row: dict[str, Any] = {"search": name, "held_out_tokens": len(test), "calibration_tokens": len(sample)}
        for i, (share, skip, score, cos, t) in enumerate(zip(SHARES, sets, scores, cosine, took, strict=True)):
            figures = {"agreement": round(score, 4), "cosine": round(cos, 4), "seconds": round(t, 2)}
            figures["by_domain"] = {d: round(part[i], 4) for d, part in by_domain.items()}
            row[f"{share:.0%}"] = figures | {"sublayers": sorted(skip)}
        rows.append(row)
        print(f"{name:<26} {'  '.join(f'{s:.3f}' for s in scores)}", flush=True)
    both = [(row[f"{share:.0%}"]["cosine"], row[f"{share:.0%}"]["agreement"]) for row in rows for share in SHARES]
    return {"rows": rows, "correlation_with_cosine": round(float(np.corrcoef(np.array(both).T)[0, 1]), 4)}


def single_agreement(host: HostModel, sample: Sample) -> list[float]:
    return host.scores([host.skip([i]) for i in range(host.sublayers)], sample)[0].tolist()


def context(host: HostModel, learn: list[Answered], options: argparse.Namespace, steps: Checkpoint) -> dict[str, Any]:
    """Sets by context length: predicted and measured tokens per time, and their correlation."""
    sample = sample_of(host, learn, options.tokens, options.seed + 1)
    rows: list[dict[str, Any]] = []
    points: list[tuple[float, float]] = []
    for length in options.contexts:
        times = pass_times(steps.step(f"times at {length}", partial(timed_passes, host, length)))
        kept = steps.step("kept", lambda: sorted(knapsack.protected_sublayers(host, sample)))
        weights = integer_weights(times.attention, times.mlp)
        candidates = steps.step(
            f"sets of weights {weights}",
            partial(candidates_of, host, sample, weights, kept),
        )
        tried = [(host.skip(skip), agreement) for skip, agreement in candidates if skip]
        rates = {
            (i, d): tokens_per_time(agreement, times.draft(skip), times.verify, d)
            for i, (skip, agreement) in enumerate(tried)
            for d in range(1, 11)
        }
        (best, d), predicted = max(rates.items(), key=lambda item: item[1])
        # Beside the best set some of other sizes, so that more than one point per context is compared.
        others = [int(x) for x in np.linspace(0, len(tried) - 1, 4)]
        measured: dict[int, float] = {}
        for i in dict.fromkeys([best, *others]):
            skip, agreement = tried[i]
            rate = steps.step(
                f"rate at {length} of {skip.sublayers} {d}",
                partial(measured_rate, host, length, skip, d, agreement),
            )
            measured[i] = rate
            points.append((rates[i, d], rate))
        skip, agreement = tried[best]
        # The set that saves a fifth of the sublayers' time shows the weights at work where the best is too small to.
        fifth = 0.2 * host.n_layers * sum(weights)
        saving = min(tried, key=lambda one: abs(np.dot(weights, (len(one[0].attention), len(one[0].mlp))) - fifth))[0]
        row = {
            "context": length,
            "attention_ms": round(1e3 * times.attention, 3),
            "mlp_ms": round(1e3 * times.mlp, 3),
            "weights": list(weights),
            "attention_skipped": len(skip.attention),
            "mlp_skipped": len(skip.mlp),
            "a_fifth_saved": {"attention_skipped": len(saving.attention), "mlp_skipped": len(saving.mlp)},
            "draft_length": d,
            "agreement": round(agreement, 3),
            "predicted": round(predicted, 3),
            "measured": round(measured[best], 3),
            "plain": round(1 / times.verify(1), 3),
            "off": 1 / times.verify(1) >= predicted,
            "sublayers": list(skip.sublayers),
        }
        rows.append(row)
        print(row, flush=True)
    of_best = np.corrcoef([x["predicted"] for x in rows], [x["measured"] for x in rows])[0, 1]
    of_all = np.corrcoef(np.array(points).T)[0, 1]
    print(f"correlation of predicted and measured tokens per time: {of_best:.3f}; {len(points)} sets: {of_all:.3f}")
    return {
        "rows": rows,
        "correlation": round(float(of_best), 4),
        "correlation_of_all": round(float(of_all), 4),
        "points": [[round(float(x), 3) for x in point] for point in points],
    }


def candidates_of(host: HostModel, sample: Sample, weights: tuple[int, int], kept: list[int]) -> list[list[Any]]:
    """Sublayers and agreement of the best set of each weight."""
    return [
        [list(c.skip.sublayers), c.agreement] for c in knapsack.search(host, sample, weights=weights, protected=kept)
    ]


def timed_passes(host: HostModel, context: int) -> list[Any]:
    """The times of passes at a context length, as JSON keeps them."""
    times = host.pass_times(context)
    return [times.attention, times.mlp, times.head, 0.0, [times.verify(n) for n in VERIFIED]]


def pass_times(values: Sequence[Any]) -> PassTimes:
    """What `timed_passes` returned, as `PassTimes`."""
    attention, mlp, head, _, verify = values
    return PassTimes(attention, mlp, head, lambda n: float(np.interp(n, VERIFIED, verify)))


def measured_rate(host: HostModel, context: int, skip: SkipSet, length: int, acceptance: float) -> float:
    """Tokens per second of rounds of `length` passes without `skip` and a verification, timed as whole passes."""
    text = host.blank(context)
    one = Sample([text], [torch.tensor([context - 1])])
    many = Sample([text], [torch.full((length + 1,), context - 1)])

    def forward(skip: SkipSet, sample: Sample) -> None:
        h = torch.randn(1, len(sample), text.final.shape[1])
        for i, gone in enumerate(skip.bits):
            if not gone:
                h = host.sublayer(i, h, sample)
        host.best(host.norm(h))

    draft, verify = seconds(lambda: forward(skip, one), 7), seconds(lambda: forward(host.empty(), many), 7)
    return sum(acceptance**i for i in range(length + 1)) / (length * draft + verify)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--categories", nargs="*", default=[], help="split files with categories into these domains")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="agreement,stream,context")
    parser.add_argument("--prompts", type=int, default=6, help="prompts per domain that searches see")
    parser.add_argument("--held", type=int, default=6, help="held-out prompts per domain")
    parser.add_argument("--swap", action="store_true", help="search on the held-out prompts, measure on the others")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--tokens", type=int, default=64, help="calibration tokens")
    parser.add_argument("--held-out", type=int, default=1000, help="tokens that agreement is measured on")
    parser.add_argument("--iterations", type=int, default=100, help="of random and Bayesian search")
    parser.add_argument("--survivors", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="in each stream")
    parser.add_argument("--share", type=float, default=0.2, help="of the sublayers skipped in the stream")
    parser.add_argument("--stream-survivors", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--answers", type=Path, help="keep the model's answers in this file, and take them from there")
    parser.add_argument("--name", help="of the model, in the JSON; by default its folder's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    host, tokenizer = HostModel.load(options.model, dtype="float32"), load_tokenizer(options.model)
    name_of_model = options.name or options.model.name
    domains = read_domains(options.data, options.categories)
    learn: dict[str, list[Answered]] = {}
    held: dict[str, list[Answered]] = {}
    wanted = {name: texts[: options.prompts + options.held] for name, texts in domains.items()}
    for name, answers in answers_of(host, tokenizer, wanted, options.answer, options.answers).items():
        learn[name], held[name] = answers[: options.prompts], answers[options.prompts :]
        if options.swap:
            learn[name], held[name] = held[name], learn[name]
    everything = [a for part in learn.values() for a in part]
    others = ("parts", "contexts", "json", "answers", "requests", "name")
    settings = {k: v for k, v in vars(options).items() if k not in others}
    # Runs with other settings, perhaps at the same time, keep their steps elsewhere.
    mark = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:6]
    steps = Checkpoint(options.json.with_name(f"{options.json.name}.{name_of_model}.{mark}"), settings)
    parts = {
        "agreement": lambda: agreement(host, everything, held, options, steps),
        "stream": lambda: stream(host, tokenizer, domains, learn, held, options, steps),
        "context": lambda: context(host, everything, options, steps),
    }
    for part in options.parts.split(","):
        start = time.perf_counter()
        figures = parts[part]()
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
        before = earlier_figures(options.json)
        results = before or {}
        result = results.setdefault(name_of_model, {})
        key = f"agreement, {options.tokens} tokens" if part == "agreement" else part
        key += ", swapped" if options.swap else ""
        result |= {"hardware": hardware(host.device), "domains": list(domains), key: figures}
        write_json(options.json, results, data=options.data, earlier=bool(before))


if __name__ == "__main__":
    main()
