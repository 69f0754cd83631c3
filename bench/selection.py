"""Which sublayers to skip: the searches compared on one model, without an engine.

python bench/selection.py --model build/model --data a.jsonl b.jsonl ... --json build/selection.json

Each data file is a domain (rows with "category" are split by it: pass --categories). The model (float32) answers its
prompts greedily; searches see the first prompts of each domain, figures are of the others. Parts:
agreement: top-1 agreement with the whole model at 10, 20 and 30 % of sublayers skipped, and the time of each search.
stream:    requests of several domains at mix ratios 0 to 1 (KNN-SSD, equation 8): mean accepted length M, acceptance
           alpha, expected speed M alpha / ((M - 1) c + alpha) with c the share of weights that a draft pass reads.
context:   the knapsack's set at 256 to 8k tokens of context, predicted and measured tokens per time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerskip_plugin.selection import bayesian, knapsack
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.selection.host_model import HostModel, Sample, Text
from layerskip_plugin.selection.knapsack import Candidate, tokens_per_time
from layerskip_plugin.selection.knn import Domains, fit
from layerskip_plugin.selection.latency import blank, hardware, measure, seconds
from layerskip_plugin.selection.swift import WINDOW, Swift
from layerskip_plugin.selection.texts import Answered, Prompts, answer, encode, load_tokenizer
from layerskip_plugin.skip_set import SkipSet

SHARES = (0.1, 0.2, 0.3)
MIX = (0.0, 0.3, 0.7, 1.0)
DRAFT = 5


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


def sample_of(host: HostModel, answers: Sequence[Answered], tokens: int, seed: int) -> Sample:
    tokens = min(tokens, sum(len(a.tokens) - a.prompt for a in answers))
    return Sample.spread(host, [a.tokens for a in answers], tokens, [a.prompt for a in answers], seed)


def weight_share(host: HostModel, skip: SkipSet) -> float:
    """Weights that a draft pass reads, of those that a whole pass reads; the head included."""
    sizes = [
        sum(p.numel() for p in part.parameters()) for layer in host.layers for part in (layer.self_attn, layer.mlp)
    ]
    kept = sum(size for size, gone in zip(sizes, skip.bits, strict=True) if not gone)
    head = host.head.weight.numel()
    return (kept + head) / (sum(sizes) + head)


def swift_over(host: HostModel, answers: Sequence[Answered], size: int, kept: Sequence[int], seed: int) -> SkipSet:
    """SWIFT's search while these answers go by, a window of its newest tokens at a time, until it is settled."""
    windows = [Sample.newest(host, a.tokens, WINDOW) for a in answers if len(a.tokens) - a.prompt >= WINDOW]
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


def agreement(host: HostModel, learn: list[Answered], held: list[Answered], options: argparse.Namespace) -> list[dict]:
    """One row per share: held-out agreement and search seconds of every search."""
    seed = options.seed
    sample = sample_of(host, learn, options.tokens, seed + 1)
    test = sample_of(host, held, options.held_out, seed + 2)
    start = time.perf_counter()
    single = host.scores([host.skip([i]) for i in range(host.sublayers)], sample)[0]
    singles = time.perf_counter() - start
    kept = sorted(np.flatnonzero(single < knapsack.PROTECT).tolist())
    print(f"protected: {kept} ({singles:.1f} s)", flush=True)
    sizes = [round(share * host.sublayers) for share in SHARES]
    found: dict[str, tuple[list[SkipSet], list[float]]] = {}

    for survivors in (1, options.survivors):
        start = time.perf_counter()
        by: dict[int, Candidate] = {
            c.weight: c for c in knapsack.search(host, sample, most=max(sizes), kept=kept, survivors=survivors)
        }
        # One search gives the sets of every size.
        taken = time.perf_counter() - start
        found[f"knapsack, {survivors} per weight"] = [by[n].skip for n in sizes], [singles + taken] * len(sizes)
    ranked = np.argsort(-single, kind="stable")
    found["ranked by single skip"] = [host.skip(ranked[:n].tolist()) for n in sizes], [singles] * len(sizes)
    spaces = [BitSearch(host.n_layers, host.fingerprint, kept, n, seed) for n in sizes]
    found["uniform"] = [space.uniform() for space in spaces], [0.0] * len(sizes)
    for name in ("best of random", "bayesian (Self-SD)", "swift"):
        sets, took = [], []
        for size, space in zip(sizes, spaces, strict=True):
            start = time.perf_counter()
            if name == "swift":
                sets.append(swift_over(host, learn, size, kept, seed))
            elif name == "best of random":
                drawn = [space.random() for _ in range(options.iterations)]
                sets.append(drawn[int(np.argmax(host.scores(drawn, sample)[0]))])
            else:
                sets.append(bayesian.search(lambda s: host.scores(s, sample)[0], space, options.iterations))
            took.append(time.perf_counter() - start + singles)
        found[name] = sets, took
        print(f"{name}: {', '.join(f'{t:.1f} s' for t in took)}", flush=True)
    rows = []
    for name, (sets, took) in found.items():
        scores, cosine = host.scores(sets, test)
        row = {"search": name, "held_out_tokens": len(test), "calibration_tokens": len(sample)}
        for share, skip, score, cos, t in zip(SHARES, sets, scores, cosine, took, strict=True):
            row[f"{share:.0%}"] = {
                "agreement": round(float(score), 4),
                "cosine": round(float(cos), 4),
                "seconds": round(t, 2),
                "sublayers": list(skip.sublayers),
            }
        rows.append(row)
        print(f"{name:<26} {'  '.join(f'{s:.3f}' for s in scores)}", flush=True)
    return rows


