"""Which sublayers to skip, on streams of requests of several domains: the ways to choose compared, without an engine.

python bench/selection.py --model build/model --data a.jsonl b.jsonl ... --json build/selection.json

Each data file is a domain (rows with "category" are split by it: pass --categories). The model (float32) answers its
prompts greedily; searches see the first prompts of each domain, figures are of the others, at mix ratios 0 to 1
(KNN-SSD, equation 8): mean accepted length M, alpha as accepted over all draft tokens, expected speed
M alpha / ((M - 1) c + alpha) with c the share of weights that a draft pass reads (for n draft tokens the same as
M / (n c + 1)); plain decoding beside it.

"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.draft_chains import draft_chains, sample_of, weight_share
from bench.lib.machine import rounded
from bench.lib.results import write_json
from freedraft.fingerprints import hardware_name as hardware
from layerskip_plugin.calibrate import knapsack
from layerskip_plugin.calibrate.host_model import HostModel, Sample, Text
from layerskip_plugin.calibrate.knn import fit
from layerskip_plugin.calibrate.prompts import Answered, Prompts, answer, encode, load_tokenizer
from layerskip_plugin.pass_times import tokens_per_time
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.selection.online_search import WINDOW, Swift
from layerskip_plugin.skip_set import SkipSet

MIX = (0.0, 0.3, 0.7, 1.0)
DRAFT, SEED = 5, 0
Answers = dict[str, list[Answered]]


def read_domains(paths: Sequence[Path], categories: Sequence[str]) -> dict[str, list[str]]:
    """Prompts by domain: one per file, or one per wanted category in files that have them."""
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


def rounds_of(host: HostModel, skip: SkipSet, text: Text, prompt: int, length: int) -> tuple[int, int, int]:
    """Rounds, tokens drafted and tokens accepted of drafting a whole answer, `length` tokens each time."""
    drafts, _, _ = draft_chains(host, skip, text, prompt, length)
    answer = text.tokens.numpy()[prompt:]
    rounds = accepted = place = 0
    while place + 1 < len(answer):
        truth = answer[place + 1 : place + 1 + length]
        right = int(np.cumprod(drafts[place][: len(truth)] == truth).sum())
        rounds, accepted = rounds + 1, accepted + right
        place += right + 1
    return rounds, rounds * length, accepted  # passes behind a rejected token take as long as others


def stream(
    host: HostModel, domains: dict[str, list[str]], learn: Answers, held: Answers, options: Any
) -> dict[str, Any]:
    """Table 2 of KNN-SSD on this model, and the accuracy of routing."""
    size, names = round(options.share * host.sublayers), list(domains)
    everything, tokenizer = [a for part in learn.values() for a in part], load_tokenizer(options.model)
    sample = sample_of(host, everything, options.tokens, SEED)
    kept = sorted(knapsack.protected_sublayers(host, sample))

    def searched(answers: Sequence[Answered]) -> list[tuple[SkipSet, float]]:
        part = sample_of(host, answers, max(knapsack.MIN_TOKENS, options.tokens), SEED)
        found = knapsack.search(host, part, max_weight=size, protected=kept, survivors=options.survivors)
        return [(c.skip, c.agreement) for c in found]

    sets = {name: searched(learn[name])[-1][0] for name in names}
    found = searched(everything)
    mixed = found[-1][0]
    # KnapSpec's own choice of set and length, by the share of weights that its passes read.
    rates = {
        (skip, d): tokens_per_time(score, weight_share(host, skip), lambda n: 1.0, d)
        for skip, score in found
        if len(skip)
        for d in range(1, 11)
    }
    (chosen, length), expected = max(rates.items(), key=lambda item: item[1])
    n_learn, n_held = len(learn[names[0]]), len(held[names[0]])
    behind = [*(sets[n] for n in names), mixed]

    def hidden(texts: Sequence[str]) -> Any:
        return np.stack([host.read(encode(tokenizer, t, 256)).final[-1].numpy(force=True) for t in texts])

    known = [hidden(domains[n][n_learn + n_held :][:20] + domains[n][:n_learn]) for n in names]
    anchors: Domains = fit(known, names, behind)
    routed = [anchors.route(hidden(domains[n][n_learn : n_learn + n_held])).tolist() for n in names]
    accuracy = float(np.mean([np.mean(np.array(r) == i) for i, r in enumerate(routed)]))
    tested = [one for name in names for one in held[name]]
    texts = [host.read(one.tokens[: one.prompt + options.answer]) for one in tested]

    @cache
    def rounds(number: int, skip: SkipSet, length: int) -> tuple[int, int, int]:
        return rounds_of(host, skip, texts[number], tested[number].prompt, length)

    def searching(order: Sequence[tuple[int, int]]) -> list[SkipSet]:
        """SWIFT's incumbent at each request; one batch of candidates is scored on the newest tokens of each."""
        newest: Sample
        scores = lambda skips: host.scores(skips, newest)[0]  # noqa: E731
        swift, used = Swift(host.n_layers, scores, host.fingerprint, options.share, kept, seed=SEED), []
        for d, p in order:
            one = held[names[d]][p]
            used.append(swift.incumbent)
            newest = host.newest(one.tokens[: one.prompt + options.answer], WINDOW)
            swift.step()
        return used

    rng, rows = np.random.default_rng(SEED), []
    for ratio in MIX:
        domain, order = int(rng.integers(len(names))), []
        for _ in range(options.requests):
            order.append((domain, int(rng.integers(n_held))))
            if rng.random() < ratio:
                domain = int(rng.choice([d for d in range(len(names)) if d != domain]))
        if ratio == 0:  # "task by task": every domain in turn
            order = [(i * len(names) // options.requests, p) for i, (_, p) in enumerate(order)]
        sums: dict[str, Any] = defaultdict(lambda: np.zeros(4))
        for (d, p), incumbent in zip(order, searching(order), strict=True):
            choices = {
                "static, first domain": (sets[names[order[0][0]]], DRAFT),
                "static, mixed": (mixed, DRAFT),
                "swift": (incumbent, DRAFT),
                "knn": (behind[routed[d][p]], DRAFT),
                "knapsack": (chosen, length),
            }
            for method, (skip, far) in choices.items():
                sums[method] += [*rounds(d * n_held + p, skip, far), weight_share(host, skip)]
        rows.append({"mix": ratio, "selection": "plain", "M": 1.0, "alpha": 0.0, "c": 0.0, "expected_speed": 1.0})
        for method, (number, drafted, accepted, shares) in sums.items():
            m, alpha, c = 1 + accepted / number, accepted / drafted, shares / len(order)
            row = {"mix": ratio, "selection": method, "M": m, "alpha": alpha, "c": c}
            rows.append(row | {"expected_speed": m / (drafted / number * c + 1)})
            print(f"mix {ratio}  {method:<22} M {m:.2f}  alpha {alpha:.3f}  speed {rows[-1]['expected_speed']:.3f}")
    own = {"skipped": len(chosen), "draft_length": length, "expected_over_plain": expected}
    figures = {"routing_accuracy": accuracy, "held_out_prompts": len(names) * n_held, "draft_length": DRAFT}
    return rounded(figures | {"skipped": size, "knapsack": own, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--categories", nargs="*", default=[], help="split files with categories into these domains")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6, help="prompts per domain that searches see")
    parser.add_argument("--held", type=int, default=6, help="held-out prompts per domain")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--tokens", type=int, default=64, help="calibration tokens")
    parser.add_argument("--requests", type=int, default=40, help="in each stream")
    parser.add_argument("--share", type=float, default=0.2, help="of the sublayers skipped in the stream")
    parser.add_argument("--survivors", type=int, default=2, help="of each weight in the knapsack search")
    parser.add_argument("--name", help="of the model, in the JSON; by default its folder's")
    options = parser.parse_args()
    host, name_of_model = HostModel.load(options.model, dtype="float32"), options.name or options.model.name
    domains = read_domains(options.data, options.categories)
    tokenizer, number = load_tokenizer(options.model), options.prompts + options.held
    answers = {
        name: answer(host, tokenizer, texts[:number], options.answer, 256, batch=6) for name, texts in domains.items()
    }
    learn = {name: part[: options.prompts] for name, part in answers.items()}
    held = {name: part[options.prompts :] for name, part in answers.items()}
    figures = stream(host, domains, learn, held, options)
    entry = {"hardware": hardware(host.device), "domains": list(domains), "stream": figures}
    write_json(options.json, {name_of_model: entry}, data=options.data)


if __name__ == "__main__":
    main()
