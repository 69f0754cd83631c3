"""Requests of several domains in one stream: which skip set each way to select gives them, and what that is worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.lib.answers import sample_of, weight_share
from bench.lib.draft_chains import draft_chains
from bench.lib.machine import timed
from layerskip_plugin.calibrate import knapsack
from layerskip_plugin.calibrate.checkpoint import Checkpoint
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.knn import fit
from layerskip_plugin.calibrate.prompts import Answered, encode
from layerskip_plugin.calibrate.sample import Sample, Text
from layerskip_plugin.pass_times import tokens_per_time
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.selection.swift import WINDOW, Swift
from layerskip_plugin.skip_set import SkipSet

MIX = (0.0, 0.3, 0.7, 1.0)
DRAFT = 5
Answers = dict[str, list[Answered]]


class Drafts:
    """Acceptance of fixed-length drafts on held-out answers, measured once per (answer, set, length)."""

    def __init__(self, host: HostModel, max_tokens: int, steps: Checkpoint) -> None:
        self.host, self.max_tokens, self.steps = host, max_tokens, steps
        self.texts: dict[int, Text] = {}

    def __call__(self, number: int, one: Answered, skip: SkipSet, length: int = DRAFT) -> list[int]:
        """[rounds, tokens drafted, tokens accepted] of drafting the whole answer."""
        key = f"rounds {number} {length} {','.join(map(str, skip.sublayers))}"
        return self.steps.step(key, lambda: self._count(number, one, skip, length))

    def _count(self, number: int, one: Answered, skip: SkipSet, length: int) -> list[int]:
        tokens = one.tokens[: one.prompt + self.max_tokens]
        if number not in self.texts:
            self.texts[number] = self.host.read(tokens)
        drafts, _, _ = draft_chains(self.host, skip, self.texts[number], one.prompt, length)
        answer = np.array(tokens[one.prompt :])
        rounds = accepted = place = 0
        while place + 1 < len(answer):
            truth = answer[place + 1 : place + 1 + length]
            right = int(np.cumprod(drafts[place][: len(truth)] == truth).sum())
            rounds, accepted = rounds + 1, accepted + right
            place += right + 1
        return [rounds, rounds * length, accepted]  # passes behind a rejected token take as long as others


def stream(
    host: HostModel, tokenizer: Any, domains: dict[str, list[str]], learn: Answers, held: Answers, options: Any,
    steps: Checkpoint,
) -> dict[str, Any]:  # fmt: skip
    """Table 2 of KNN-SSD on this model, and the accuracy of routing."""
    seed, size, names = options.seed, round(options.share * host.sublayers), list(domains)
    everything = [a for part in learn.values() for a in part]
    sample = sample_of(host, everything, options.tokens, seed)
    kept = steps.step("protected", lambda: sorted(knapsack.protected_sublayers(host, sample)))

    def searched(answers: Sequence[Answered]) -> list[list[Any]]:
        part = sample_of(host, answers, max(knapsack.MIN_TOKENS, options.tokens), seed)
        found = knapsack.search(host, part, max_weight=size, protected=kept, survivors=options.stream_survivors)
        return [[list(c.skip.sublayers), c.agreement] for c in found]

    def set_of(name: str, answers: Sequence[Answered]) -> list[list[Any]]:
        found, took = steps.step(f"set of {name}", lambda: timed(lambda: searched(answers)))
        print(f"set of {name}: {took:.0f} s, agreement {found[-1][1]:.2f}", flush=True)
        return found

    sets = {name: host.skip(set_of(name, learn[name])[-1][0]) for name in names}
    found = set_of("all domains", everything)
    mixed = host.skip(found[-1][0])
    # KnapSpec's own choice of set and length, by the share of weights that its passes read.
    rates = {
        (i, d): tokens_per_time(agreement, weight_share(host, host.skip(skip)), lambda n: 1.0, d)
        for i, (skip, agreement) in enumerate(found)
        if skip
        for d in range(1, 11)
    }
    (best, length), expected = max(rates.items(), key=lambda item: item[1])
    chosen = host.skip(found[best][0])

    n_learn, n_held = len(learn[names[0]]), len(held[names[0]])

    def route() -> list[list[int]]:
        def hidden(texts: Sequence[str]) -> Any:
            return np.stack([host.read(encode(tokenizer, t, 256)).final[-1].numpy(force=True) for t in texts])

        anchors: Domains = fit(
            [hidden(domains[n][n_learn + n_held :][:20] + domains[n][:n_learn]) for n in names],
            names,
            [*(sets[n] for n in names), mixed],
        )
        return [anchors.route(hidden(domains[n][n_learn : n_learn + n_held])).tolist() for n in names]

    routed = steps.step("routed", route)
    accuracy = float(np.mean([np.mean(np.array(r) == i) for i, r in enumerate(routed)]))
    print(f"routing of held-out prompts: {accuracy:.0%}", flush=True)
    behind = [*(sets[n] for n in names), mixed]
    drafts, rng = Drafts(host, options.answer, steps), np.random.default_rng(seed)
    table: dict[str, Any] = {
        "routing_accuracy": round(accuracy, 4),
        "held_out_prompts": len(names) * n_held,
        "draft_length": DRAFT,
        "skipped": size,
        "knapsack": {"skipped": len(chosen), "draft_length": length, "expected_over_plain": round(expected, 4)},
        "rows": [],
    }
    for ratio in MIX:
        domain, order = int(rng.integers(len(names))), []
        for _ in range(options.requests):
            order.append((domain, int(rng.integers(n_held))))
            if rng.random() < ratio:
                domain = int(rng.choice([d for d in range(len(names)) if d != domain]))
        # Ratio 0 is "task by task": every domain in turn.
        if ratio == 0:
            order = [(i * len(names) // options.requests, p) for i, (_, p) in enumerate(order)]

        def searching(order: Sequence[tuple[int, int]] = order) -> list[list[int]]:
            """SWIFT's incumbent at each request; one batch of candidates is scored on the newest tokens of each."""
            window: list[Sample] = []
            swift = Swift(
                host.n_layers, lambda s: host.scores(s, window[0])[0], host.fingerprint, options.share, kept, seed=seed
            )
            used = []
            for d, p in order:
                one = held[names[d]][p]
                used.append(list(swift.incumbent.sublayers))
                window[:] = [host.newest(one.tokens[: one.prompt + options.answer], WINDOW)]
                swift.step(1e9, max_batches=1)
            return used

        by_swift = steps.step(f"swift {ratio}", searching)
        sums: dict[str, Any] = defaultdict(lambda: np.zeros(4))
        for (d, p), incumbent in zip(order, by_swift, strict=True):
            one, number = held[names[d]][p], d * 1000 + p
            choices = {
                "static, first domain": (sets[names[order[0][0]]], DRAFT),
                "static, mixed": (mixed, DRAFT),
                "swift": (host.skip(incumbent), DRAFT),
                "knn": (behind[routed[d][p]], DRAFT),
                "knapsack": (chosen, length),
            }
            for method, (skip, far) in choices.items():
                sums[method] += [*drafts(number, one, skip, far), weight_share(host, skip)]
        table["rows"].append(
            {"mix": ratio, "selection": "plain", "M": 1.0, "alpha": 0.0, "c": 0.0, "expected_speed": 1.0}
        )
        for method, (rounds, drafted, accepted, shares) in sums.items():
            m, alpha, c = 1 + accepted / rounds, accepted / drafted, shares / len(order)
            row = {"mix": ratio, "selection": method, "M": m, "alpha": alpha, "c": c}
            row["expected_speed"] = m / (drafted / rounds * c + 1)
            table["rows"].append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(
                f"mix {ratio}  {method:<22} M {m:.2f}  alpha {alpha:.3f}  speed {row['expected_speed']:.3f}", flush=True
            )
    return table
