"""KnapSpec: which sublayers to skip, as a 0/1 knapsack (papers: arXiv 2602.20217).

Items are the 2L attention and MLP sublayers in order, a sublayer's weight is the time that skipping it saves, and the
value of a set is the cosine of its hidden states to the whole model's. g[i, j] holds the best states behind the first i
sublayers with skipped weight j:

    execute sublayer i: f_i(g[i - 1, j])        skip it: g[i - 1, j - w_i]

All weights j are executed in one batch. The value is measured behind every sublayer and a state is chosen by it alone,
so this is a beam search that keeps the best of each weight, not an exact optimum; `survivors` of them may be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from layerskip_plugin.selection.host_model import HostModel, Sample
from layerskip_plugin.skip_set import SkipSet

PRUNE = 0.5
LARGEST_WEIGHT = 5
PROTECT = 0.85
FEWEST_TOKENS = 24


@dataclass(frozen=True)
class Candidate:
    """A set that the search found.

    Attributes:
        skip: the set.
        weight: of what it skips.
        cosine: of its last hidden state, normed, to the whole model's; mean over the sample.
        agreement: share of the sample on which its top-1 token is the whole model's.
    """

    skip: SkipSet
    weight: int
    cosine: float
    agreement: float


def integer_weights(attention: float, mlp: float) -> tuple[int, int]:
    """Weights of an attention and an MLP sublayer from their seconds: w = round(t / min(t)), at most 5."""
    if not (attention > 0 and mlp > 0):
        raise ValueError(f"latencies of sublayers must be positive, not {attention} and {mlp}")
    unit = min(attention, mlp)
    return tuple(min(LARGEST_WEIGHT, round(t / unit)) for t in (attention, mlp))  # type: ignore[return-value]


def require_tokens(count: int) -> None:
    """Refuse samples on which the estimate would be useless.

    Raises:
        ValueError: fewer than 24 tokens.
    """
    if count < FEWEST_TOKENS:
        raise ValueError(
            f"{count} calibration tokens are too few to tell sets apart; give at least {FEWEST_TOKENS} (--tokens)"
        )


def protected(host: HostModel, sample: Sample, least: float = PROTECT) -> frozenset[int]:
    """Sublayers that no set may skip: skipping that one alone leaves less than `least` agreement."""
    require_tokens(len(sample))
    agreement, _ = host.scores([host.skip([i]) for i in range(host.sublayers)], sample)
    return frozenset(np.flatnonzero(agreement < least).tolist())


@torch.inference_mode()
def search(
    host: HostModel,
    sample: Sample,
    weights: tuple[int, int] = (1, 1),
    most: int | None = None,
    kept: Iterable[int] = (),
    prune: float = PRUNE,
    survivors: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> list[Candidate]:
    """The best sets by skipped weight, 0 (the empty set) included.

    Args:
        host: the model.
        sample: tokens, at least 24; its texts were read with states.
        weights: of an attention and of an MLP sublayer.
        most: largest skipped weight; by default half of the whole.
        kept: sublayers that are never skipped.
        prune: a partial set is dropped when its cosine falls below this.
        survivors: partial sets kept per weight; 1 is the paper's.
        progress: called after each of the 2L sublayers.

    Returns:
        One per reachable weight, ascending; of `survivors` sets that with the best agreement, then cosine.

    Raises:
        ValueError: too few tokens.
    """
    require_tokens(len(sample))
    w = np.array([weights[i % 2] for i in range(host.sublayers)])
    most = int(w.sum()) // 2 if most is None else most
    kept = frozenset(kept)
    states = sample.states(0)[None]
    skipped = np.zeros((1, host.sublayers), np.bool_)
    weight = np.zeros(1, np.int64)
    for i in range(host.sublayers):
        executed = host.sublayer(i, states, sample)
        fits = np.flatnonzero(weight + w[i] <= most) if i not in kept else np.zeros(0, np.int64)
        passed = skipped[fits].copy()
        passed[:, i] = True
        states = torch.cat([executed, states[torch.from_numpy(fits)]])
        skipped, weight = np.concatenate([skipped, passed]), np.concatenate([weight, weight[fits] + w[i]])
        value = _cosine(states, sample.states(i + 1))
        stay = best_per_weight(weight, value, survivors, prune)
        states, skipped, weight = states[torch.from_numpy(stay)], skipped[stay], weight[stay]
        progress()
    final, best = sample.gather(lambda t: t.final), sample.gather(lambda t: t.best)
    ours = host.norm(states)
    agreement = torch.stack([(host.best(one) == best).double().mean() for one in ours]).numpy(force=True)
    cosine = _cosine(ours, final)
    found: dict[int, Candidate] = {}
    for row in np.lexsort((-cosine, -agreement, weight)).tolist():
        if int(weight[row]) not in found:
            skip = SkipSet.of_bits(skipped[row].tolist(), host.fingerprint)
            found[int(weight[row])] = Candidate(skip, int(weight[row]), float(cosine[row]), float(agreement[row]))
    return list(found.values())


def best_per_weight(
    weight: NDArray[np.int64], value: NDArray[np.float64], survivors: int, prune: float
) -> NDArray[np.int64]:
    """Which partial sets stay: for each weight the `survivors` of largest value, none below `prune`."""
    order = np.lexsort((-value, weight))
    same = weight[order]
    rank = np.arange(len(order)) - np.searchsorted(same, same)
    return order[(rank < survivors) & ((value[order] >= prune) | (same == 0))]


@torch.inference_mode()
def certain_cosine(x: Tensor, head: Tensor, rows: int = 64) -> NDArray[np.float64]:
    """Lemma 4.1: a state of the same length whose cosine to x is at least this has the same top-1 token.

    1 - margin(x)^2 / (2 |x|^2 max_j |w_i* - w_j|^2), where margin is that of the best logit over the second.

    Args:
        x: float32[N, hidden], last hidden states, normed.
        head: float32[vocabulary, hidden], a head without bias.
        rows: states looked at together, to bound memory.

    Returns:
        float64[N].
    """
    squares = (head * head).sum(1)
    out = []
    for part in x.split(rows):
        logits = part @ head.T
        first, second = logits.topk(2, -1).values.T
        best = logits.argmax(-1)
        apart = (squares[best, None] + squares - 2 * head[best] @ head.T).amax(-1)
        out.append(1 - ((first - second) ** 2 / (2 * (part * part).sum(-1) * apart)).double())
    return torch.cat(out).numpy(force=True)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a pass at one context length and batch.

    Attributes:
        attention, mlp: of one sublayer in a draft pass.
        head: of the final norm, the LM head and sampling.
        fixed: of everything else in a draft pass.
        verify: seconds of a verify pass with n query tokens per request; `verify(1)` is a plain step.
    """

    attention: float
    mlp: float
    head: float
    fixed: float
    verify: Callable[[int], float]

    def draft(self, skip: SkipSet) -> float:
        """t_draft(S) = kept attention * t_attn + kept MLP * t_mlp + t_head + t_fixed."""
        kept = (skip.n_layers - len(skip.attention)) * self.attention + (skip.n_layers - len(skip.mlp)) * self.mlp
        return kept + self.head + self.fixed


