"""Ways to train DISCO's classifier on one model and skip set, and its transfer between domains, without an engine.

python bench/disco.py --model build/model --skip-set configs/skip_sets/smollm2-135m-instruct-12.json \\
    --data a.jsonl b.jsonl --json build/disco.json

Each data file is a domain. Drafts from every position of the model's greedy answers are recorded, as in
bench/lookahead.py. A quarter of the answers trains classifiers, the next one chooses threshold and longest draft by
tokens per time, and every rule drafts its way through the other half, with greedy verification; a draft pass costs c
plain steps.
"training": records of "verification" are the tokens that an engine would have judged; "target's text" is one draft
token at every position (section 4 of the paper), labelled by agreement, or by 1 minus the total variation distance of
the two distributions; position is that in the draft, or in the answer (appendix D.1). "more" is the gain over records
of verification with the position in the draft, which `freedraft calibrate disco` trains on, with its standard error by
bootstrap over answers.
"transfer": trained and chosen on one domain, drafting in another.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.lib.machine import rounded
from bench.lib.results import write_json
from bench.lookahead import COSTS, LONGEST, PER_TOKEN, Recorded, walk
from layerskip_plugin.calibrate.disco import Prices, Rounds, Rule, fit
from layerskip_plugin.calibrate.host_model import HostModel, Sample
from layerskip_plugin.calibrate.prompts import Answered, Prompts, answer, load_tokenizer
from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.lookahead.disco import features
from layerskip_plugin.lookahead.records import TOP, Verifications
from layerskip_plugin.rounds import Flags, Floats, Ints, Outcome
from layerskip_plugin.skip_set import SkipSet

SEED, DRAWS = 0, 4  # labels drawn per token with probability 1 - TV
Score = Callable[[Floats, Floats, Any, Any], Floats]  # of top, entropy, place in the draft, and of the draft


class Training(NamedTuple):
    target_text: bool
    distances: bool  # as labels
    in_answer: bool  # the position


OURS = "verification, place in the draft"
TRAININGS = {
    OURS: Training(target_text=False, distances=False, in_answer=False),
    "verification, place in the answer": Training(target_text=False, distances=False, in_answer=True),
    "target's text, agreement": Training(target_text=True, distances=False, in_answer=True),
    "target's text, total variation": Training(target_text=True, distances=True, in_answer=True),
}


class Drafts(Recorded):
    """Recorded drafts, and for every position the total variation distance of its first draft token."""

    def __init__(self, host: HostModel, skip: SkipSet, one: Answered) -> None:
        text = host.read(one.tokens, torch.arange(one.prompt, len(one.tokens) + 1 - LONGEST))
        super().__init__(host, skip, text, one.prompt)
        drafted = host.final_states([skip], Sample([text]))[0]
        draft, whole = (host.head(states).softmax(-1) for states in (drafted, text.final[text.kept]))
        self.distance = ((draft - whole).abs().sum(-1) / 2).numpy(force=True)


def verified(parts: Sequence[Drafts]) -> dict[str, Any]:
    found = [one.verifications(i) for i, one in enumerate(parts)]
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def target_text(parts: Sequence[Drafts], distances: bool) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    agree = np.concatenate([one.right[:, 0] for one in parts])
    found: dict[str, Any] = {"top": np.concatenate([one.top[:, 0] for one in parts])}
    found["entropy"] = np.concatenate([one.entropy[:, 0] for one in parts])
    found["round"] = np.concatenate([np.arange(len(one.right), dtype=np.int32) for one in parts])
    found["position"] = np.zeros_like(found["round"])
    found["request"] = np.repeat(np.arange(len(parts), dtype=np.int32), [len(one.right) for one in parts])
    if not distances:
        return found | {"accepted": agree}
    found = {name: np.concatenate([array] * DRAWS) for name, array in found.items()}
    likely = 1 - np.concatenate([one.distance for one in parts] * DRAWS)
    return found | {"accepted": rng.random(len(likely)) < likely}


def trained(name: str, parts: Sequence[Drafts]) -> Score:
    """Return the probability of acceptance by a classifier trained in this way."""
    way = TRAININGS[name]
    fields = target_text(parts, way.distances) if way.target_text else verified(parts)
    if way.in_answer:
        fields["position"] = fields["position"] + fields["round"]
    network = fit(Verifications(**fields), SEED)

    def score(top: Floats, entropy: Floats, position: Any, place: Any) -> Floats:
        at = np.broadcast_to(position + place * way.in_answer, entropy.shape).astype(np.int32)
        return network.probability(features(top, entropy, at))

    return score


def confidence(top: Floats, entropy: Floats, position: Any, place: Any) -> Floats:
    return top[:, 0]


def fixed(top: Floats, entropy: Floats, position: Any, place: Any) -> Floats:
    return np.ones(len(top), np.float32)


class Scored(Lookahead):
    """Go on by a rule about a score."""

    needs_top, needs_entropy = TOP, True

    def __init__(self, score: Score, chosen: Sequence[Drafts], c: float) -> None:
        fields = verified(chosen)
        records = Verifications(**fields)
        scores = score(records.top, records.entropy, records.position, records.round)
        self.score, self.place = score, 0
        self.rule: Rule = Rounds(records).best_rule(scores, Prices(c, PER_TOKEN))

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        assert entropy is not None
        more = position + 1 < min(self.max_draft_len, self.rule.max_length)
        return (self.score(top, entropy, position, self.place) >= self.rule.threshold) & more

    def record_acceptance(self, outcome: Outcome) -> None:
        self.place += int(outcome.accepted[0]) + 1

    def finish(self, request_id: str) -> None:
        self.place = 0


def drafted(policy: Scored, skip: SkipSet, held: Sequence[Drafts], c: float) -> tuple[float, Any]:
    """Return F1, and float64[2, answers] tokens and steps."""
    f1, _, _ = walk(policy, skip, [*held])
    sums = []
    for one in held:
        _, made, accepted = walk(policy, skip, [one])
        sums.append((float((1 + accepted).sum()), float((1 + (c + PER_TOKEN) * made).sum())))
    return f1, np.array(sums).T


def training(parts: dict[str, list[Drafts]], skip: SkipSet) -> list[dict[str, Any]]:
    learn, chosen, held = ([one for part in parts.values() for one in part[i::4]] for i in (0, 1, 2))
    held += [one for part in parts.values() for one in part[3::4]]
    scores: dict[str, Score] = {name: trained(name, learn) for name in TRAININGS}
    scores |= {"confidence": confidence, "fixed length": fixed}
    rows = []
    draws = np.random.default_rng(SEED).integers(0, len(held), (400, len(held)))
    for c in COSTS:
        ours: Any = None
        for name, score in scores.items():
            policy = Scored(score, chosen, c)
            f1, sums = drafted(policy, skip, held, c)
            ours = sums if name == OURS else ours
            rate, base = (np.divide(*each.sum(1)) for each in (sums, ours))
            spread = [np.divide(*each[:, draws].sum(2)) for each in (sums, ours)]
            row = {"c": c, "training": name, "f1": f1, "tokens_per_time": float(rate), "more": float(rate - base)}
            row |= {"error": float((spread[0] - spread[1]).std()), "max_length": policy.rule.max_length}
            rows.append(rounded(row))
            print(rows[-1], flush=True)
    return rows


def transfer(parts: dict[str, list[Drafts]], skip: SkipSet, c: float) -> list[dict[str, Any]]:
    rows = []
    for source, known in parts.items():
        scores: dict[str, Score] = {
            "DISCO": trained(OURS, known[0::4]),
            "confidence": confidence,
            "fixed length": fixed,
        }
        for target, part in parts.items():
            row: dict[str, Any] = {"c": c, "trained_on": source, "on": target}
            for name, score in scores.items():
                _, sums = drafted(Scored(score, known[1::4], c), skip, part[2::4] + part[3::4], c)
                row[name] = float(np.divide(*sums.sum(1)))
            rows.append(rounded(row))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--skip-set", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=12, help="per file")
    options = parser.parse_args()
    host, tokenizer = HostModel.load(options.model, dtype="float32"), load_tokenizer(options.model)
    skip = SkipSet.load(options.skip_set, host.n_layers, host.fingerprint)
    parts = {}
    for prompts in map(Prompts.load, options.data):
        answers = answer(host, tokenizer, prompts.texts[: options.prompts], 64, 192, batch=12)
        long = [one for one in answers if len(one.tokens) - one.prompt > LONGEST]
        parts[prompts.name] = list(map(partial(Drafts, host, skip), long))
    results = {"model": options.model.name, "skip_set": options.skip_set.name, "training": training(parts, skip)}
    write_json(options.json, results | {"transfer": transfer(parts, skip, 0.3)}, data=options.data)


if __name__ == "__main__":
    main()
