"""How many draft tokens per request are the default: as many as gain something, if an engine's memory holds them."""

import math
from dataclasses import dataclass

TREE = 31  # nodes besides the root
CHAIN = 15  # longer chains gain .002 tokens per step: `CHAIN_TOKENS_PER_STEP`
SHARE_EXPERTS = "ranks that share experts verify as many at every batch size"
_FEW = 3
_SHORTER = (15, 7, 3, 1)  # with the root a power of two, as in `candidate_lengths`
_MASKS = 1 << 28  # bytes; the keys and values of 2,000 tokens of an 8B take as much
_SHARE = 0.1  # of the cache


@dataclass(frozen=True, slots=True)
class Room:
    """What draft tokens take of the memory of one rank.

    Attributes:
        requests: most at once; vocab: size of the vocabulary.
        one_length: whether all requests verify as many draft tokens at every batch size.
        few: why few draft tokens are the default; "" if they are not.
        state, more: bytes of a request's recurrent states without draft tokens, and of those for each draft token.
        cache: bytes for keys, values and states; share: of it, for the states of `held` requests.
        held: requests whose states must fit at once; 0 if none was asked for.
    """

    requests: int
    vocab: int
    one_length: bool = False
    few: str = ""
    state: float = 0.0
    more: float = 0.0
    cache: float = math.inf
    share: float = 0.5
    held: int = 0

    def states(self, length: int) -> float:
        """Bytes of the recurrent states of one request."""
        return self.state + self.more * length

    def masks(self, length: int) -> int:
        """Bytes of the bit masks of grammars."""
        return self.requests * (1 + length) * math.ceil(self.vocab / 32) * 4

    def excess(self, length: int) -> str:
        """What takes too much memory with this many draft tokens; "" if nothing does."""
        states, cache = self.states(length) / 1e9, self.cache / 1e9
        if self.held * states > self.share * cache:
            every, left = self.held * states, self.share * cache
            return f"recurrent states of {every:.2f} GB for {self.requests:,} requests, from {left:.1f} GB"
        if states > _SHARE * cache:
            return f"recurrent states of {states:.2f} GB per request, from a cache of {cache:.1f} GB"
        if self.masks(length) > _MASKS:
            return f"grammar masks of {self.masks(length) >> 20:,} MiB for {self.requests:,} requests"
        return ""

    def default(self, most: int, *, trees: bool) -> tuple[int, str]:
        """The default, at most `most`, and the reason. trees: whether drafts are trees."""
        length, why = most, "larger trees gain little"
        if self.few:
            length, why = min(most, _FEW), self.few
        elif not trees:
            length, why = min(most, CHAIN), "longer chains gain nothing"
        for shorter in (each for each in _SHORTER if each < length):
            if excess := self.excess(length):
                length, why = shorter, f"{length} would take {excess}"
        return length, why