class Drafts:
    """Acceptance of fixed-length drafts on held-out answers, measured once per (answer, set)."""

    def __init__(self, host: HostModel, most: int) -> None:
        self.host, self.most = host, most
        self.texts: dict[int, Text] = {}
        self.known: dict[tuple[int, SkipSet], tuple[int, int, int]] = {}

    def __call__(self, number: int, one: Answered, skip: SkipSet) -> tuple[int, int, int]:
        """(rounds, tokens judged, tokens accepted) of drafting the whole answer."""
        key = (number, skip)
        if key not in self.known:
            tokens = one.tokens[: one.prompt + self.most]
            text = self.texts.setdefault(number, self.host.read(tokens))
            drafts, _, _ = self.host.chains(skip, text, one.prompt, DRAFT)
            answer = np.array(tokens[one.prompt :])
            rounds = judged = accepted = place = 0
            while place + 1 < len(answer):
                truth = answer[place + 1 : place + 1 + DRAFT]
                right = int(np.cumprod(drafts[place][: len(truth)] == truth).sum())
                rounds, judged, accepted = rounds + 1, judged + min(right + 1, len(truth)), accepted + right
                place += right + 1
            self.known[key] = rounds, judged, accepted
        return self.known[key]


def stream(
    host: HostModel,
    tokenizer: Any,
    domains: dict[str, list[str]],
    learn: dict[str, list[Answered]],
    held: dict[str, list[Answered]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Table 2 of KNN-SSD on this model, and the accuracy of routing."""
    seed, size, names = options.seed, round(0.2 * host.sublayers), list(domains)
    sets: dict[str, SkipSet] = {}
    everything = [a for part in learn.values() for a in part]
    kept = sorted(knapsack.protected(host, sample_of(host, everything, options.tokens, seed)))

    def searched(answers: Sequence[Answered]) -> SkipSet:
        sample = sample_of(host, answers, max(knapsack.FEWEST_TOKENS, options.tokens), seed)
        return knapsack.search(host, sample, most=size, kept=kept, survivors=options.survivors)[-1].skip

    for name in names:
        sets[name] = searched(learn[name])
    mixed = searched(everything)

    def hidden(texts: Sequence[str]) -> Any:
        return np.stack([host.read(encode(tokenizer, t, 256)).final[-1].numpy(force=True) for t in texts])

    n_learn, n_held = len(learn[names[0]]), len(held[names[0]])
    anchors: Domains = fit(
        [hidden(domains[n][n_learn + n_held :][:20] + domains[n][:n_learn]) for n in names],
        names,
        [*(sets[n] for n in names), mixed],
    )
    states = [hidden(domains[n][n_learn : n_learn + n_held]) for n in names]
    routed = [anchors.route(h) for h in states]
    accuracy = float(np.mean([(r == i).mean() for i, r in enumerate(routed)]))
    print(f"routing of held-out prompts: {accuracy:.0%}", flush=True)
    drafts, rng = Drafts(host, options.answer), np.random.default_rng(seed)
    table: dict[str, Any] = {"routing_accuracy": accuracy, "draft_length": DRAFT, "skipped": size, "rows": []}
    for ratio in MIX:
        domain, order = int(rng.integers(len(names))), []
        for _ in range(options.requests):
            order.append((domain, int(rng.integers(n_held))))
            if rng.random() < ratio:
                domain = int(rng.choice([d for d in range(len(names)) if d != domain]))
        # Ratio 0 is "task by task": every domain in turn.
        if ratio == 0:
            order = [(i * len(names) // options.requests, p) for i, (_, p) in enumerate(order)]
        window: list[Sample] = []
        swift = Swift(
            host.n_layers, lambda s, w=window: host.scores(s, w[0])[0], host.fingerprint, 0.2, kept, seed=seed
        )
        sums: dict[str, Any] = defaultdict(lambda: np.zeros(3))
        for d, p in order:
            one, number = held[names[d]][p], d * 1000 + p
            choices = {
                "static, first domain": sets[names[order[0][0]]],
                "static, mixed": mixed,
                "swift": swift.incumbent,
                "knn": anchors.sets[routed[d][p]],
            }
            for method, skip in choices.items():
                sums[method] += drafts(number, one, skip)
            window[:] = [Sample.newest(host, one.tokens[: one.prompt + options.answer], WINDOW)]
            swift.step(options.swift_seconds)
        for method, (rounds, judged, accepted) in sums.items():
            m, alpha = 1 + accepted / rounds, accepted / judged
            c = weight_share(host, mixed)
            row = {"mix": ratio, "selection": method, "M": m, "alpha": alpha, "c": c}
            row["expected_speed"] = m * alpha / ((m - 1) * c + alpha)
            table["rows"].append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(
                f"mix {ratio}  {method:<22} M {m:.2f}  alpha {alpha:.3f}  speed {row['expected_speed']:.3f}", flush=True
            )
    return table


def context(host: HostModel, learn: list[Answered], options: argparse.Namespace) -> dict[str, Any]:
    """The best drafting set by context length: predicted and measured tokens per time, and their correlation."""
    sample = sample_of(host, learn, options.tokens, options.seed + 1)
    kept = sorted(knapsack.protected(host, sample))
    rows = []
    for length in options.contexts:
        times = measure(host, length)
        weights = knapsack.integer_weights(times.attention, times.mlp)
        candidates = [c for c in knapsack.search(host, sample, weights, kept=kept) if len(c.skip)]
        rates = {
            (c.skip, d): tokens_per_time(c.agreement, times.draft(c.skip), times.verify, d)
            for c in candidates
            for d in range(1, 11)
        }
        (skip, d), predicted = max(rates.items(), key=lambda item: item[1])
        alpha = next(c.agreement for c in candidates if c.skip == skip)
        place = Sample([blank(host, length)], [torch.tensor([length - 1])])
        many = Sample(place.texts, [torch.full((d + 1,), length - 1)])

        def forward(skip: SkipSet, sample: Sample) -> None:
            h = torch.randn(1, len(sample), sample.texts[0].final.shape[1])
            for i, gone in enumerate(skip.bits):
                if not gone:
                    h = host.sublayer(i, h, sample)
            host.best(host.norm(h))

        step = seconds(lambda s=skip, p=place: forward(s, p), 5)
        whole = seconds(lambda p=many: forward(host.empty(), p), 5)
        plain = seconds(lambda p=place: forward(host.empty(), p), 5)
        measured = sum(alpha**i for i in range(d + 1)) / (d * step + whole)
        row = {
            "context": length,
            "weights": list(weights),
            "attention_skipped": len(skip.attention),
            "mlp_skipped": len(skip.mlp),
            "draft_length": d,
            "agreement": round(alpha, 3),
            "predicted": round(predicted, 3),
            "measured": round(measured, 3),
            "plain": round(1 / plain, 3),
        }
        rows.append(row)
        print(row, flush=True)
    r = float(np.corrcoef([x["predicted"] for x in rows], [x["measured"] for x in rows])[0, 1])
    print(f"correlation of predicted and measured tokens per time: {r:.3f}")
    return {"rows": rows, "correlation": round(r, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--categories", nargs="*", default=[], help="split files with categories into these domains")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default="agreement,stream,context")
    parser.add_argument("--prompts", type=int, default=6, help="prompts per domain that searches see")
    parser.add_argument("--held", type=int, default=6, help="held-out prompts per domain")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--tokens", type=int, default=64, help="calibration tokens")
    parser.add_argument("--held-out", type=int, default=1000, help="tokens that agreement is measured on")
    parser.add_argument("--iterations", type=int, default=100, help="of random and Bayesian search")
    parser.add_argument("--survivors", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="in each stream")
    parser.add_argument("--swift-seconds", type=float, default=0.5, help="search time after each request")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8000])
    parser.add_argument("--answers", type=Path, help="keep the model's answers in this file, and take them from there")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    host, tokenizer = HostModel.load(options.model), load_tokenizer(options.model)
    domains = read_domains(options.data, options.categories)
    learn: dict[str, list[Answered]] = {}
    held: dict[str, list[Answered]] = {}
    known = json.loads(options.answers.read_text()) if options.answers and options.answers.is_file() else {}
    for name, texts in domains.items():
        wanted = texts[: options.prompts + options.held]
        if len(known.get(name, [])) < len(wanted):
            start = time.perf_counter()
            made = answer(host, tokenizer, wanted, options.answer, 256, batch=12)
            known[name] = [[a.prompt, a.tokens] for a in made]
            print(f"answers of {name}: {time.perf_counter() - start:.0f} s", flush=True)
            if options.answers:
                options.answers.write_text(json.dumps(known))
        answers = [Answered(t[: p + options.answer], p) for p, t in known[name][: len(wanted)]]
        learn[name], held[name] = answers[: options.prompts], answers[options.prompts :]
    result: dict[str, Any] = {"hardware": hardware(), "model": options.model.name, "domains": list(domains)}
    everything, rest = ([a for part in parts.values() for a in part] for parts in (learn, held))
    parts = {
        "agreement": lambda: agreement(host, everything, rest, options),
        "stream": lambda: stream(host, tokenizer, domains, learn, held, options),
        "context": lambda: context(host, everything, options),
    }
    for part in options.parts.split(","):
        start = time.perf_counter()
        result[part] = parts[part]()
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
