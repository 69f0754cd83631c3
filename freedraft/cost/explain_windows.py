"""What windowed drafts would bring by the roofline: the best window and draft length by batch size and context."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freedraft.config import ConfigError
from freedraft.cost.roofline import Roofline
from freedraft.plotting import picture

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536)
MAX_DRAFT_LEN = 8


@dataclass(frozen=True, slots=True)
class WindowRow:
    """One batch size and context. Times in seconds.

    Attributes:
        plain: a step without drafts; window: tokens that drafts read, 0 where nothing pays.
        draft_len: tokens of a draft; pass_share: a draft pass by a plain step; gain: over plain.
    """

    batch: int
    context: int
    plain: float
    window: int
    draft_len: int
    pass_share: float
    gain: float


def parse_windows(text: str) -> dict[int, float]:
    """ "512:0.9,2048:0.95" as {512: .9, 2048: .95}: the share of drafted tokens accepted, by window.

    Raises:
        ConfigError: not such pairs.
    """
    try:
        windows = {int(tokens): float(share) for tokens, share in (part.split(":") for part in text.split(","))}
    except ValueError:
        windows = {}
    if not windows or any(tokens < 1 or not 0 < share < 1 for tokens, share in windows.items()):
        raise ConfigError(f"--windows '{text}': write TOKENS:ACCEPTANCE pairs, as in 512:0.9,2048:0.95")
    return windows


def explain_windows(roofline: Roofline, windows: dict[int, float], memory: float | None = None) -> list[WindowRow]:
    """A row for each batch size and context that fits into the memory.

    With acceptance a of each token whose predecessors were accepted, a draft of d tokens gives 1 + a + ... + a^d tokens
    in d passes and a step of d + 1 query tokens per request.

    Args:
        windows: acceptance by window; memory: bytes of all ranks together, None for as much as it takes.
    """
    shape = roofline.shape
    lengths: NDArray[np.float64] = np.arange(1, MAX_DRAFT_LEN + 1, dtype=np.float64)
    rows = []
    for batch, context in product(BATCHES, CONTEXTS):
        cache = 2 * shape.kv_bytes * shape.layers * shape.kv_heads * shape.head_dim * batch * shape.attended(context)
        if memory is not None and cache + shape.parameters * shape.weight_bytes > memory:
            continue
        plain = float(roofline.seconds(batch, batch, context))
        verify = np.asarray(roofline.seconds(batch, batch * (1 + lengths), context))
        best = WindowRow(batch, context, plain, 0, 0, 1.0, 1.0)
        for window, a in windows.items():
            one_pass = float(roofline.seconds(batch, batch, min(context, window)))
            tokens = 1 + np.cumsum(a**lengths)
            gains = tokens / (lengths * one_pass + verify) * plain
            d = int(gains.argmax())
            if window < context and gains[d] > best.gain:
                best = WindowRow(batch, context, plain, window, d + 1, one_pass / plain, float(gains[d]))
        rows.append(best)
    return rows


def plot_windows(rows: list[WindowRow], title: str, path: Path) -> None:
    """Draw the gains, context by batch size.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    gains = np.full((len(CONTEXTS), len(BATCHES)), np.nan)
    with picture(path, (6.4, 4.2)) as (_, [[axes]]):
        for row in rows:
            at = CONTEXTS.index(row.context), BATCHES.index(row.batch)
            gains[at] = row.gain
            axes.text(at[1], at[0], f"{row.gain:.2f}\n{row.window or 'off'}", ha="center", va="center", fontsize=8)
        axes.imshow(gains, origin="lower", aspect="auto", cmap="YlGn", vmin=1.0, vmax=3.0)
        axes.set(title=title, xlabel="batch size", ylabel="context")
        axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
        axes.set_yticks(range(len(CONTEXTS)), [f"{context // 1024} k" for context in CONTEXTS])
