"""A pre-norm decoder under several sets of skipped sublayers at once: in one pass, or sublayer by sublayer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad


class Sublayer(NamedTuple):
    """One of the 2L sublayers: `run` maps float [N, H] to [N, H], for attention over all N rows of the pass."""

    norm: Callable[[torch.Tensor], torch.Tensor]  # before it
    run: Callable[[torch.Tensor], torch.Tensor]
    is_attention: bool


SETS = 16  # most sets of one pass over sublayers one by one, which is padded to it


def sublayers_of(layers: Iterable[Any], **given: Any) -> list[Sublayer]:
    """The sublayers of decoder layers. Attention is called with `hidden_states` and the given keyword arguments."""
    sublayers = []
    for layer in layers:
        sublayers.append(Sublayer(layer.input_layernorm, partial(_attend, layer.self_attn, given), True))
        sublayers.append(Sublayer(layer.post_attention_layernorm, layer.mlp, False))
    return sublayers


def _attend(attention: Any, given: dict[str, Any], hidden: torch.Tensor) -> Any:
    return attention(hidden_states=hidden, **given)


def run_sublayer(sublayers: Sequence[Sublayer], passes: int, index: int, states: torch.Tensor) -> torch.Tensor:
    """The residual stream behind one sublayer.

    Args:
        sublayers: all 2L, in order, of passes over the same tokens under `passes` sets.
        states: float [J, W, H], the stream before sublayer `index` under each of J sets.
    """
    norm, run, is_attention = sublayers[index]
    width, size = states.shape[1:]
    added = []
    for part in states.split(passes):
        rows = norm(part.reshape(-1, size))
        if is_attention:  # always over all rows of a pass
            rows = pad(rows, (0, 0, 0, (passes - len(part)) * width))
        added.append(run(rows)[: len(part) * width])
    return states + torch.cat(added).view_as(states)


def forward(hidden: torch.Tensor, sublayers: Sequence[Sublayer], skipped: NDArray[np.bool_]) -> torch.Tensor:
    """The residual stream behind all sublayers.

    Attention runs for all sets where any keeps it, so that its metadata is the same in all layers, and what is not
    wanted of it is dropped; MLPs run for the sets that keep them.

    Args:
        hidden: float [J, W, H], embedded tokens under each of J sets.
        sublayers: all 2L, in order.
        skipped: bool [J, 2L].
    """
    stream = hidden.clone()
    count, width, size = stream.shape
    for index, (norm, run, is_attention) in enumerate(sublayers):
        keep = np.flatnonzero(~skipped[:, index])
        if not len(keep):
            continue
        kept = torch.from_numpy(keep).to(stream.device)
        rows = stream if is_attention or len(keep) == count else stream[kept]
        added = run(norm(rows.reshape(-1, size))).view(-1, width, size)
        if len(keep) == count:
            stream = stream + added
        else:
            stream = stream.index_add(0, kept, added[kept] if is_attention else added)
    return stream
