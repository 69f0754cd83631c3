"""Ways to choose the sublayers to skip, on streams of requests of several domains, without an engine.

python bench/selection.py --model build/model --data a.jsonl b.jsonl ... --json build/selection.json

Each data file is a domain (rows with "category" are split by it: pass --categories). The model (float32) answers its
prompts greedily; searches see the first prompts of each domain, figures are of the others, by mix ratio
(KNN-SSD, equation 8): mean accepted length M, alpha, the accepted share of draft tokens, and expected speed M alpha /
((M - 1) c + alpha), with c the share of weights that a draft pass reads (for n draft tokens the same as M / (n c + 1));
next to plain decoding.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.lib.draft_chains import draft_chains, sample_of, weight_share
from bench.lib.machine import rounded
from bench.lib.results import write_json
from layerskip_plugin.calibrate import knapsack
from layerskip_plugin.calibrate.host_model import HostModel, Sample, Text
from layerskip_plugin.calibrate.knn import fit
from layerskip_plugin.calibrate.prompts import Answered, Prompts, answer, encode, load_tokenizer
from layerskip_plugin.pass_times import tokens_per_time
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.selection.online_search import Swift
from layerskip_plugin.skip_set import SkipSet

MIX = (0.0, 0.3, 0.7, 1.0)  # as in the paper
DRAFT, ANSWER, SEED = 5, 64, 0
Answers = dict[str, list[Answered]]


def read_domains(paths: Sequence[Path], categories: Sequence[str]) -> dict[str, list[str]]:
    """Return prompts by domain: one per file, or one per wanted category in files with categories."""
    domains: dict[str, list[str]] = {}
    for path in paths:
        prompts = Prompts.load(path)
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        split = categories and all("category" in row for row in rows)
        for row, text in zip(rows, prompts.texts, strict=True):
            name = row["category"] if split else prompts.name
            if not split or name in categories:
                domains.setdefault(name, []).append(text)
    return domains


class Sets(NamedTuple):
    """Skip sets that the searches found."""

    by_domain: dict[str, SkipSet]
    mixed: SkipSet
    knapsack: SkipSet
    length: int  # draft length of `knapsack`
    expected: float  # speed over plain, as KnapSpec estimates it
    kept: list[int]  # sublayers that no set may skip


def search(host: HostModel, learn: Answers, options: argparse.Namespace) -> Sets:
    everything = [a for part in learn.values() for a in part]
    kept = sorted(knapsack.protected_sublayers(host, sample_of(host, everything, options.tokens, SEED)))
    most = {"max_weight": round(options.share * host.sublayers), "survivors": options.survivors}

    def searched(answers: Sequence[Answered]) -> list[tuple[SkipSet, float]]:
        part = sample_of(host, answers, max(knapsack.MIN_TOKENS, options.tokens), SEED)
        return [(c.skip, c.agreement) for c in knapsack.search(host, part, protected=kept, **most)]

    found = searched(everything)
    # KnapSpec's own choice of set and length, by the share of weights that its passes read.
    rates = {
        (skip, d): tokens_per_time(score, weight_share(host, skip), lambda n: 1.0, d)
        for skip, score in found
        if len(skip)
        for d in range(1, 11)
    }
    (chosen, length), expected = max(rates.items(), key=lambda item: item[1])
    by_domain = {name: searched(answers)[-1][0] for name, answers in learn.items()}
    return Sets(by_domain, found[-1][0], chosen, length, expected, kept)


def rounds_of(host: HostModel, skip: SkipSet, text: Text, prompt: int, length: int) -> tuple[int, int, int]:
    """Return rounds, drafted tokens and accepted tokens of drafting a whole answer, `length` tokens per round."""
    drafts, _, _ = draft_chains(host, skip, text, torch.arange(prompt, len(text)), length)
    answer = text.tokens.numpy()[prompt:]
    rounds = accepted = place = 0
    while place + 1 < len(answer):
        truth = answer[place + 1 : place + 1 + length]
        right = int(np.cumprod(drafts[place][: len(truth)] == truth).sum())
        rounds, accepted = rounds + 1, accepted + right
        place += right + 1
    return rounds, rounds * length, accepted  # passes after a rejected token take as long as others


def routing(host: HostModel, domains: dict[str, list[str]], sets: Sets, options: argparse.Namespace) -> list[list[int]]:
    """Return by domain where KNN-SSD routes each held-out prompt: the index of a domain, or of the mixed set after
    them."""
    tokenizer, first, last = load_tokenizer(options.model), options.prompts, options.prompts + options.held

    def hidden(texts: Sequence[str]) -> Any:
        return np.stack([host.read(encode(tokenizer, t, 256)).final[-1].numpy(force=True) for t in texts])

    known = [hidden(texts[last:][:20] + texts[:first]) for texts in domains.values()]
    anchors: Domains = fit(known, list(domains), [*sets.by_domain.values(), sets.mixed])
    return [anchors.route(hidden(texts[first:last])).tolist() for texts in domains.values()]


def orders(domains: int, options: argparse.Namespace) -> dict[float, list[tuple[int, int]]]:
    """Return (domain, prompt) of each request of a stream, by mix ratio."""
    rng, found = np.random.default_rng(SEED), {}
    for ratio in options.mix:
        domain, order = int(rng.integers(domains)), []
        for _ in range(options.requests):
            order.append((domain, int(rng.integers(options.held))))
            if rng.random() < ratio:
                domain = int(rng.choice([d for d in range(domains) if d != domain]))
        if ratio == 0:  # "task by task": every domain in turn
            order = [(i * domains // options.requests, p) for i, (_, p) in enumerate(order)]
        found[ratio] = order
    return found


def stream(host: HostModel, domains: dict[str, list[str]], answers: Answers, options: Any) -> dict[str, Any]:
    """Compute table 2 of KNN-SSD on this model, and the accuracy of routing."""
    sets = search(host, {name: part[: options.prompts] for name, part in answers.items()}, options)
    held = [part[options.prompts :] for part in answers.values()]
    texts = [[host.read(one.tokens[: one.prompt + ANSWER]) for one in part] for part in held]
    routed = routing(host, domains, sets, options)
    behind = [*sets.by_domain.values(), sets.mixed]

    @cache
    def rounds(d: int, p: int, skip: SkipSet, length: int) -> tuple[int, int, int]:
        return rounds_of(host, skip, texts[d][p], held[d][p].prompt, length)

    def searching(order: Sequence[tuple[int, int]]) -> list[SkipSet]:
        """Return SWIFT's incumbent at each request; one batch of candidates is scored on the newest tokens of each."""
        newest: Sample
        scores = lambda skips: host.scores(skips, newest)[0]  # noqa: E731
        swift, used = Swift(host.n_layers, scores, host.fingerprint, options.share, sets.kept, SEED), []
        for d, p in order:
            used.append(swift.incumbent)
            read = held[d][p].tokens[: held[d][p].prompt + ANSWER]
            newest = host.sample([read], Swift.window, [len(read) - Swift.window])
            swift.step()
        return used

    rows = []
    for ratio, order in orders(len(held), options).items():
        sums: dict[str, Any] = defaultdict(lambda: np.zeros(4))
        for (d, p), incumbent in zip(order, searching(order), strict=True):
            choices = {
                "static, first domain": (behind[order[0][0]], DRAFT),
                "static, mixed": (sets.mixed, DRAFT),
                "swift": (incumbent, DRAFT),
                "knn": (behind[routed[d][p]], DRAFT),
                "knapsack": (sets.knapsack, sets.length),
            }
            for method, (skip, length) in choices.items():
                sums[method] += [*rounds(d, p, skip, length), weight_share(host, skip)]
        rows.append({"mix": ratio, "selection": "plain", "M": 1.0, "alpha": 0.0, "c": 0.0, "expected_speed": 1.0})
        for method, of_method in sums.items():
            number, drafted, accepted, shares = of_method.tolist()
            m, alpha, c = 1 + accepted / number, accepted / drafted, shares / len(order)
            row = {"mix": ratio, "selection": method, "M": m, "alpha": alpha, "c": c}
            rows.append(row | {"expected_speed": m / (drafted / number * c + 1)})
            print(rounded(rows[-1]), flush=True)
    accuracy = float(np.mean([np.mean(np.array(r) == i) for i, r in enumerate(routed)]))
    own = {"skipped": len(sets.knapsack), "draft_length": sets.length, "expected_over_plain": sets.expected}
    figures: dict[str, Any] = {
        "routing_accuracy": accuracy,
        "held_out_prompts": sum(map(len, held)),
        "draft_length": DRAFT,
    }
    figures |= {"skipped": round(options.share * host.sublayers), "knapsack": own, "rows": rows}
    return rounded(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--categories", nargs="*", default=[], help="split files with categories into these domains")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6, help="prompts per domain that searches see")
    parser.add_argument("--held", type=int, default=6, help="held-out prompts per domain")
    parser.add_argument("--tokens", type=int, default=64, help="calibration tokens")
    parser.add_argument("--requests", type=int, default=40, help="number in each stream")
    parser.add_argument("--mix", type=float, nargs="+", default=MIX, help="ratios")
    parser.add_argument("--share", type=float, default=0.2, help="of sublayers that are skipped in the stream")
    parser.add_argument("--survivors", type=int, default=2, help="per weight in the knapsack search")
    options = parser.parse_args()
    host, tokenizer = HostModel.load(options.model, dtype="float32"), load_tokenizer(options.model)
    domains, number = read_domains(options.data, options.categories), options.prompts + options.held
    answers = {name: answer(host, tokenizer, texts[:number], ANSWER, 256, batch=6) for name, texts in domains.items()}
    entry = {"domains": list(domains), "stream": stream(host, domains, answers, options)}
    write_json(options.json, {options.model.name: entry}, data=options.data)


if __name__ == "__main__":
    main()
