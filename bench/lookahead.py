"""How far to draft: the lookahead policies on recorded drafts of one model and skip set, without an engine.

python bench/lookahead.py --model build/model --skip-set configs/skip_sets/smollm2-135m-instruct-12.json \\
    --data a.jsonl b.jsonl --json build/lookahead.json

The model (float32) answers prompts greedily; drafts from every place of the answers are recorded. DISCO is trained on
the drafts of one part of the answers; every policy then drafts its way through the others, verified greedily. Reported:
F1 of "go on" against "the token was accepted", tokens per round, and tokens per time in units of plain decoding, for
draft passes that cost a share c of a whole pass (a verify pass costs 1, a token in it `PER_TOKEN` more). The c of the
skip set itself (weights read, head included) is the first one; the others show what would pay elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.answers import answers_of, weight_share
from bench.lib.draft_chains import draft_chains
from bench.lib.machine import rounded
from bench.lib.results import write_json
from freedraft.cost.acceptance import PASS_KINDS, Acceptance
from freedraft.draft import DraftBatch
from freedraft.draft_pass import Recipe
from freedraft.fingerprints import hardware_name as hardware
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.prompts import Answered, Prompts, load_tokenizer
from layerskip_plugin.lookahead import Confidence, Cost, Disco, DraftVerify, Fixed, Lookahead
from layerskip_plugin.lookahead.base import Candidate, Ints
from layerskip_plugin.lookahead.disco import Prices, train
from layerskip_plugin.lookahead.records import Verifications
from layerskip_plugin.skip_set import SkipSet

PER_TOKEN = 0.02


class Recorded:
    """Drafts from every place of one answer.

    Attributes:
        right: bool[places, longest], whether the draft is right up to and with each token.
        top: float32[places, longest, 10]; entropy: float32[places, longest].
    """

    def __init__(self, host: HostModel, skip: SkipSet, one: Answered, longest: int) -> None:
        text = host.read(one.tokens)
        drafts, self.top, self.entropy = draft_chains(host, skip, text, one.prompt, longest)
        # What the whole model says next: the answer, and its choice behind the last token.
        truth = np.append(text.tokens.numpy()[one.prompt + 1 :], int(text.best[-1]))
        places = len(truth) - longest + 1
        self.top, self.entropy = self.top[:places], self.entropy[:places]
        ahead = np.arange(places)[:, None] + np.arange(longest)
        self.right = np.cumprod(drafts[:places] == truth[ahead], 1).astype(np.bool_)

    def verifications(self, request: int, model: str) -> Verifications:
        """What an engine would have recorded, had a round started at every place."""
        judged = np.concatenate([np.ones((len(self.right), 1), np.bool_), self.right[:, :-1]], 1)
        place, position = np.nonzero(judged)
        at = (place, position)
        number, of_round, nth = (np.asarray(x, np.int32) for x in (np.full(len(place), request), place, position))
        return Verifications(self.top[at], self.entropy[at], nth, self.right[at], number, of_round, model)


def joined(parts: list[Verifications]) -> Verifications:
    names = ("top", "entropy", "position", "accepted", "request", "round")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
    return Verifications(**arrays, model=parts[0].model)


class Heuristic(Fixed):
    """transformers' num_assistant_tokens_schedule="heuristic" (Gante): two tokens more after a round that was accepted
    whole, else one fewer; 5 at first."""

    def __init__(self) -> None:
        super().__init__(5)

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        whole = bool((np.asarray(accepted) == np.asarray(drafted)).all())
        self.length = min(self.max_draft_len, self.length + 2) if whole else max(1, self.length - 1)


class Costs:
    """Known costs, in steps of the whole model: `c` for a draft pass, `per_token` for each further token of a step."""

    overrun = 1.0

    def __init__(self, c: float, per_token: float) -> None:
        self.c, self.per_token, self.acceptance = c, per_token, Acceptance()

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        return 1 + self.per_token * (np.asarray(query_tokens, np.float64) - 1)

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        return np.full(np.shape(batch), self.c)


def learn(acceptance: Acceptance, confidence: NDArray[np.float32], accepted: int) -> None:
    """Tell `acceptance` of a chain drafted with these probabilities, as a controller does; its tokens are all 1."""
    length = len(confidence)
    draft = DraftBatch.empty(1, length + 1)
    draft.tokens[:], draft.counts[:] = 1, length + 1
    draft.parents[:], draft.depths[:] = np.arange(-1, length), np.arange(length + 1)
    draft.scores[0, 0], draft.scores[0, 1:] = 1.0, np.cumprod(confidence)
    draft.kinds[:] = PASS_KINDS
    gained = np.append(np.ones(accepted, np.int32), np.int32(0))
    ends = np.array([len(gained)], np.int64)
    acceptance.learn(draft, draft.counts, np.zeros(1, np.int32), gained, ends - len(gained), ends)


def walk(policy: Lookahead, skip: SkipSet, recorded: list[Recorded], longest: int) -> tuple[float, Any, Any]:
    """Draft through all answers one after another; F1 of the decisions, drafted and accepted tokens of every round."""
    drafted, accepted, hits, predicted, actual = [], [], 0, 0, 0
    row = np.zeros(1, np.int32)
    for number, one in enumerate(recorded):
        place, name = 0, [str(number)]
        while place < len(one.right):
            policy.choose([Candidate(skip, 1, 1)], 1, 300.0)
            if isinstance(policy, Cost) and policy.should_draft() is None:
                drafted.append(0)
                accepted.append(0)
                place += 1
                continue
            policy.begin(name, skip, longest)
            length = 0
            while True:
                top = one.top[place, length][None, : policy.needs_top]
                entropy = one.entropy[place, length][None] if policy.needs_entropy else None
                more = bool(policy.should_continue(length, row, top, entropy)[0])
                length += 1
                good = bool(one.right[place, length - 1])
                # The last token allowed is no decision.
                if length < longest and (length == 1 or one.right[place, length - 2]):
                    hits, predicted, actual = hits + (more and good), predicted + more, actual + good
                if not more:
                    break
            right = int(one.right[place, :length].sum())
            kept = np.array([right], np.int32)
            policy.record_acceptance(name, np.array([length], np.int32), kept, kept)
            if isinstance(policy, Cost):
                learn(policy.costs.acceptance, one.top[place, :length, 0], right)
            drafted.append(length)
            accepted.append(right)
            place += right + 1
        policy.finish(name)
    return 2 * hits / max(1, predicted + actual), np.array(drafted), np.array(accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--skip-set", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=12, help="prompts per file; half of them train DISCO")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--answers", type=Path, help="keep the model's answers in this file, and take them from there")
    options = parser.parse_args()
    host, tokenizer = HostModel.load(options.model, dtype="float32"), load_tokenizer(options.model)
    skip = SkipSet.load(options.skip_set, host.n_layers, host.fingerprint)
    learn, held = [], []
    texts = {prompts.name: prompts.texts[: options.prompts] for prompts in map(Prompts.load, options.data)}
    for answers in answers_of(host, tokenizer, texts, options.answer, options.answers, group=12).values():
        long = [one for one in answers if len(one.tokens) - one.prompt > options.longest]
        recorded = [Recorded(host, skip, one, options.longest) for one in long]
        learn += recorded[::2]
        held += recorded[1::2]
    records = joined([one.verifications(i, host.fingerprint) for i, one in enumerate(learn)])
    costs = [round(weight_share(host, skip), 3), 0.5, 0.3]
    rows = []
    for c in costs:
        classifier, _ = train(records, Prices(c, PER_TOKEN))
        policies: dict[str, Callable[[], Lookahead]] = {
            **{f"fixed {n}": lambda n=n: Fixed(n) for n in (1, 2, 3, 5, options.longest)},  # type: ignore[misc]
            "confidence 0.7": lambda: Confidence(0.7),
            "Draft & Verify": DraftVerify,
            "transformers, heuristic": Heuristic,
            "DISCO": lambda classifier=classifier: Disco(classifier),  # type: ignore[misc]
            "cost": lambda c=c: Cost(Costs(c, PER_TOKEN), [skip]),  # type: ignore[misc]
        }
        for name, make in policies.items():
            f1, drafted, accepted = walk(make(), skip, held, options.longest)
            seconds = float((c * drafted + 1 + PER_TOKEN * drafted).sum())
            row = {"c": c, "policy": name, "f1": f1, "tokens_per_round": 1 + float(accepted.mean())}
            rows.append(rounded(row | {"tokens_per_time": float((1 + accepted).sum() / seconds)}))
            print(rows[-1], flush=True)
    if options.json:
        about = {"hardware": hardware(), "model": options.model.name, "skip_set": options.skip_set.name}
        result = about | {"trained_on": len(records), "rows": rows}
        write_json(options.json, result, data=options.data)


if __name__ == "__main__":
    main()
