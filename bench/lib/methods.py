"""Ways to choose the sublayers to skip, served by one engine: searches, and arms that answer the same prompts in
turns."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib.deep_model import least
from bench.lib.engine import Run, VllmEngine
from bench.lib.prompts import BY_KIND, chats
from bench.lib.servers import in_process_environment
from layerskip_plugin.calibrate.prompts import Prompts
from layerskip_plugin.lookahead import Confidence, Fixed, Lookahead
from layerskip_plugin.selection.base import Selection, Static
from layerskip_plugin.selection.knn import Domains, Knn
from layerskip_plugin.selection.online_search import SCORED_TOGETHER, Swift
from layerskip_plugin.skip_set import SkipSet

SWIFT_K, SWIFT_THRESHOLD = 25, 0.8  # N_D of the paper's appendix B.2; its epsilon, as Draft & Verify has it
SEARCHES: dict[str, dict[str, Any]] = {
    "SWIFT": {},
    "random search only": {"search_bayesian": 0},
    "no stop score": {"search_stop_score": 1.0},
}
TEMPERATURES = (0.0, 0.7)
LEARNT, HELD = 24, 2  # prompts of each domain that searches may read, and that the arms answer
Arms = dict[str, tuple[Selection, Lookahead]]


def row(baseline: list[Run], drafting: list[Run], batch: int) -> dict[str, Any]:
    """Return the figures of one batch size. A step lasts from the end of one call to the start of the next."""
    plain_speed, speed = (sum(r.decoded for r in runs) / sum(r.seconds for r in runs) for runs in (baseline, drafting))
    pairs = [b.speed / a.speed for a, b in zip(baseline, drafting, strict=True)]
    result: dict[str, Any] = {"batch": batch, "plain_tokens_per_second": plain_speed, "tokens_per_second": speed}
    result |= {"ratio": median(pairs), "ratio_quarters": np.quantile(pairs, (0.25, 0.75)).tolist()}
    result["ratio_spread"] = [min(pairs), max(pairs)]
    result["same"] = all(a.tokens == b.tokens for a, b in zip(baseline, drafting, strict=True))
    plain = median(b.began - a.ended for run in baseline for a, b in pairwise(run.calls) if a.batch == batch)
    steps = [(a, b) for run in drafting for a, b in pairwise(run.calls) if a.ids == b.ids]
    full = [(a, b) for a, b in steps if a.batch == batch and any(a.drafted)]
    result |= {"plain_ms": 1e3 * plain, "turns": len(pairs), "drafting_share": len(full) / len(steps)}
    drafted = sum(sum(a.drafted) for a, _ in steps)
    if drafted:
        accepted = sum(sum(b.gained) - b.batch for _, b in steps)
        rows = sum(a.batch for a, _ in steps)
        m, alpha, drafts = 1 + accepted / rows, accepted / drafted, drafted / rows
        c = median((a.ended - a.began) / max(a.drafted) for a, _ in full) / plain
        formula = m / (drafts * c + 1)  # as M alpha / ((M - 1) c + alpha), but also where nothing is accepted
        result |= {"M": m, "alpha": alpha, "drafts": drafts, "c": c}
        result["verify"] = median(b.began - a.ended for a, b in full) / plain
        result |= {"formula": formula, "share_of_formula": result["ratio"] / formula}
    return result


def started(args: argparse.Namespace) -> VllmEngine:
    """Start vLLM as part "swift" needs it, uncompiled, with the first passes timed."""
    options = {"method": "layerskip", "num_speculative_tokens": SWIFT_K, "selection": "swift", "search_share": 0.5}
    options |= {"lookahead": "confidence", "threshold": SWIFT_THRESHOLD, "skip_ratio": args.skip_ratio[0]}
    engine = VllmEngine(args.model, options, requests=SCORED_TOGETHER + 1, eager=True)
    for on in (False, True):
        engine.generate(chats(args.model, BY_KIND[:1]), args.tokens, drafting=on)
    return engine


def fresh(method: Any, changes: dict[str, Any]) -> Any:
    """A search with these options, at its uniform set."""
    options, config = method.options.model_copy(update=changes), method.context.hf_config
    return options.make_selection(config, method._matchness, None, method._propose, method._pass_times)


def search(
    engine: VllmEngine, prompts: list[list[int]], args: argparse.Namespace, changes: dict[str, Any]
) -> tuple[SkipSet, dict[str, Any]]:
    """Serve `prompts` in turns until a search with these options ends, or until it has taken `args.seconds` of the
    processor. Return the set that it found, and its figures."""
    method, spent = engine.method, [0.0]
    found = fresh(method, changes)
    step = found.step

    def timed() -> bool:
        began = time.process_time()
        changed = step()
        spent.append(time.process_time() - began)
        return bool(changed)

    found.step = timed
    draft_with(method, found, Confidence(SWIFT_THRESHOLD))
    began, curve = time.perf_counter(), []
    for prompt in cycle(prompts):
        engine.generate([prompt], max(args.tokens, 2 * found.window), drafting=True)  # shorter answers are not read
        curve.append([found.candidates, found.matchness])
        if not found.searching or sum(spent) > args.seconds:
            break
    figures = {"candidates": found.candidates, "ended": not found.searching, "matchness": found.matchness}
    figures |= {"search_seconds": sum(spent), "seconds": time.perf_counter() - began, "by_answer": curve}
    return found.incumbent, figures


def draft_with(method: Any, selection: Selection, lookahead: Lookahead) -> None:
    method.selection, method.lookahead = selection, lookahead
    method.needs_prompt_states = selection.needs_prompt_states
    method.recipes.use(selection.sets.values())
    method.draft_passes.clear()
    for skip in selection.sets.values():
        method.build(skip, optimize=False)


def in_turns(
    engine: VllmEngine, prompts: Sequence[list[int]], arms: Arms, args: argparse.Namespace, temperature: float = 0.0
) -> dict[str, list[Run]]:
    """Return the answers of "plain" and of each arm to all prompts, in the order of the prompts."""
    runs: dict[str, list[Run]] = {arm: [] for arm in ("plain", *arms)}
    for turn in range(args.rounds):
        for seed, prompt in enumerate(prompts):
            for arm in list(runs)[:: 1 if turn % 2 == 0 else -1]:
                on = arm != "plain"
                if on:
                    draft_with(engine.method, *arms[arm])
                run = engine.generate([prompt], args.tokens, drafting=on, temperature=temperature, seed=seed)
                runs[arm].append(run)
    return runs


def swift(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each search and of each arm."""
    engine, prompts = started(args), chats(args.model, BY_KIND)
    uniform = fresh(engine.method, {}).incumbent  # the engine's own search has begun
    searches: dict[str, tuple[SkipSet, dict[str, Any]]] = {}
    for name, changes in SEARCHES.items():
        if name != "no stop score" or searches["SWIFT"][1]["matchness"] > Swift.stop_score:  # else it is the same
            searches[name] = search(engine, prompts[::2], args, changes)
    sets = {name: found for name, (found, _) in searches.items()}
    sets |= {"no early stop": sets["SWIFT"], "no search": uniform, "least scales": least(args.model, len(uniform))}
    arms: Arms = {name: (Static({"": skip}), Confidence(SWIFT_THRESHOLD)) for name, skip in sets.items()}
    arms["no early stop"] = (arms["SWIFT"][0], Fixed(SWIFT_K))
    runs = in_turns(engine, prompts[1::2], arms, args)
    rows = [{"arm": arm} | row(runs["plain"], runs[arm], 1) for arm in arms]
    figures = {name: figures for name, (_, figures) in searches.items()}
    return {"skip_ratio": args.skip_ratio[0], "skipped": len(uniform), "rows": rows, "searches": figures}


