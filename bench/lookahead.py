"""Lookahead policies on recorded drafts of one model and skip set, without an engine.

python bench/lookahead.py --model build/model --skip-set configs/skip_sets/smollm2-135m-instruct-12.json \\
    --data a.jsonl b.jsonl --json build/lookahead.json

The model (float32) answers prompts greedily; drafts from every position of the answers are recorded. DISCO is trained
on the drafts of half of the answers; every policy then drafts its way through the others, with greedy verification.
Reported: F1 of "continue" against "the token was accepted", tokens per round, and tokens per time relative to plain
decoding, for draft passes that cost a share c of a whole pass (a verification pass costs 1, plus `PER_TOKEN` per
token). The first c is that of the skip set (weights read, head included); the others show what would pay elsewhere.
"oracle" drafts exactly the tokens that will be accepted, the upper bound of all policies. "decided" says for each c
whether `freedraft calibrate disco` would write the classifier, by its own test on the requests of DISCO's training.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bench.lib.draft_chains import draft_chains, weight_share
from bench.lib.machine import rounded
from bench.lib.results import write_json
from freedraft.cost.acceptance import PASS_KINDS, Acceptance
from freedraft.draft import DraftBatch
from freedraft.draft_pass import Recipe
from layerskip_plugin.calibrate.disco import Prices, train
from layerskip_plugin.calibrate.host_model import HostModel, Text
from layerskip_plugin.calibrate.prompts import Prompts, answer, load_tokenizer
from layerskip_plugin.lookahead import Confidence, Cost, Disco, DraftVerify, Fixed, Lookahead
from layerskip_plugin.lookahead.records import Verifications
from layerskip_plugin.rounds import Candidate, Outcome
from layerskip_plugin.skip_set import SkipSet

PER_TOKEN, LONGEST = 0.02, 8  # in steps, per verified token; maximum tokens of a draft
COSTS = (0.5, 0.3, 0.05)  # of a draft pass, the last as of a small draft model


class Recorded:
    """Drafts from every position of one answer. right: bool[positions, LONGEST], whether the draft is right up to and
    including each token; top: float32[positions, LONGEST, 10]; entropy: float32[positions, LONGEST]."""

    def __init__(self, host: HostModel, skip: SkipSet, text: Text, first: int) -> None:
        drafts, top, entropy = draft_chains(host, skip, text, torch.arange(first, len(text)), LONGEST)
        # The whole model's next tokens: the answer, and its choice after the last token.
        truth = np.append(text.tokens.numpy()[first + 1 :], int(text.best[-1]))
        places = len(truth) - LONGEST + 1
        self.top, self.entropy = top[:places], entropy[:places]
        ahead = np.arange(places)[:, None] + np.arange(LONGEST)
        self.right = np.cumprod(drafts[:places] == truth[ahead], 1).astype(np.bool_)

    def verifications(self, request: int) -> dict[str, NDArray[Any]]:
        """Return what an engine would have recorded with a round at every position: fields of `Verifications`."""
        at = np.nonzero(np.concatenate([np.ones((len(self.right), 1), np.bool_), self.right[:, :-1]], 1))
        place, position = (x.astype(np.int32) for x in at)
        found = {"top": self.top[at], "entropy": self.entropy[at], "position": position, "accepted": self.right[at]}
        return found | {"request": np.full(len(place), request, np.int32), "round": place}


class Heuristic(Fixed):
    """The paper's dynHeur, transformers' schedule "heuristic" (Gante 2023): two tokens more after a round that was
    accepted as a whole, else one fewer; 5 at first."""

    def __init__(self) -> None:
        super().__init__(5)

    def record_acceptance(self, outcome: Outcome) -> None:
        whole = bool((outcome.accepted == outcome.drafted).all())
        self.length = min(self.max_draft_len, self.length + 2) if whole else max(1, self.length - 1)


class Costs:
    """Fixed costs, in steps of the whole model: `c` per draft pass, PER_TOKEN per further token of a step."""

    widths, max_draft_tokens = None, LONGEST

    def __init__(self, c: float) -> None:
        self.c, self.acceptance = c, Acceptance()

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        return 1 + PER_TOKEN * (np.asarray(query_tokens, np.float64) - 1)

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        return np.full(np.shape(batch), self.c)

    def learn_round(self, confidence: NDArray[np.float32], accepted: int) -> None:
        """Learn from a chain drafted with these probabilities, as a controller does; its tokens are all 1."""
        length = len(confidence)
        draft = DraftBatch.empty(1, length + 1)
        draft.tokens[:], draft.counts[:] = 1, length + 1
        draft.parents[:], draft.depths[:] = np.arange(-1, length), np.arange(length + 1)
        draft.scores[0, 0], draft.scores[0, 1:] = 1.0, np.cumprod(confidence)
        draft.kinds[:] = PASS_KINDS
        gained = np.append(np.ones(accepted, np.int32), np.int32(0))
        ends = np.array([len(gained)], np.int64)
        self.acceptance.learn(draft, draft.counts, np.zeros(1, np.int32), gained, ends - len(gained), ends)


def walk(policy: Lookahead, skip: SkipSet, recorded: list[Recorded]) -> tuple[float, Any, Any]:
    """Draft through all answers in turn; return F1 of the decisions, and drafted and accepted tokens of every round."""
    rounds, hits, predicted, actual = list[tuple[int, int]](), 0, 0, 0
    row = np.zeros(1, np.int32)
    for number, one in enumerate(recorded):
        place, name = 0, [str(number)]
        while place < len(one.right):
            policy.choose([Candidate(skip, 1, 1)], 1, 300.0)
            if isinstance(policy, Cost) and policy.recipe_of_round() is None:
                rounds.append((0, 0))
                place += 1
                continue
            policy.begin(name, skip, LONGEST)
            length, more = 0, True
            while more:
                top = one.top[place, length][None, : policy.needs_top]
                entropy = one.entropy[place, length][None] if policy.needs_entropy else None
                more = bool(policy.should_continue(length, row, top, entropy)[0])
                good = bool(one.right[place, length])
                length += 1
                # After the last allowed token there is no decision.
                if length < LONGEST and (length == 1 or one.right[place, length - 2]):
                    hits, predicted, actual = hits + (more and good), predicted + more, actual + good
            right = int(one.right[place, :length].sum())
            made, kept = np.array([length], np.int32), np.array([right], np.int32)
            top, entropy = one.top[place, None], one.entropy[place, None]
            policy.record_acceptance(Outcome(skip, name, made, made, kept, kept, top, entropy))
            if isinstance(policy, Cost):
                policy.costs.learn_round(one.top[place, :length, 0], right)  # type: ignore[attr-defined]
            rounds.append((length, right))
            place += right + 1
        policy.finish(*name)
    return 2 * hits / max(1, predicted + actual), *np.array(rounds).T


def oracle(recorded: list[Recorded]) -> tuple[float, Any, Any]:
    """Return what `walk` does, of rounds that draft exactly the tokens that will be accepted."""
    lengths = []
    for one in recorded:
        place = 0
        while place < len(one.right):
            lengths.append(int(one.right[place].sum()))
            place += lengths[-1] + 1
    return 1.0, np.array(lengths), np.array(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--skip-set", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=12, help="prompts per file; half of them train DISCO")
    options = parser.parse_args()
    host, tokenizer = HostModel.load(options.model, dtype="float32"), load_tokenizer(options.model)
    skip = SkipSet.load(options.skip_set, host.n_layers, host.fingerprint)
    learn, held = [], []
    for prompts in map(Prompts.load, options.data):
        answers = answer(host, tokenizer, prompts.texts[: options.prompts], 64, 256, batch=12)
        long = [one for one in answers if len(one.tokens) - one.prompt > LONGEST]
        recorded = [Recorded(host, skip, host.read(one.tokens), one.prompt) for one in long]
        learn += recorded[::2]
        held += recorded[1::2]
    parts = [one.verifications(i) for i, one in enumerate(learn)]
    fields: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    records = Verifications(**fields, model=host.fingerprint)
    rows, decided = [], {}
    for c in (round(weight_share(host, skip), 3), *COSTS):
        classifier, compared = train(records, Prices(c, PER_TOKEN))
        decided[str(c)] = rounded(vars(compared) | {"better": compared.better})
        known: Any = Costs(c)  # as of a controller
        policies: dict[str, Callable[[], Lookahead]] = {f"fixed {n}": partial(Fixed, n) for n in (1, 2, 3, 5, LONGEST)}
        policies |= {"confidence 0.7": partial(Confidence, 0.7), "Draft & Verify": DraftVerify}
        policies |= {"dynHeur": Heuristic, "DISCO": partial(Disco, classifier), "cost": partial(Cost, known, [skip])}
        walks = {name: partial(walk, make(), skip) for name, make in policies.items()} | {"oracle": oracle}
        for name, run in walks.items():
            f1, drafted, accepted = run(held)
            seconds = float((c * drafted + 1 + PER_TOKEN * drafted).sum())
            row = {"c": c, "policy": name, "f1": f1, "tokens_per_round": 1 + float(accepted.mean())}
            row |= {"drafted_per_round": float(drafted.mean()), "length_deviation": float(drafted.std())}
            rows.append(rounded(row | {"tokens_per_time": float((1 + accepted).sum() / seconds)}))
            print(rows[-1], flush=True)
    about = {"model": options.model.name, "skip_set": options.skip_set.name}
    results = about | {"trained_on": len(records), "decided": decided, "rows": rows}
    write_json(options.json, results, data=options.data)


if __name__ == "__main__":
    main()
