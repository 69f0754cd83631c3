"""How well skip sets would have drafted the newest tokens of a request: many sets in one forward pass of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.engines.many_sets import Sublayer, forward

if TYPE_CHECKING:
    from freedraft.engines.sglang.partial_model import PartialModel

# SGLang keeps it for what padding writes; no request ever has it.
SPARE_SLOT = 0


class SetScores:
    """Matchness of skip sets on a window of tokens that a request has generated.

    Each token of the window is a row of an eager decoding pass, under each set: it reads the target's KV of what comes
    before it and writes into SGLang's spare slot, so that no committed KV is touched. Where the attention backend reads
    the token's own KV from the pool (the CPU platform's does) it is the target's; in a real draft it would be the
    draft's. All else is as there.
    """

    def __init__(self, model: PartialModel, window: int) -> None:
        self.model = model
        self.window = window
        # SGLang keeps room for as many rows as there may be requests: so many sets, and so many tokens of each, in one
        # pass.
        rows = int(model.runner.max_running_requests)
        self.sets, self.part = max(1, rows // window), min(window, rows)
        self.batch: Any = None
        self.row = self.length = 0
        self.tokens = np.zeros(0, np.int64)
        self.wanted = np.zeros(0, np.int64)

    def look_at(self, batch: Any, row: int, tokens: Sequence[int]) -> None:
        """Take the newest tokens of a request.

        Args:
            batch: SGLang's ScheduleBatch in decoding.
            row: of the request.
            tokens: at least `window` + 1, up to the last one it has, whose KV is not computed yet.
        """
        text = np.array(tokens[-self.window - 1 :], np.int64)
        self.batch, self.row, self.length = batch, row, int(batch.seq_lens_cpu[row])
        self.tokens, self.wanted = text[:-1], text[1:]

    def __call__(self, skipped: Sequence[Sequence[bool]]) -> NDArray[np.float64]:
        """float64 [J]: the share of the window's tokens after which each set drafts what came; `skipped`: 2L flags of
        each set."""
        bits = np.array(skipped, np.bool_)
        right = [
            np.concatenate(
                [self._right(bits[i : i + self.sets], j, j + self.part) for j in range(0, self.window, self.part)], 1
            )
            for i in range(0, len(bits), self.sets)
        ]
        return np.concatenate(right).mean(1)

    def _right(self, skipped: NDArray[np.bool_], start: int, end: int) -> NDArray[np.bool_]:
        """bool [J, n]: after which tokens from `start` on each set drafts what came."""
        from freedraft.engines.sglang.partial_model import one_token_each

        tokens, wanted = self.tokens[start:end], self.wanted[start:end]
        sets, count = len(skipped), len(tokens)
        rows, device = sets * count, self.batch.seq_lens.device
        first = self.length - self.window + start
        made = one_token_each(
            self.model,
            self.batch,
            torch.full((rows,), self.row),
            torch.from_numpy(np.tile(tokens, sets)).to(device),
            torch.arange(first, first + count).repeat(sets),
            torch.full((rows,), SPARE_SLOT, device=device),
        )

        def hidden_of(ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
            decoder = self.model.runner.model.model
            sublayers = []
            for layer in decoder.layers:
                attention = partial(_attend, layer.self_attn, positions, batch)
                sublayers.append(Sublayer(layer.input_layernorm, attention, True))
                sublayers.append(Sublayer(layer.post_attention_layernorm, layer.mlp, False))
            stream = forward(decoder.embed_tokens(ids).view(sets, count, -1), sublayers, skipped)
            return decoder.norm(stream.view(rows, -1))

        drafted = self.model.logits(hidden_of, made).argmax(-1).view(sets, count).cpu().numpy()
        return drafted == wanted


def _attend(attention: Any, positions: torch.Tensor, batch: Any, hidden: torch.Tensor) -> torch.Tensor:
    return attention(positions=positions, hidden_states=hidden, forward_batch=batch)
