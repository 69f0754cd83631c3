"""N-grams on top of a trained drafter ("head"), by simulation: tokens per step, and speed at known step times.

    python bench/heads_replay.py --trace FILE --sessions FILE FILE --tokenizer build/model --json OUT

Recorded text decides which n-grams are right. A head is right by random numbers, as often as published ones are. Its
errors are independent of n-grams, or correlated: they fall where n-grams err. `assumptions` has all that is assumed.
Chains are the product's, `Acceptance` estimates them, and `BatchLengths` decides how many tokens a step verifies.

*head*: its K tokens. *score*: n-grams instead, where they promise more. *tail*: n-grams behind the K tokens that they
begin with, as `freedraft/engines/vllm/v2/heads.py` has it; the replay asserts that no position accepts fewer than the
head. *agree*: n-grams also where they part from the head, if their odds are better. *oracle*: the better of both.
"""

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.budget_replay import LARGE
from bench.lib.machine import rounded
from bench.lib.results import ROOT, write_json
from bench.lib.rivals import Cell, DraftFunction, Tokens
from bench.lib.tables import pivot
from bench.lib.trace import Row, Sessions, Trace
from bench.replay import learning, make
from freedraft.cost.acceptance import Acceptance
from freedraft.cost.allocation import keep_likeliest
from freedraft.cost.auto_by_batch import BatchLengths, candidate_lengths
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.measured import Head, Measured
from freedraft.cost.roofline import Roofline
from freedraft.draft import DraftBatch
from freedraft.method import Method
from freedraft.step import EngineContext, Step

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NGRAMS, CONTEXT, LAG = 15, 1024, 2  # draft tokens; tokens per request; steps until a length is used
LEAST_STEPS, LEAST_TOKENS = 1000, 20_000  # that the speed of a cell is taken from
BATCHES = (1, 8, 32)
SURE = {0.8: 0.985, 0.0: 0.9}  # from this score of a right n-gram token on, a correlated head is right so often
NODES = ("tokens", "parents", "depths", "scores", "kinds")
NONE = -1  # a head's wrong token, or no token
RATE, PARTING_RATE, FORECAST_RATE, GAIN = 0.02, 0.05, 0.1, 1.03
HEADS: dict[str, tuple[tuple[float, ...], int]] = {"mtp1": ((0.85,), 1), "mtp": ((0.85, 0.70, 0.60), 3)}
HEADS |= {"eagle3": ((0.75, 0.60, 0.50), 3), "block7": ((0.88, 0.775, 0.682, 0.601, 0.529, 0.466, 0.41), 2)}
"""Share of positions at which each of the head's tokens is accepted, and its passes."""
HOST = {1: 0.43e-3, 8: 0.85e-3, 32: 1.2e-3}  # seconds between tokens and launch, predicted
EIGHT = {1: 5.3e-3, 8: 5.65e-3, 32: 9.2e-3}  # seconds of a step with eight draft tokens, without the host's, estimated


class Machine(NamedTuple):
    """Seconds of a step by requests and query tokens, and of a pass of the head by requests."""

    seconds: Callable[[int, Any], Any]
    one_pass: dict[int, float]

    def wait(self, batch: int, passes: int) -> float:
        """Seconds that a step waits for n-grams, which are looked up beside the head's passes."""
        return max(0.0, HOST[batch] - passes * self.one_pass[batch])


def h200() -> Callable[[int, Any], Any]:
    """Linear in the draft tokens: from none, as recorded, to eight of a request and beyond."""
    steps = json.loads((ROOT / "bench" / "results" / "first-hour.json").read_text())["steps"]
    arm = {"arm": "8b-plain", "temperature": 0.0}
    plain = {step["batch"]: 1e-3 * step["step_ms"] for step in steps if arm.items() <= step.items()}
    return lambda b, tokens: plain[b] + (EIGHT[b] - plain[b]) * (tokens - b) / (8 * b)


MACHINES = {
    "8B": Machine(h200(), {1: 0.18e-3, 8: 0.18e-3, 32: 0.25e-3}),
    "big": Machine(lambda _, n: 1e-3 * (10 + 6 * (1 - np.exp(-n / 24)) + 0.02 * n), dict.fromkeys(BATCHES, 0.45e-3)),
}


