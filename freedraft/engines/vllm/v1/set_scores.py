"""How well skip sets would have drafted the newest tokens of a request: many sets in one forward pass of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.engines.many_sets import Sublayer, forward
from freedraft.engines.vllm.draft_passes import NO_SLOT, DraftPasses
from freedraft.engines.vllm.kept_layers import Backbone
from freedraft.engines.vllm.runner import Step


class SetScores:
    """Matchness of skip sets on a window of tokens that a request has generated.

    Every set reads the whole window in one prompt-like pass, uncompiled, through the target's own modules: attention
    reads the target's KV, that of the window included, and writes none. In a real draft the newest token's own KV
    would be the draft's; all else is as there.
    """

    def __init__(self, passes: DraftPasses, backbone: Backbone, window: int) -> None:
        self.passes = passes
        self.backbone = backbone
        self.window = window
        runner = passes.runner
        # Sets are to a pass what requests are to a step of the engine.
        self.most = max(1, min(runner.max_num_reqs, runner.max_num_tokens // window))
        self.turn = 0
        self.tokens = np.zeros(0, np.int64)
        self.wanted = np.zeros(0, np.int64)
        self.first = 0
        self.page: Any = None

    def look_at(self, step: Step) -> bool:
        """Take the newest tokens of a request of this step, of another one each time; False when none has generated
        enough."""
        rows, lengths = step.rows, step.lengths
        prompts = step.runner.input_batch.num_prompt_tokens[rows]
        # `window` tokens, each followed by one that was generated.
        able = np.flatnonzero(lengths - prompts > self.window)
        if not len(able):
            return False
        chosen = able[self.turn % len(able)]
        self.turn += 1
        row, end = int(rows[chosen]), int(lengths[chosen])
        text = step.token_rows[row, end - self.window - 1 : end].astype(np.int64)
        self.tokens, self.wanted, self.first = text[:-1], text[1:], end - self.window - 1
        self.page = step.arguments["common_attn_metadata"].block_table_tensor[row]
        return True

    @torch.inference_mode()
    def __call__(self, skipped: Sequence[Sequence[bool]]) -> NDArray[np.float64]:
        """float64 [J]: the share of the window's tokens after which each set drafts what came; `skipped`: 2L flags of
        each set."""
        bits = np.array(skipped, np.bool_)
        parts = [self._scores(bits[i : i + self.most]) for i in range(0, len(bits), self.most)]
        return np.concatenate(parts)

    def _scores(self, skipped: NDArray[np.bool_]) -> NDArray[np.float64]:
        from vllm.forward_context import override_forward_context

        passes, backbone, sets = self.passes, self.backbone, len(skipped)
        rows = sets * self.window
        positions = passes.tensor(np.tile(np.arange(self.first, self.first + self.window), sets))
        slots = torch.full((rows,), NO_SLOT, dtype=torch.int64, device=passes.device)
        metadata = passes.group.build_metadata_for_drafting(
            common_attn_metadata=self._metadata(sets, positions, slots), draft_index=0
        )
        context = passes.context
        context.attn_metadata = dict.fromkeys(passes.group.layer_names, metadata)
        context.slot_mapping = dict.fromkeys(passes.group.layer_names, slots)
        sublayers = []
        for layer in backbone.layers:
            attention = partial(_attend, layer.self_attn, positions)
            sublayers.append(Sublayer(layer.input_layernorm, attention, True))
            sublayers.append(Sublayer(layer.post_attention_layernorm, layer.mlp, False))
        with override_forward_context(context):
            hidden = backbone.embedding(passes.tensor(np.tile(self.tokens, sets)))
            stream = forward(hidden.view(sets, self.window, -1), sublayers, skipped)
            final = backbone.norm(stream.view(rows, -1))
            logits = backbone.head.quant_method.apply(backbone.head, final, bias=None)[:, : backbone.vocab_size]
        drafted = logits.argmax(-1).view(sets, self.window).cpu().numpy()
        return (drafted == self.wanted).mean(1)

    def _metadata(self, sets: int, positions: torch.Tensor, slots: torch.Tensor) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        passes, end = self.passes, self.first + self.window
        starts = torch.arange(0, (sets + 1) * self.window, self.window, dtype=torch.int32)
        lengths = torch.full((sets,), end, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(passes.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(passes.device),
            num_reqs=sets,
            num_actual_tokens=sets * self.window,
            max_query_len=self.window,
            max_seq_len=end,
            block_table_tensor=self.page.expand(sets, -1).contiguous(),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=passes.not_prefilling[:sets],
            seq_lens_cpu_upper_bound=lengths,
        )


def _attend(attention: Any, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return attention(positions=positions, hidden_states=hidden)
