"""The learned scorer once more, in plain Python over lists and dicts: what the compiled one must equal, to the token.

Written from its recipe, as directly as possible: suffixes are looked up by their n-gram in a dict, occurrences in a
request by scanning it. Only the order of floating-point operations and of ties is taken over from the compiled code, so
that results compare exactly. The paper's scorer: `literal_trie`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.scoring.inputs import CandidateInputs, NodeInputs
from sssd_plugin.scoring.weights import Weights

SEPARATOR = -1


@dataclass
class Tree:
    """One row of a DraftBatch. scores: float64, before rounding to float32."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        self.scores.append(score)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Drafted tokens from below the root down to `node`."""
        return [*self.path(self.parents[node]), self.tokens[node]] if node > 0 else []


class OracleStore:
    """Sub-indices as sorted lists of suffixes. sub_indices: token lists, each document followed by a separator."""

    LONGEST = 4

    def __init__(self, sub_indices: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.sub_indices = [list(map(int, tokens)) for tokens in sub_indices]
        self.size = sum(map(len, self.sub_indices))
        self.static = len(self.sub_indices)  # the first ones, that were built; the others were learnt
        self._counted = min(vocab_size, 2**20)  # unigram counts of larger ids are not kept
        self._starts: list[dict[tuple[int, ...], list[int]]] = []
        self._unigrams: dict[int, int] = defaultdict(int)
        for tokens in self.sub_indices:
            starts: dict[tuple[int, ...], list[int]] = defaultdict(list)
            begins = [i for i, token in enumerate(tokens) if token != SEPARATOR]
            limit = 200 if len(tokens) > 2000 else len(tokens)  # text does not repeat itself for longer than that
            for i in sorted(begins, key=lambda i, t=tokens, m=limit: t[i : i + m]):
                self._unigrams[tokens[i]] += 1
                for k in range(1, self.LONGEST + 1):
                    gram = tuple(tokens[i : i + k])
                    if len(gram) == k and SEPARATOR not in gram:
                        starts[gram].append(i)
            self._starts.append(starts)

    def share(self, token: int) -> float:
        """uni(token): share of all tokens in the store."""
        return self._unigrams.get(token, 0) * (1.0 / max(self.size, 1)) if token < self._counted else 0.0

    def range(self, j: int, gram: Sequence[int]) -> list[int]:
        """Starts, in suffix order, of the suffixes of sub-index j that begin with `gram`."""
        starts = self._starts[j].get(tuple(gram[: self.LONGEST]), [])
        return [i for i in starts if self.sub_indices[j][i : i + len(gram)] == list(gram)]

    def members(self, gram: Sequence[int]) -> list[tuple[int, int]]:
        """(sub-index, start) of the suffixes that begin with `gram`, sub-indices end to end."""
        return [(j, i) for j in range(len(self.sub_indices)) for i in self.range(j, gram)]

    def token(self, j: int, at: int) -> int:
        return self.sub_indices[j][at] if at < len(self.sub_indices[j]) else SEPARATOR


def evenly(items: list, most: int) -> list:
    take = min(len(items), most)
    return [items[q * len(items) // take] for q in range(take)]


OCCURRENCES, MAX_CANDIDATES = 64, 256
LONG_ORDERS = (4, 5, 6, 8, 16, 32)  # tokens that a match of the request's last four has at least
ROOT_SAMPLES, COPY_MARGIN, EXPAND_MARGIN = 64, 0.7, 0.35
FLOOR = 0.002  # of a path
# L(c, N) = ln(c + 0.1) - ln(N + 1). By numpy's vectorised log, which may differ from math.log in the last bit.
LOG_MATCH = np.log(np.maximum(np.arange(65), 6) / 6)
LOG_COUNT, LOG_TOTAL = np.log(np.arange(512) + 0.1), np.log(np.arange(512) + 1.0)


class Column:
    """Followers seen in one kind of context of one length: count by token, observations, distinct tokens."""

    def __init__(self) -> None:
        self.count: dict[int, int] = defaultdict(int)
        self.total = 0

    def log_ratio(self, token: int) -> float:
        return float(LOG_COUNT[self.count.get(token, 0)] - LOG_TOTAL[self.total]) if self.total else 0.0


def common(request: list[int], i: int, end: int) -> int:
    """How many tokens up to position i equal those up to position `end`, at most 64."""
    n = 0
    while n < min(64, i + 1) and request[i - n] == request[end - n]:
        n += 1
    return n


def grams(request: list[int], context: list[int], before: int) -> list[int]:
    """Positions under `before`, newest first, at which the last four tokens are those of `context`."""
    if len(context) < 4:
        return []
    return [i for i in range(before - 1, 2, -1) if request[i - 3 : i + 1] == context[-4:]]


def longest_match(request: list[int], end: int) -> tuple[int, int]:
    """The newest of the longest matches of the tokens up to `end`: position and length; of each four tokens the newest
    256 places are looked at.
    """
    best, back = (0, 0), 0
    while back < 64 and end - back >= 3:
        places = grams(request, request[: end - back + 1], end - back)
        for i in places[:256]:
            length = common(request, i + back, end)
            if length > best[1]:
                best = i + back, length
            if best[1] == 64:
                return best
        if len(places) <= 256:
            break
        back = max(2, 2 * back)
    return best


@dataclass
class Copies:
    """What a node knows of earlier text: matches (position, length), newest first; alignments (position, tokens equal
    since the edit, kind); tokens copied before the edit; tokens of the store's longest context that are looked up.
    """

    matches: list[tuple[int, int]]
    alignments: list[tuple[int, int, str]]
    run: int
    evidence: int
    many: int

    @classmethod
    def of_root(cls, store: OracleStore, request: list[int]) -> Copies:
        end = len(request) - 1
        places = grams(request, request, end)
        matches = [(i, common(request, i, end)) for i in places[:64]]
        if len(places) > 64:
            older = longest_match(request, end)
            if older[1] > max(length for _, length in matches):
                matches[63] = older
        alignments, run, evidence = [], 0, 0
        if max((length for _, length in matches), default=0) < 8:
            alignments, run, evidence = align(request)
        many = 0
        for k in (6, 8, 12, 16, 24, 32, 48, 64):
            if k > len(request) or not store.members(request[-k:]):
                break
            many = k
        return cls(matches, alignments, run, evidence, many)

    def child(self, store: OracleStore, request: list[int], context: list[int]) -> Copies:
        """Of a node one token on; `context` ends with that token."""
        token, end = context[-1], len(request) - 1
        matches = [(i + 1, min(n + 1, 64)) for i, n in self.matches if i + 1 < end and request[i + 1] == token]
        matches = matches or [(i, 4) for i in grams(request, context, end)[:64]]
        alignments = [(i + 1, n + 1, kind) for i, n, kind in self.alignments if i + 1 < end and request[i + 1] == token]
        many = next((k for k in (self.many + 1, 5) if len(context) >= k >= 5 and store.members(context[-k:])), 0)
        return Copies(matches, alignments, self.run, self.evidence, many)


@dataclass
class Place:
    """Where a draft is copied on from: the position in `text` of the node's token. back: to the end of a request that
    goes on with a copy of its end, 0 for a text that ends; length of the match; row of the table of shares.
    """

    text: list[int]
    at: int
    back: int
    length: int
    row: int

    def share(self, shares: NDArray[np.float32]) -> float:
        return float(shares[self.row, min(self.length, 64)])

    def following(self) -> int:
        at = self.at + 1
        if at >= len(self.text):
            return self.text[at - self.back] if self.back else SEPARATOR
        return self.text[at]

    def child(self) -> Place:
        at = self.at + 1
        at -= self.back if at >= len(self.text) else 0
        return Place(self.text, at, self.back, self.length + 1, self.row)


def place_of(
    store: OracleStore, request: list[int], context: list[int], copies: Copies, weights: Weights, any_length: bool
):
    """The likelier one of the places of the longest match in the request and in the store, None without any; of matches
    of four tokens or more, in the store of more, or of any length.
    """
    end, found, agree = len(request) - 1, list(copies.matches), False
    if found:
        agree = len({request[i + 1] for i, _ in found}) == 1
    elif any_length:
        positions = [i for i in range(end, -1, -1) if request[i] == context[-1]][:16]
        for i in [i for i in positions if i < end]:
            match = 1
            while match < min(3, len(context), i + 1) and request[i - match] == context[-1 - match]:
                match += 1
            found.append((i, match))
    places = []
    if found:
        at, length = max(found, key=lambda entry: entry[1])
        places.append(Place(request, at, end - at if len(context) == len(request) else 0, length, int(agree)))
    for k in ([copies.many] if copies.many else []) + ([4, 3, 2, 1] if any_length else []):
        last = [j for j in range(len(store.sub_indices)) if len(context) >= k and store.range(j, context[-k:])]
        if last:
            text, members = store.sub_indices[last[-1]], store.range(last[-1], context[-k:])
            alike = store.token(last[-1], members[0] + k) == store.token(last[-1], members[-1] + k)
            places.append(Place(text, members[len(members) // 2] + k - 1, 0, k, 2 + alike))
            break
    return max(places, key=lambda place: place.share(weights.copies), default=None)


def align(request: list[int]) -> tuple[list[tuple[int, int, str]], int, int]:
    """Where the text may be in what it was a copy of until at most 8 tokens ago, how long it was one, and how many of
    the 32 tokens before the one where it began are the source's as well, which may have shifted by two.
    """
    for gap in range(1, 9):
        end = len(request) - 1 - gap
        if end < 3:
            break
        source, run = longest_match(request, end)
        if run < 8:
            continue
        found = []
        for shift in range(-2, 9):
            if shift < -gap or source + gap + shift >= len(request) - 1:
                continue
            new, old = request[end + 1 :], request[source + 1 : source + 1 + gap + shift]
            since = 0
            while since < min(len(new), len(old)) and new[-1 - since] == old[-1 - since]:
                since += 1
            if since or shift in (-1, 0):
                kind = "replaced" if shift == 0 else "inserted" if shift < 0 else "deleted"
                found.append((source + gap + shift, since, kind))
        before, there = end - run - 1, source - run - 1
        evidence = 0
        for shift in range(-2, 3):
            pairs = [(before - i, there + shift - i) for i in range(32)]
            evidence = max(evidence, sum(request[a] == request[b] for a, b in pairs if a >= 0 and b >= 0))
        return found[:4], run, evidence
    return [], 0, 0


@dataclass
class Counts:
    candidates: list[int] = field(default_factory=list)
    store: list[Column] = field(default_factory=lambda: [Column() for _ in range(4)])
    many: Column = field(default_factory=Column)
    request: list[Column] = field(default_factory=lambda: [Column() for _ in range(3 + len(LONG_ORDERS))])
    matches: dict[int, int] = field(default_factory=dict)  # the longest that each candidate followed
    alignments: dict[int, tuple[int, str]] = field(default_factory=dict)
    longest: int | None = None
    newest: int | None = None
    skip_store: list[Column] = field(default_factory=lambda: [Column() for _ in range(3)])
    skip_request: list[Column] = field(default_factory=lambda: [Column() for _ in range(2)])

    def known(self, token: int, may_add: bool = True) -> bool:
        """Whether the token is a candidate now."""
        if token == SEPARATOR:
            return False
        if token not in self.candidates:
            if not may_add or len(self.candidates) >= MAX_CANDIDATES:
                return False
            self.candidates.append(token)
        return True

    def see(self, column: Column, token: int, may_add: bool = True) -> None:
        if self.known(token, may_add):
            column.count[token] += 1


def gather(store: OracleStore, request: list[int], context: list[int], samples: int, copies: Copies) -> Counts:
    """All evidence on what follows `context`: the request's tokens, then those drafted on the way to this node."""
    seen = Counts()
    for k, column in ((copies.many, seen.many), *((k, seen.store[k - 1]) for k in (4, 3, 2, 1))):
        if len(context) >= k > 0:
            sample = evenly(store.members(context[-k:]), samples)
            column.total = len(sample)
            for j, i in sample:
                seen.see(column, store.token(j, i + k))

    n = len(request)
    occurrences = [i for i in range(n - 2, -1, -1) if request[i] == context[-1]][:OCCURRENCES]
    for i in occurrences:
        match = 0
        while match < min(3, len(context), i + 1) and request[i - match] == context[-1 - match]:
            match += 1
        for column in seen.request[:match]:
            column.total += 1
            seen.see(column, request[i + 1])

    for number, (i, match) in enumerate(copies.matches):
        token = request[i + 1]
        known = seen.known(token)
        for order, column in zip(LONG_ORDERS, seen.request[3:], strict=True):
            if match >= order:
                column.total += 1
                seen.see(column, token, may_add=False)
        if known:
            if match > max(seen.matches.values(), default=0):
                seen.longest = token
            seen.matches[token] = max(match, seen.matches.get(token, 0))
            if number == 0:
                seen.newest = token
    for i, since, kind in copies.alignments:
        token = request[i + 1]
        if seen.known(token) and since > seen.alignments.get(token, (-1, ""))[0]:
            seen.alignments[token] = since, kind

    if len(context) >= 2:
        for k in (3, 2, 1):
            if len(context) > k:
                column = seen.skip_store[k - 1]
                sample = evenly(store.members(context[-k - 1 : -1]), samples)
                column.total = len(sample)
                for j, i in sample:
                    if store.token(j, i + k) != SEPARATOR:
                        seen.see(column, store.token(j, i + k + 1), may_add=k > 1)

    if len(context) >= 3:
        one, two = seen.skip_request
        for i in [i for i in range(n - 3, -1, -1) if request[i] == context[-2]][:OCCURRENCES]:
            one.total += 1
            if i >= 1 and request[i - 1] == context[-3]:
                two.total += 1
                seen.see(two, request[i + 2])
            seen.see(one, request[i + 2], may_add=False)
    return seen


def newest_follower(store: OracleStore, context: list[int], many: int, samples: int) -> tuple[int, float]:
    """What came behind the newest place of the longest context, and 1 if that was learnt; documents are in the order in
    which they came, one sub-index after the other.
    """
    length = many or 4
    for j in range(len(store.sub_indices) - 1, -1, -1):
        places = store.range(j, context[-length:]) if len(context) >= length else []
        if places:
            return store.token(j, max(evenly(places, samples)) + length), float(j >= store.static)
    return SEPARATOR, 0.0


def interpolate(base: float, columns: list[Column], token: int, discount: float) -> float:
    p = base
    for column in columns:
        if column.total > 0:
            scale = 1.0 / column.total
            p = max(column.count.get(token, 0) - discount, 0.0) * scale + discount * len(column.count) * scale * p
    return p


def longest(columns: list[Column]) -> int:
    return max((k + 1 for k, column in enumerate(columns) if column.total), default=0)


def variety(columns: list[Column], order: int) -> int:
    """How much the followers of the longest context differ."""
    total, distinct = (columns[order - 1].total, len(columns[order - 1].count)) if order else (0, 0)
    if distinct <= 1:
        return [0, 1, 2, 2, 3][min(total, 4)]
    return 4 if distinct == total else 5 if total / distinct >= 3 else 6


Logits = dict[tuple[int, ...], dict[int, int]]
"""Recycled logits of one owner: behind up to four tokens, the likeliest next ones, and -ln p of each in 1/1024."""


def remember(logits: Logits, text: list[int], tokens: Sequence[int], log_probs: Sequence[float]) -> None:
    """What the target said comes behind `text`; -1 is no token."""
    costs = {t: int(-p * 1024 + 0.5) for t, p in zip(tokens, log_probs, strict=True) if t >= 0 and p > -32767 / 1024}
    for k in range(1, min(4, len(text)) + 1) if tokens[0] in costs else ():
        logits[tuple(text[-k:])] = costs


def one_hot(value: int, size: int) -> list[float]:
    """Which of 1..size a value is; 0 is none of them."""
    return [float(value == k) for k in range(1, size + 1)]


def laid_out(table: CandidateInputs | NodeInputs, **values: float | list[float]) -> list[float]:
    """Inputs by name in the table's order, as many of each as it says."""
    lists = {name: value if isinstance(value, list) else [float(value)] for name, value in values.items()}
    assert {name: len(value) for name, value in lists.items()} == table._asdict()
    return [x for name in table._fields for x in lists[name]]


def network(weights: Weights, node: list[float], candidates: list[list[float]]) -> list[float]:
    """The logits of a node's candidates: a hidden layer of rectified units and a linear one, in float32, rows of inputs
    that are not 0 in their order.
    """
    f, layer = np.float32, weights.layer
    n, x = len(node), [[f(value) for value in candidate] for candidate in candidates]
    largest = [max(values) for values in zip(*x, strict=True)]

    def add(hidden: NDArray[np.float32], values: list, first: int) -> NDArray[np.float32]:
        for i, value in enumerate(values):
            if value:
                hidden = hidden + f(value) * layer[first + i]
        return hidden

    common = add(add(layer[0], node, 1), largest, 1 + n)
    logits = []
    for own in x:
        hidden = add(common, own, 1 + n + len(own))
        terms = np.append(np.maximum(hidden[:-1], f(0)), hidden[-1]) * weights.out
        while len(terms) > 1:  # in halves
            terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
        logits.append(float(terms[0]))
    return logits


@dataclass
class Oracle:
    """What one request is drafted from, and how large its tree may be."""

    store: OracleStore
    request: list[int]
    weights: Weights
    logits: Logits
    max_nodes: int

    def tree(self, chain: bool) -> Tree:
        tree = Tree()
        if not self.request:
            return tree
        current = tree.add(self.request[-1], -1, 1.0)
        copies = {0: Copies.of_root(self.store, self.request)}
        frontier: list[tuple[float, int, int]] = []  # (score, parent, token), best first
        places: dict[int, Place] = {}
        choice = 0.03 if chain else 0.015 if self.max_nodes <= 16 else 0.0075
        while len(tree.tokens) < self.max_nodes:
            room = self.max_nodes - len(tree.tokens)
            base = tree.scores[current]
            full = current > 0 and not chain and len(frontier) >= room
            frontier = [] if chain else frontier[:room]
            above = copies.get(tree.parents[current])
            copied = current in places or above is None or above.matches or above.alignments
            margin = COPY_MARGIN if copied else EXPAND_MARGIN
            if not (full and base * margin <= frontier[room - 1][0]) and base >= FLOOR:
                context = self.request + tree.path(current)
                place = places.get(current)
                if place is None:
                    if current:
                        copies[current] = copies[tree.parents[current]].child(self.store, self.request, context)
                    if base < choice or (chain and not copies[current].alignments):
                        place = place_of(
                            self.store, self.request, context, copies[current], self.weights, base < choice
                        )
                    if place is not None and base * (1.0 - place.share(self.weights.copies)) >= choice:
                        place = None
                if place is not None:
                    places[current], token = place, place.following()
                    scored = [(token, place.share(self.weights.copies))] if token >= 0 else []
                elif base < choice:
                    scored = []
                else:
                    scored = self.score(context, copies[current], current, chain)
                if chain:
                    scored = [(x, p) for x, p in scored if p == max(p for _, p in scored)][:1]
                frontier += [(base * p, current, x) for x, p in scored]
                frontier = sorted(frontier, key=lambda entry: -entry[0])[:room]  # stable: older ones win ties
            if not frontier:
                break
            value, parent, token = frontier.pop(0)
            current = tree.add(token, parent, value)
            if parent in places:
                places[current] = places[parent].child()
        return tree

    def score(self, context: list[int], copies: Copies, below_root: int, chain: bool) -> list[tuple[int, float]]:
        """(token, P(token follows context)) of the shortlist, most promising first."""
        store, request, few = self.store, self.request, chain or self.max_nodes <= 16
        samples = ROOT_SAMPLES if not below_root else 8 if few else 16
        seen = gather(store, request, context, samples, copies)
        orders = [k for k in (1, 2, 3, 4) if k <= len(context) and tuple(context[-k:]) in self.logits]
        known_by = max(orders, default=0)
        known = self.logits[tuple(context[-known_by:])] if known_by else {}
        costs = {x: cost for x, cost in known.items() if seen.known(x)}
        store_p, request_p, promise = {}, {}, {}
        skip_store, skip_request = seen.skip_store[1], seen.skip_request[1]
        for x in seen.candidates:
            store_p[x] = interpolate(store.share(x) + 1e-7, [*seen.store, seen.many], x, 0.7)
            request_p[x] = interpolate(1e-4, seen.request, x, 0.4)
            promise[x] = (
                0.6 * request_p[x]
                + 0.4 * store_p[x]
                + 0.1 / max(skip_store.total, 1) * skip_store.count.get(x, 0)
                + 0.1 / max(skip_request.total, 1) * skip_request.count.get(x, 0)
            )
            if x in seen.alignments:
                promise[x] += 0.2
            if x in costs:
                promise[x] += 0.3 * math.exp(costs[x] * (-1 / 1024))
        shortlist = sorted(seen.candidates, key=lambda x: -promise[x])
        below, at_root = 3 if chain else 8 if few else 16, 10 if few else 16
        shortlist = shortlist[: below if below_root else at_root]
        if not shortlist:
            return []
        store_order, request_order = longest([*seen.store, seen.many]), longest(seen.request)
        many = math.log((copies.many or 4) / 4)
        node = laid_out(
            NodeInputs(),
            below_root=bool(below_root),
            store_order=one_hot(store_order, 5),
            request_order=one_hot(request_order, 9),
            store_variety=one_hot(variety([*seen.store, seen.many], store_order), 6),
            request_variety=one_hot(variety(seen.request, request_order), 6),
            many=many,
            recycled_order=one_hot(known_by, 4),
        )
        newest, learnt = newest_follower(store, context, copies.many, samples)
        inputs = []
        for x in shortlist:
            in_request = min(request.count(x), 65535)
            log_in_request = float(LOG_COUNT[in_request]) if in_request < 512 else math.log(in_request + 0.1)
            since, kind = seen.alignments.get(x, (-1, ""))
            aligned = since >= 0
            own = laid_out(
                CandidateInputs(),
                store=math.log(max(store_p[x], 1e-7)),
                request=math.log(max(request_p[x], 1e-6)),
                surplus=log_in_request - math.log(len(request) * store.share(x) + 0.5),
                store_counts=[column.log_ratio(x) for column in seen.store[1:4]],
                request_counts=[column.log_ratio(x) for column in seen.request[:4]],
                skip_store_counts=[column.log_ratio(x) for column in seen.skip_store],
                skip_request_counts=[column.log_ratio(x) for column in seen.skip_request],
                many_counts=seen.many.log_ratio(x),
                long_counts=[column.log_ratio(x) for column in seen.request[6:]],
                many=many if seen.many.count.get(x) else 0,
                match=LOG_MATCH[seen.matches.get(x, 0)],
                longest=x == seen.longest,
                newest=x == seen.newest,
                aligned=aligned,
                since=math.log(1.0 + since) if aligned else 0,
                run=math.log(copies.run / 8) if aligned else 0,
                edit={"inserted": 1, "deleted": -1}.get(kind, 0),
                evidence=copies.evidence / 32 if aligned else 0,
                follower=x == newest,
                learnt=learnt if x == newest else 0,
                recycled=x in costs,
                recycled_log_prob=4.0 - costs[x] * (1 / 1024) if x in costs else 0,
            )
            inputs.append(own)
        logits = network(self.weights, node, inputs)
        top = max([0.0, *logits])
        total = math.exp(-top)
        for z in logits:
            total += math.exp(z - top)
        return [(x, math.exp(z - top) / total) for x, z in zip(shortlist, logits, strict=True)]