def assumptions() -> dict[str, Any]:
    steps = [
        {"machine": name, "requests": b, "host ms": 1e3 * HOST[b], "pass ms": 1e3 * machine.one_pass[b]}
        | {f"ms with {k} draft tokens": 1e3 * float(machine.seconds(b, b * (1 + k))) for k in (0, 3, 15)}
        for (name, machine), b in product(MACHINES.items(), BATCHES)
    ]
    said = {
        "8B": "Llama-3.1-8B on an H200: plain steps of first-hour.json; draft tokens, passes and host are estimated",
        "big": "10 ms + 6 ms (1 - exp(-query tokens / 24)) + 0.02 ms per query token, made up",
        "correlated": "a head has right n-gram tokens so often, by score; others so that its shares are met",
        "errors": "a wrong token of the head is not the n-gram's",
        "by score": "CUDA graphs exist for every number of rows; to wait must gain 3 %",
        "wait": "host less the head's passes, in steps with n-grams; n-grams alone wait for all of it",
    }
    heads = [{"head": name, "accepted": list(shares), "passes": passes} for name, (shares, passes) in HEADS.items()]
    sure = {str(score): share for score, share in SURE.items()}
    return rounded({"said": said, "correlated": sure, "n-gram tokens": NGRAMS, "heads": heads, "steps": steps})


class Text(NamedTuple):
    """T tokens of recorded answers, and the chain of n-grams that is drafted before each of them."""

    tokens: Tokens  # [T]
    first: Ints  # of each answer
    left: Ints  # [T], tokens of the answer from here on
    following: Ints  # [T, NGRAMS], these tokens
    chains: DraftBatch  # [T, 1 + NGRAMS]
    ngrams: Ints  # [T, NGRAMS], their tokens
    p: Floats  # [T, NGRAMS], probability of each, learnt from the answers before

    def right(self, drafts: Ints) -> Ints:
        """int64 [T]: leading tokens of drafts, [T, n], that are the answer's."""
        return (drafts == self.following[:, : drafts.shape[1]]).cumprod(1, dtype=np.int64).sum(1)

    def tokens_per_step(self, accepted: Ints) -> float:
        """accepted: int64 [T], of a draft at each position."""
        at, steps, next_at = 0, 0, (np.arange(len(self.tokens)) + np.minimum(1 + accepted, self.left)).tolist()
        while at < len(next_at):
            at, steps = next_at[at], steps + 1
        return len(next_at) / steps


def step_of(ids: list[str], tokens: Tokens, ends: Ints, gained: Ints, capacity: int = 0) -> Step:
    none, contexts = np.zeros(len(ids), np.int32), np.full(len(ids), CONTEXT, np.int32)
    room = none + np.int32(capacity)
    return Step(ids, tokens, ends - gained, ends, contexts, room, none, None, lambda _: none[:0], none > 0)


def recorded(rows: Sequence[Row], draft: DraftFunction, finished: Callable[[Tokens, Tokens], object]) -> Text:
    """finished: called with each prompt and answer once it is drafted for."""
    tokens, at = np.concatenate([answer for _, answer in rows]), 0
    chains, acceptance, first = DraftBatch.empty(len(tokens), 1 + NGRAMS), Acceptance(), list[int]()
    left, following = np.zeros(len(tokens), np.int64), np.full((len(tokens), NGRAMS), NONE - 1, np.int64)
    p = np.zeros((len(tokens), 1 + NGRAMS))
    for number, (prompt, answer) in enumerate(rows):
        whole, n = np.concatenate([prompt, answer]).astype(np.int32), len(answer)
        for i in range(n):
            one = draft(f"{number}", whole, len(prompt) + i)
            count = chains.counts[at + i] = one.counts[0]
            for name in NODES:
                getattr(chains, name)[at + i, :count] = getattr(one, name)[0, :count]
            following[at + i, : n - i] = answer[i : i + NGRAMS]
        here, ids = np.arange(at, at + n), [f"{i}" for i in range(n)]
        left[here], drafted = n - np.arange(n), of_rows(chains, here)
        p[here], gained = acceptance.probabilities(drafted), np.minimum(left[here], NGRAMS)
        acceptance.update(step_of(ids, tokens, here, 0 * here))
        acceptance.follow(drafted)
        acceptance.update(step_of(ids, tokens, here + gained, gained))
        first.append(at)
        at += n
        finished(prompt, answer)
    known = np.arange(1 + NGRAMS) < chains.counts[:, None]
    ngrams, p = np.where(known, chains.tokens, NONE)[:, 1:].astype(np.int64), np.where(known, p, 0.0)[:, 1:]
    return Text(tokens, np.array(first), left, following, chains, ngrams, p)