def tokens_per_time(acceptance: float, draft: float, verify: Callable[[int], float], length: int) -> float:
    """TPT(S, d) = (1 + a + ... + a^d) / (d * t_draft(S) + t_verify(d + 1)); d = 0 is plain decoding."""
    tokens = sum(acceptance**i for i in range(length + 1))
    return tokens / (length * draft + verify(length + 1))


@dataclass(frozen=True)
class Choice:
    """What to run: a set, a draft length, and the tokens per second expected of them; (empty, 0) is plain decoding."""

    skip: SkipSet
    length: int
    rate: float


def choose(candidates: Sequence[Candidate], times: PassTimes, longest: int = 10, trials: int | None = None) -> Choice:
    """The set and draft length of most tokens per time; drafting nothing competes.

    Args:
        candidates: of `search`.
        times: of the machine.
        longest: largest draft length.
        trials: tokens that agreement was measured on; with it, acceptance is taken as (hits + 1/2) / (trials + 1).
    """
    n_layers, model = candidates[0].skip.n_layers, candidates[0].skip.model
    best = Choice(SkipSet.empty(n_layers, model), 0, 1 / times.verify(1))
    for candidate in candidates:
        acceptance = candidate.agreement
        if trials:
            acceptance = (acceptance * trials + 0.5) / (trials + 1)
        for length in range(1, longest + 1):
            rate = tokens_per_time(acceptance, times.draft(candidate.skip), times.verify, length)
            if rate > best.rate:
                best = Choice(candidate.skip, length, rate)
    return best


def _cosine(states: Tensor, whole: Tensor) -> NDArray[np.float64]:
    """Mean over tokens of the cosine between float32[J, N, hidden] and float32[N, hidden]."""
    return functional.cosine_similarity(states, whole, dim=-1).double().mean(1).numpy(force=True)
