"""Predictions of the cost model for a model on some hardware: step times and draft lengths by batch size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from freedraft.config import ConfigError
from freedraft.cost.auto_by_batch import CHAIN_TOKENS_PER_STEP, candidate_lengths, expected_tokens
from freedraft.cost.controller import Knee
from freedraft.cost.default_length import CHAIN, SHARE_EXPERTS, TREE, Room
from freedraft.cost.model_shape import state_bytes
from freedraft.cost.roofline import Roofline, weight_bytes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Tokens per step by nodes, of SSSD's drafts
CURVES = {"chain": CHAIN_TOKENS_PER_STEP, "tree": {1: 1.0, 4: 1.547, 8: 1.706, 16: 1.823, 32: 1.927}}

_LARGEST = 512  # tokens of vLLM's largest CUDA graph, on GPUs before Blackwell


class Row(NamedTuple):
    """One batch size. Seconds of a step, and lengths in nodes per request, root included."""

    batch: int
    plain_seconds: float
    rule: int  # the paper's s_q = I_knee / b, with the profile's caps
    rule_seconds: float
    best: int  # the length of the most tokens per second
    best_seconds: float
    speedup: float  # of the best length


def explain(roofline: Roofline, context: int, curve: dict[int, float], max_nodes: int = 64) -> list[Row]:
    """A row of each batch size, of lengths up to `max_nodes`. context: tokens per request; curve: tokens per step by
    nodes, interpolated linearly in the logarithm of the nodes."""
    rows = []
    lengths = np.arange(1, max_nodes + 1)
    tokens = expected_tokens(lengths, curve)
    rule = Knee(roofline.profile, max_nodes - 1, knee=roofline.profile.ridge_of(roofline.shape.weight_bytes))
    for batch in BATCHES:
        seconds = np.asarray(roofline.seconds(batch, batch * lengths.astype(np.float64), context))
        best, chosen = int((tokens / seconds).argmax()), rule.length(batch)
        speedup = float(tokens[best] / seconds[best] * seconds[0])
        times = [float(seconds[nodes]) for nodes in (0, chosen, best)]
        rows.append(Row(batch, times[0], chosen + 1, times[1], best + 1, times[2], speedup))
    return rows


def rooms(
    config: Mapping[str, Any], roofline: Roofline, requests: int, memory: float | None, replicas: int
) -> dict[str, Room]:
    """`Room` of a rank of each engine at its defaults, by a model's configuration. requests: most at once; memory: of
    a device, in bytes; replicas: data-parallel ranks. Raises ConfigError: a state's size, or memory, is missing."""
    shape, ranks = roofline.shape, roofline.tensor_parallel
    try:
        one = state_bytes(config, ranks)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the size of its recurrent states is not known ({error!r})") from None
    few = SHARE_EXPERTS if replicas > 1 and shape.experts else ""
    left = 0.9 * (memory or math.inf) - weight_bytes(shape, ranks)
    if one and (memory is None or left <= 0):
        raise ConfigError("recurrent states need room beside the weights: give a larger --memory, or more ranks")
    plain = Room(requests, shape.vocab, state=2 * one, more=one, cache=left, held=requests)  # one of cached prefixes
    # Five, and that of a draft's root; one request pads a batch.
    sglang = replace(plain, state=6 * one, share=0.9 / 1.9, held=requests + 1)
    return {"vLLM": replace(plain, one_length=bool(few), few=few), "SGLang": sglang}


def draft_tokens(room: Room, *, trees: bool) -> tuple[int, str, list[tuple[int, float, int, int, int, int]]]:
    """The default number of draft tokens, the reason, and what it and others take: the number, bytes of states of a
    request, most requests by states alone, bytes of masks; vLLM's full CUDA graphs, and most requests in one. trees:
    whether drafts are trees."""
    default, why = room.default(TREE, trees=trees)
    rows = []
    for n in sorted({default, 1, 3, 7, CHAIN, TREE}):
        graphs = full_graphs(room.requests, (n,) if room.one_length else candidate_lengths(n))
        held = min(room.requests, int(room.cache / room.states(n))) if room.states(n) else room.requests
        rows.append((n, room.states(n), held, room.masks(n), graphs, min(room.requests, _LARGEST // (1 + n))))
    return default, why, rows


def full_graphs(requests: int, lengths: Sequence[int]) -> int:
    """How many full CUDA graphs vLLM's model runner V2 captures for these draft lengths, ascending, if up to `requests`
    take each of them."""
    widest = 1 + lengths[-1]
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16)]
    counts = {requests, *(n for n in grid if n <= requests)}
    most = min(_LARGEST, 2 * requests * widest)
    sizes = {n for n in (*grid, *(n * (1 + k) for n in counts for k in lengths)) if n <= most}
    graphs = {(1 + k, -(-n // (1 + k))) for k in lengths for n in sizes}  # tokens and number of requests
    return sum(n <= requests and tokens * n <= most for tokens, n in graphs)