def of_rows(chains: DraftBatch, rows: Any, nodes: int = 1 + NGRAMS) -> DraftBatch:
    arrays = {name: getattr(chains, name)[rows, :nodes] for name in NODES}
    return DraftBatch(counts=np.minimum(chains.counts[rows], nodes), **arrays)


def head_tokens(text: Text, survival: Sequence[float], *, correlated: bool) -> Ints:
    """int64 [T, K]: the head's draft at each position."""
    random, size = np.random.default_rng(0), len(text.tokens)
    likely, sure = np.full(size, np.nan), text.right(text.ngrams) > 0
    for least, share in sorted(SURE.items()) if correlated else ():
        likely[sure & (text.chains.scores[:, 1] >= least)] = share
    drafts, alive = np.full((size, len(survival)), NONE), np.ones(size)
    for j, share in enumerate(survival):
        there, here = text.left > j, np.roll(likely, -j)
        weight, known = alive * there, ~np.isnan(here)
        rest = share * there.sum() - (weight * np.nan_to_num(here)).sum()
        p = np.where(known, here, np.clip(rest / max(weight[~known].sum(), 1e-9), 0.0, 1.0))
        drafts[:, j] = np.where(there & (random.random(size) < p), text.following[:, j], NONE)
        alive *= p
    return drafts


def tail(head: Ints, ngrams: Ints) -> Ints:
    """int64 [T, L]: the head's K tokens, and behind them n-grams that begin with these, as `extend_drafts` does it."""
    k = head.shape[1]
    agree = (head == ngrams[:, :k]).all(1, keepdims=True)
    return np.concatenate([head, np.where(agree, ngrams[:, k:], NONE)], 1)


def chosen(text: Text, head: Ints, *, agree: bool) -> Ints:
    """int64 [T]: accepted tokens of *score*, or of *agree*, at positions where a step begins. Both learn how often the
    head is right; *agree* also who was right where they parted."""
    k, given, bias, at = head.shape[1], np.full(head.shape[1], 0.75), 0.0, 0
    right = np.stack([text.right(head), text.right(text.ngrams)])
    accepted, parted = right[0].copy(), (head == text.ngrams[:, :k]).cumprod(1).sum(1)
    while at < len(text.tokens):
        m, p, survival = parted[at], text.p[at], np.cumprod(given)
        if agree and m < k and p[m] > 0.0:
            odds = np.clip((p[m] / (p[m - 1] if m else 1.0), given[m]), 1e-3, 1 - 1e-3)
            logit = float(np.subtract(*np.log(odds / (1 - odds)))) + bias
            takes = logit + np.log(p[m:].sum() / p[m] * survival[m] / survival[m:].sum()) > 0.0
            won = right[:, at] > m
            if right[:, at].min() == m and won.any():
                bias = float(np.clip(bias + PARTING_RATE * (won[1] - 1.0 / (1.0 + np.exp(-logit))), -4.0, 4.0))
        else:
            takes = m == k if agree else p.sum() > survival.sum()
        accepted[at] = right[int(takes), at]
        known = min(right[0, at] + 1, k)
        given[:known] += RATE * ((np.arange(known) < right[0, at]) - given[:known])
        at += min(1 + accepted[at], text.left[at])
    return accepted


class Decoding:
    """Steps of a batch that is kept full: answers in random order, all of them again if need be. at: int64 [B], where
    requests are in the text; gained: int64 [B], their newest tokens."""

    def __init__(self, text: Text, batch: int) -> None:
        order = np.random.default_rng(0).permutation(text.first).tolist()
        self.text, self.batch, self._waiting = text, batch, enumerate(cycle(order))
        self.ids, self.at, self.gained = [""] * batch, np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.produced = self.steps = self.waits = self.rows = 0
        self.seconds = 0.0
        self._begin(range(batch))

    def _begin(self, rows: Sequence[int]) -> None:
        for row in rows:
            number, self.at[row] = next(self._waiting)
            self.ids[row], self.gained[row] = f"{number}", 0

    @property
    def over(self) -> bool:
        return self.steps >= LEAST_STEPS and self.produced >= LEAST_TOKENS

    def step(self, accepted: Ints, seconds: float, rows: int, waits: bool) -> None:
        """accepted: int64 [B]; rows: draft tokens that were verified; waits: whether for n-grams."""
        left = self.text.left[self.at]
        self.gained = np.minimum(1 + accepted, left)
        self.at = self.at + self.gained
        self.produced, self.seconds = self.produced + int(self.gained.sum()), self.seconds + seconds
        self.steps, self.rows, self.waits = self.steps + 1, self.rows + rows, self.waits + waits
        self._begin(np.flatnonzero(self.gained == left).tolist())

    def figures(self) -> dict[str, float]:
        """Tokens per second; draft tokens per step and request; share of steps that waited."""
        said = {"draft tokens": self.rows / self.steps / self.batch, "waits": self.waits / self.steps}
        return {"rate": self.produced / self.seconds} | said


