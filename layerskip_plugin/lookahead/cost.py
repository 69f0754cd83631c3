"""Draft while one more token is expected to pay for itself; draft nothing where no length does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freedraft.composition import Outlook
from layerskip_plugin.lookahead.base import Flags, Floats, Ints, Lookahead, RoundLog
from layerskip_plugin.lookahead.prices import Prices
from layerskip_plugin.lookahead.rates import BinnedRate

BINS = 16
LONGEST = 64
MEMORY = 64.0
"""Rounds of a request after which an old one counts 1/e."""
PRIOR_WEIGHT = 6.0
PROBE_EVERY, PROBE_RARELY = 128, 512
ON_MARGIN = 1.02
"""How much better than plain decoding drafting must look to be switched on again."""


class Cost(Lookahead):
    """Maximises tokens per second under measured prices.

    A step of B requests brings N = B + (accepted tokens) in D = (draft passes) + (verify pass) seconds. The best
    long-run ratio N / D is reached by going on exactly while the expected gain of more tokens exceeds `rate` times
    their price, where `rate` is that best ratio (Dinkelbach). It is estimated from what rounds brought so far, and is
    never below that of plain decoding.

    After each token: the chance s that a request's draft is right so far is the product of P(accepted | top-1
    probability), the chance of the next one is P(next accepted | top-1 probability); both are learned. For the k
    requests with the best chances and m more tokens each, the gain is the sum over them of
    s * next * (1 + a + ... + a^(m-1)), with a the mean chance; the price is m draft passes over k requests and k * m
    more tokens in the verify pass. The k with the best surplus over all (k, m) go on, if it is positive.

    Args:
        prices: of this skip set on this machine.
        prior: rate of acceptance believed at first.
        horizon: the largest m.
    """

    needs_top = 1

    def __init__(self, prices: Prices, prior: float = 0.8, horizon: int = 8) -> None:
        if not 0 < prior < 1:
            raise ValueError(f"lookahead: prior must lie between 0 and 1, not {prior}")
        self.prices, self.horizon = prices, horizon
        self.log = RoundLog(1)
        middles = (np.arange(BINS) + 0.5) / BINS
        self.accepted_given = BinnedRate(middles, PRIOR_WEIGHT)
        # Pooled: bins behind which nothing was drafted yet count as like the others. At a fixed prior that does not pay
        # for a pass nothing would ever be drafted behind them.
        self.next_given = BinnedRate(np.full(BINS, prior), PRIOR_WEIGHT, pooled=True)
        # Per place in the draft, shares of the rounds in which it was drafted, and in which it was accepted.
        self.reached, self.held = prior ** np.arange(LONGEST), prior ** np.arange(1, LONGEST + 1)
        self.weight = PRIOR_WEIGHT
        self.on = True
        self.idle, self.probe_every = 0, PROBE_EVERY
        self.others: tuple[int, int, float] | None = None

    def outlook(self, batches: NDArray[np.int64], most: int = LONGEST) -> Outlook:
        """What a round over each number of requests is expected to bring, and to take.

        Args:
            batches: int64 [K].
            most: M, the most tokens a draft may have.
        """
        reached, held = self.reached[:most], self.held[:most]
        some = 1 - (1 - np.minimum(reached, 1)) ** batches[:, None]
        rows = batches[:, None] * reached / np.maximum(some, 1e-9)
        passes = np.cumsum(some * self.prices.draft(np.maximum(rows, 1)), 1)
        return Outlook(batches, np.cumsum(held), np.cumsum(reached), self.prices.per_round + passes)

    def rates(self, batch: int) -> NDArray[np.float64]:
        """float64[LONGEST + 1]: expected tokens per second of the whole batch by the most tokens a draft may have.

        The first entry is plain decoding.
        """
        outlook = self.outlook(np.array([batch]))
        seconds = outlook.seconds[0] + self.prices.verify(batch, batch * (1 + outlook.tokens))
        return np.concatenate([batch / np.atleast_1d(self.prices.plain(batch)), batch * (1 + outlook.gain) / seconds])

    def beside(self, requests: int, tokens: int, rate: float) -> None:
        """The next round is of a part of the batch only.

        Args:
            requests, tokens: the others, and how many query tokens they have in the verify pass.
            rate: expected tokens per second of the whole batch.
        """
        self.others = requests, tokens, rate

    def affordable(self, batch: int) -> bool:
        """Whether some length beats plain decoding; where none does, still True for 1 % of the steps, to look again."""
        if batch < 1:
            return False
        rates = self.rates(batch)
        self.on = bool(rates[1:].max() > rates[0] * (1.0 if self.on else ON_MARGIN))
        if self.on:
            self.idle, self.probe_every = 0, PROBE_EVERY
            return True
        self.idle += 1
        if self.idle < self.probe_every:
            return False
        self.idle, self.probe_every = 0, min(2 * self.probe_every, PROBE_RARELY)
        return True

    def begin(self, request_ids: Sequence[str], max_draft_tokens: int) -> None:
        super().begin(request_ids, min(max_draft_tokens, LONGEST))
        self.log.begin(request_ids, self.max_draft_tokens)
        batch = len(request_ids)
        others, self.others = self.others, None
        if not batch:
            return
        requests, tokens, rate = others or (0, 0, float(self.rates(batch).max()))
        self.rate = rate
        self.survival = np.ones(batch)
        self.tokens = batch
        # What the decisions of this round look up: prices by number of requests and by number of query tokens.
        self.draft_price = self.prices.draft(np.arange(1, batch + 1))
        query_tokens = np.maximum(np.arange(batch * (self.max_draft_tokens + 1) + 1), batch)
        self.verify_price = self.prices.verify(requests + batch, tokens + query_tokens)
        self.right, self.next = self.accepted_given.rates, self.next_given.rates
        chain = self.next_given.successes.sum() + self.next_given.weight * self.next_given.prior[0]
        chain /= self.next_given.trials.sum() + self.next_given.weight
        self.series = np.cumsum(chain ** np.arange(self.horizon))

    def go_on(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        more = np.zeros(len(rows), np.bool_)
        if position < self.max_draft_tokens:
            self.log.put(position, rows, top[:, :1])
        left = self.max_draft_tokens - position - 1
        if left < 1 or not len(rows):
            return more
        bins = to_bins(top[:, 0])
        self.tokens += len(rows)
        self.survival[rows] *= self.right[bins]
        chance = self.survival[rows] * self.next[bins]
        order = np.argsort(-chance, kind="stable")
        k = np.arange(1, len(rows) + 1)[:, None]
        m = np.arange(1, min(left, self.horizon) + 1)
        gain = np.cumsum(chance[order])[:, None] * self.series[m - 1]
        price = m * self.draft_price[k - 1] + self.verify_price[self.tokens + k * m] - self.verify_price[self.tokens]
        surplus = (gain - self.rate * price).max(1)
        best = int(np.argmax(surplus))
        if surplus[best] > 0:
            more[order[: best + 1]] = True
        return more

    def observe(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints) -> None:
        features, position, good, place = self.log.judged(request_ids, drafted, accepted)
        bins = to_bins(features[:, 0])
        self.accepted_given.add(bins, good)
        pairs = np.flatnonzero((place[1:] == place[:-1]) & (position[1:] == position[:-1] + 1))
        self.next_given.add(bins[pairs], good[pairs + 1])
        drafted, accepted = np.asarray(drafted), np.asarray(accepted)
        some = drafted > 0
        new = int(some.sum())
        if not new:
            return
        places = np.arange(LONGEST)
        old = min(self.weight * np.exp(-new / MEMORY), MEMORY)
        self.weight = old + new
        self.reached += ((drafted[some, None] > places).mean(0) - self.reached) * (new / self.weight)
        self.held += ((accepted[some, None] > places).mean(0) - self.held) * (new / self.weight)


def to_bins(probability: Floats) -> NDArray[np.intp]:
    """Which of the `BINS` equal parts of [0, 1] each probability lies in."""
    return np.clip((probability * BINS).astype(np.intp), 0, BINS - 1)
