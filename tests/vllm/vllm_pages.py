"""The KV cache of an engine in this process, token by token."""

import hashlib
from contextlib import contextmanager

import torch

from layerskip_plugin.calibrate.host_model import HostModel


class Pages:
    """The KV cache of all layers."""

    def __init__(self, runner, block):
        self.runner = runner
        attention = [layer.self_attn.attn for layer in runner.model.model.layers]
        self.caches = [layer.kv_cache for layer in attention]
        # Which elements of a block belong to the token at each offset: kernels pack blocks as they like.
        first, places = attention[0], []
        for offset in range(block):
            written = torch.zeros_like(self.caches[0][:1])
            ones = torch.ones(1, first.num_kv_heads, first.head_size)
            first.impl.do_kv_cache_update(first, ones, ones, written, torch.tensor([offset]))
            places.append(written.flatten().nonzero().flatten())
        self.places = torch.stack(places)
        assert sorted(self.places.flatten().tolist()) == [*range(self.caches[0][0].numel())]

    def blocks(self, row):
        table = self.runner.input_batch.block_table[0]
        return table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()

    def tokens(self, blocks=slice(None)):
        """[blocks, block, ...], a copy of what each token has in all layers."""
        return torch.cat([cache[blocks].flatten(1)[:, self.places] for cache in self.caches], -1)

    def digest(self, row, tokens):
        """Of the KV of a row's first tokens."""
        kept = self.tokens(self.blocks(row)).flatten(0, 1)[:tokens]
        return hashlib.sha256(kept.numpy().tobytes()).hexdigest()


class Reading(HostModel):
    """The model on the host, whose drafted tokens read the whole model's KV of themselves too, as scores do."""

    def attend(self, text, layer, past, q, k, v):
        own = [kv[layer][:, past].transpose(0, 1) for kv in (text.keys, text.values)]
        return super().attend(text, layer, past, q, *own)


@contextmanager
def leaving_the_cache(proposer):
    """Fail where anything is written into the KV cache."""
    caches = [layer.self_attn.attn.kv_cache for layer in proposer.draft_model.backbone.layers]
    before = [cache.clone() for cache in caches]
    yield
    assert all(bool((old == cache).all()) for old, cache in zip(before, caches, strict=True))