class Recorded(Method):
    """Drafts the recorded chains. While it does, the host's time passes."""

    def __init__(self, run: Decoding, rule: BatchLengths, clock: list[float]) -> None:
        super().__init__(None, EngineContext(max_draft_tokens=NGRAMS), rule, "sssd")
        self.run, self.clock = run, clock

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        self.clock[0] += HOST[self.run.batch]
        return of_rows(self.run.text.chains, self.run.at, 1 + max_draft_len)


def head_alone(text: Text, batch: int, machine: Machine, accepted: Ints, k: int, passes: int) -> dict[str, float]:
    run, seconds = Decoding(text, batch), float(machine.seconds(batch, batch * (1 + k)))
    while not run.over:
        run.step(accepted[run.at], seconds + passes * machine.one_pass[batch], batch * k, False)
    return run.figures()


def by_length(text: Text, batch: int, machine: Machine, accepted: Ints, k: int, passes: int) -> dict[str, float]:
    """One length for all requests, by `BatchLengths`. Steps of more than K draft tokens wait for n-grams.

    accepted: int64 [T], of a draft of most tokens at each position; k: 0 without a head."""
    run, clock, wait = Decoding(text, batch), [0.0], machine.wait(batch, passes)
    roofline = Roofline(LARGE, HardwareProfile.load("h200"))
    lengths = (k, *(n for n in candidate_lengths(NGRAMS) if n > k))
    rule = BatchLengths(Measured(roofline, clock=lambda: clock[0]), lengths, Head(k) if k else None)
    method, sent, length = Recorded(run, rule, clock), deque[Any]([[]] * LAG), k
    while not run.over:
        seconds = float(machine.seconds(batch, batch * (1 + length))) + passes * machine.one_pass[batch]
        seconds += wait if length > k else 0.0
        found = np.minimum(accepted[run.at], length)
        run.step(found, seconds, batch * length, length > k)
        clock[0] += seconds
        if rule.head is not None:
            rule.head.learn(float(np.minimum(found, k).mean()))
        rule.record_step(batch, batch * (1 + length), CONTEXT, seconds)
        sent.append(rule.decide(batch, CONTEXT))
        for first, last, chosen in sent.popleft():
            length = chosen if first <= batch <= last else length
        method.draft(step_of([*run.ids], text.tokens, run.at, run.gained, length if length > k else 0))
    return run.figures()


def by_score(
    text: Text, batch: int, machine: Machine, head: Ints, accepted: Ints | None, passes: int
) -> dict[str, float]:
    """The likeliest rows of the batch, the head's and n-grams' in one budget. A forecast of their probabilities, the
    newest ones averaged, decides how many and whether to wait for n-grams. accepted: None without n-grams."""
    run, k, right = Decoding(text, batch), head.shape[1], text.right(head)
    agrees, given = (head == text.ngrams[:, :k]).all(1).astype(int), np.full((3, k), 0.75)  # they part, agree; of all
    forecasts = [np.full(batch * n, 0.5) for n in (k, NGRAMS)][: 1 if accepted is None else 2]
    spent = [passes * machine.one_pass[batch] + wait for wait in (0.0, machine.wait(batch, passes))]
    while not run.over:
        at, p, options = run.at, np.zeros((2, batch, 1 + NGRAMS)), []
        p[:, :, 0], survival = 1.0, np.cumprod(given, 1)
        p[0, :, 1 : 1 + k], p[1, :, 1 : 1 + k] = survival[2], survival[agrees[at]]
        behind = text.p[at, k:] / np.maximum(text.p[at, k - 1 : k], 1e-9)
        p[1, :, 1 + k :] = agrees[at, None] * p[1, :, k : k + 1] * np.minimum(behind, 1.0)
        for both, forecast in enumerate(forecasts):
            seconds = machine.seconds(batch, batch + np.arange(1 + len(forecast))) + spent[both]
            rates = (batch + np.concatenate(([0.0], np.cumsum(forecast)))) / seconds
            best = int(rates.argmax())
            options.append((float(rates[best]) / (GAIN if both else 1.0), both, best, float(seconds[best])))
            seen = np.sort(p[both, :, 1:], axis=None)[::-1][: len(forecast)]
            forecast += FORECAST_RATE * (seen - forecast)
        _, waits, most, took = max(options)
        counts = np.full(batch, 1 + (NGRAMS if waits else k), np.int32)
        keep_likeliest(p[waits], counts, most)
        for agree, of_head, verified in zip(agrees[at], right[at], counts - 1, strict=True):
            known = min(of_head + 1, verified, k)
            given[[agree, 2], :known] += RATE * ((np.arange(known) < of_head) - given[[agree, 2], :known])
        found = right if accepted is None or not waits else accepted
        run.step(np.minimum(found[at], counts - 1), took, most, bool(waits))
    return run.figures()