def calibrate(command: str, args: argparse.Namespace) -> tuple[Path, subprocess.Popen[bytes]]:
    """Start `freedraft calibrate` for this share of sublayers; return the file that it will write."""
    out = args.model / f"{command}-{args.skip_ratio[0]}.json"
    call = [sys.executable, "-m", "freedraft.cli", "calibrate", command, *args.data, "--model", args.model]
    call += ["--out", out, "--share", args.skip_ratio[0], "--device", "cpu"]
    return out, subprocess.Popen(list(map(str, call)), env=in_process_environment(), stdout=sys.stderr)


def seconds_of(process: subprocess.Popen[bytes]) -> float:
    """Wait for the end of a process; return its processor seconds."""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("freedraft calibrate failed")
    return usage.ru_utime + usage.ru_stime


def methods(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each method, greedy and sampled, for all prompts and by domain."""
    (of_knn, knn), (of_self_sd, self_sd) = calibrate("knn", args), calibrate("bayesian", args)
    texts = [Prompts.load(path).texts for path in args.data]
    learnt = [text for pair in zip(*(part[:LEARNT] for part in texts), strict=True) for text in pair]
    prompts = chats(args.model, [text for part in texts for text in part[LEARNT : LEARNT + HELD]])
    engine = started(args)
    read = chats(args.model, learnt)
    searches = {"SWIFT": search(engine, read, args, {})}
    searches["KnapSpec"] = search(engine, read, args, {"selection": "knapsack"})
    seconds = {"KNN-SSD": seconds_of(knn), "Self-SD": seconds_of(self_sd)}
    domains = Domains.load(of_knn)
    sets = {name: found for name, (found, _) in searches.items()}
    sets |= {"Self-SD": SkipSet.load(of_self_sd), "one set": domains.sets[-1]}
    exchanged = replace(domains, sets=(*domains.sets[-2::-1], domains.sets[-1]))
    selections: dict[str, Selection] = {name: Static({"": skip}) for name, skip in sets.items()}
    selections |= {"KNN-SSD": Knn(domains), "KNN-SSD, sets exchanged": Knn(exchanged)}
    arms: Arms = {name: (selection, Confidence(SWIFT_THRESHOLD)) for name, selection in selections.items()}
    rows = []
    for temperature in TEMPERATURES:
        runs = in_turns(engine, prompts, arms, args, temperature)
        for arm, selection in selections.items():
            skipped = float(np.mean([len(skip) for skip in selection.sets.values()]))
            figures = {"arm": arm, "temperature": temperature, "skipped": skipped} | row(runs["plain"], runs[arm], 1)
            for number, name in enumerate(domains.names):
                own = [i for i in range(len(runs[arm])) if i // HELD % len(texts) == number]
                figures[name] = row([runs["plain"][i] for i in own], [runs[arm][i] for i in own], 1)
            rows.append(figures)
    result = {"skip_ratio": args.skip_ratio[0], "sublayers": 2 * domains.sets[0].n_layers, "rows": rows}
    result["searches"] = {name: figures for name, (_, figures) in searches.items()}
    return result | {"calibration_seconds": seconds, "domains": list(domains.names)}
