"""Our tree masks in SGLang's own attention backends: its Triton kernel interpreted, and what FA3 takes from a mask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent


def test_triton():
    """Trees are attended to as they should be; under a sliding window chains only (`guards.BACKENDS`)."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, str(HERE / "interpreted_attention.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (_, tree), (_, chain), (_, tree_in_window) = (line.split() for line in run.stdout.splitlines()[-3:])
    assert float(tree) < 1e-5 and float(chain) < 1e-5
    assert float(tree_in_window) > 0.1, "SGLang counts windows by position now: draft trees there"


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_what_fa3_takes_from_a_mask(nodes, monkeypatch):
    """Slots of each node's ancestors and of itself, in order, and their number."""
    monkeypatch.setitem(sys.modules, "sgl_kernel", MagicMock())  # kernels that are not for this machine
    from freedraft_kernels import TreeBatch, tree_inputs
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rng = np.random.default_rng(nodes)
    batch, lengths = 3, torch.tensor([7, 1, 4])
    parents, depths = np.full((batch, nodes), -1, np.int32), np.zeros((batch, nodes), np.int32)
    for b in range(batch):
        for i in range(1, nodes):
            parents[b, i] = rng.integers(0, i)
            depths[b, i] = depths[b, parents[b, i]] + 1
    counts = np.array([nodes, 1, nodes - 1], np.int32)
    tree = TreeBatch.from_numpy(np.zeros_like(parents), parents, depths, counts)
    mask = tree_inputs(tree, lengths, layout="full", seq_lens_sum=int(lengths.sum())).mask

    slots = torch.from_numpy(rng.permutation(200)[: batch * 20].reshape(batch, 20).astype(np.int32))
    backend = FlashAttentionBackend.__new__(FlashAttentionBackend)
    backend.topk, backend.speculative_num_draft_tokens, backend.page_size = 2, nodes, 1
    backend.has_swa = backend.is_prefill_aware_swa = backend.use_sliding_window_kv_pool = False
    backend._kv_shard_pool = backend.local_attn_builder = None
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
    backend.kv_index_translator = SimpleNamespace(is_translating=False)
    backend.init_forward_metadata(
        SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            req_pool_indices=torch.arange(batch),
            spec_info=SimpleNamespace(custom_mask=mask),
            batch_size=batch,
            encoder_lens=None,
        )
    )
    made = backend.forward_metadata_spec_decode_expand
    for b in range(batch):
        window = slots[b, lengths[b] : lengths[b] + nodes]
        for i in range(nodes):
            path = [i]
            while i < counts[b] and parents[b, path[0]] >= 0:
                path.insert(0, int(parents[b, path[0]]))
            row = b * nodes + i
            assert int(made.cache_seqlens_int32[row]) == len(path)
            assert made.page_table[row, : len(path)].tolist() == window[path].tolist()