def texts(arguments: argparse.Namespace) -> Iterator[tuple[str, Text]]:
    cell = Cell("sssd", "chain", 1 + NGRAMS)
    if arguments.trace:
        trace = Trace.load(arguments.trace, arguments.tokenizer)
        draft = make(cell, trace.documents, trace.vocab_size, None)
        yield arguments.trace.name, recorded(trace.test_rows[: arguments.answers], draft, lambda *_: None)
    for path in arguments.sessions:
        sessions = Sessions.load(path, arguments.tokenizer)
        live, learn = learning(sessions.vocab_size)
        rows = [row for turns in sessions.turns.values() for row in turns]
        yield path.name, recorded(rows, make(cell, [], sessions.vocab_size, None, live), learn)
        live.close()


def tables(text: Text, heads: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rows of "tokens", tokens per step, and of "speed", relative to the head alone."""
    ngrams = text.right(text.ngrams)
    plain = {(name, b): by_length(text, b, m, ngrams, 0, 0) for name, m in MACHINES.items() for b in BATCHES}
    for name, errors in product(heads, ("correlated", "independent")):
        survival, passes = HEADS[name]
        head = head_tokens(text, survival, correlated=errors == "correlated")
        k, right, tails = head.shape[1], text.right(head), text.right(tail(head, text.ngrams))
        assert (tails >= right).all(), "n-grams on top cost tokens"
        accepted = {"head alone": right, "n-grams alone": ngrams, "score": chosen(text, head, agree=False)}
        accepted |= {"tail": tails, "agree": chosen(text, head, agree=True), "oracle": np.maximum(right, ngrams)}
        row: dict[str, Any] = {"head": name, "errors": errors}
        yield "tokens", row | {arm: text.tokens_per_step(of_arm) for arm, of_arm in accepted.items()}
        for (machine, batch), alone in plain.items():
            known = text, batch, MACHINES[machine]
            rate = head_alone(*known, right, k, passes)["rate"]
            arms = {"n-grams alone": alone, "one length": by_length(*known, tails, k, passes)}
            arms |= {"by score": by_score(*known, head, tails, passes)}
            arms |= {"head by score": by_score(*known, head, None, passes)}
            row |= {"machine": machine, "requests": batch, "head tokens/s": rate}
            row |= {arm: found["rate"] / rate for arm, found in arms.items()}
            for (arm, found), key in product(arms.items(), ("draft tokens", "waits")):
                row[f"{arm}, {key}"] = found[key]
            yield "speed", {**row}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help='JSONL with "prompt" and "output"')
    parser.add_argument("--sessions", type=Path, nargs="*", default=[], help='JSONL with "session" and "messages"')
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder, or its tokenizer.json")
    parser.add_argument("--heads", choices=list(HEADS), nargs="+", default=list(HEADS))
    parser.add_argument("--answers", type=int, help="of the trace, at most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (data := [path for path in (arguments.trace, *arguments.sessions) if path]):
        parser.error("give --trace, --sessions or both")
    figures: dict[str, Any] = {"assumptions": assumptions(), "tokens": [], "speed": []}
    print(json.dumps(figures["assumptions"], indent=1), flush=True)
    for name, text in texts(arguments):
        for table, row in tables(text, arguments.heads):
            figures[table].append(rounded({"text": name, "answer tokens": len(text.tokens)} | row, 3))
            print(figures[table][-1], flush=True)
    form = "text={text} | head={head} | errors={errors} | machine={machine}"
    for arm in ("n-grams alone", "one length", "by score", "head by score"):
        print(f"{arm}: speed over the head alone, by requests")
        print(pivot(figures["speed"], form, "requests", f"{{{arm}:.2f}}"))
    write_json(arguments.json, figures, data=data)


if __name__ == "__main__":
    main()
