"""What SGLang's attention backends take from us, on a real ModelRunner: FA3 from tree masks, the slots of each node's
path, in order; Triton's of several widths, from where they read page indices.

Argument: a model folder; the checks that fail, on the last line, as JSON. FA3's kernels are not for this machine: none
is called, and no graph is captured.
"""

from __future__ import annotations

import json
import sys
import traceback
from unittest.mock import MagicMock

import numpy as np
import torch
from freedraft_kernels import TreeBatch, tree_inputs
from sglang.benchmark.one_batch import load_model
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_context, publish
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.ngram_info import NgramVerifyInput

LENGTHS = [7, 1, 4]
BATCH, NODES = len(LENGTHS), 8


def model_runner(model: str) -> ModelRunner:
    load_plugins()
    args = ServerArgs(
        model_path=model,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        max_total_tokens=256,
        max_running_requests=len(LENGTHS),
        skip_tokenizer_init=True,
        speculative_algorithm="sssd",
        speculative_num_draft_tokens=8,
    )
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    return load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


def check_masks_in_fa3(runner: ModelRunner, nodes: int) -> None:
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    rng = np.random.default_rng(nodes)
    batch, lengths = len(LENGTHS), torch.tensor(LENGTHS)
    parents, depths = np.full((batch, nodes), -1, np.int32), np.zeros((batch, nodes), np.int32)
    for b in range(batch):
        for i in range(1, nodes):
            parents[b, i] = rng.integers(0, i)
            depths[b, i] = depths[b, parents[b, i]] + 1
    counts = np.array([nodes, 1, nodes - 1], np.int32)
    tree = TreeBatch.from_numpy(np.zeros_like(parents), parents, depths, counts)
    inputs = tree_inputs(tree, lengths, layout="full", seq_lens_sum=sum(LENGTHS))
    rows = torch.arange(1, 1 + batch)
    slots = runner.req_to_token_pool.req_to_token
    slots[rows, :20] = torch.from_numpy(1 + rng.permutation(200)[: batch * 20].reshape(batch, 20)).to(slots.dtype)
    windows = [slots[row, length : length + nodes] for row, length in zip(rows.tolist(), LENGTHS, strict=True)]
    get_context().override("test", speculative_num_draft_tokens=nodes)
    backend = FlashAttentionBackend(runner)
    backend.init_forward_metadata(
        ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=batch,
            input_ids=inputs.input_ids,
            req_pool_indices=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            seq_lens_sum=sum(LENGTHS),
            out_cache_loc=torch.cat(windows).to(torch.int64),
            positions=inputs.positions,
            spec_info=NgramVerifyInput(
                draft_token=inputs.input_ids,
                custom_mask=inputs.mask,
                positions=inputs.positions,
                draft_token_num=nodes,
            ),
        )
    )
    made = backend.forward_metadata_spec_decode_expand
    for b, window in enumerate(windows):
        for i in range(nodes):
            path = [i]
            while i < counts[b] and parents[b, path[0]] >= 0:
                path.insert(0, int(parents[b, path[0]]))
            row = b * nodes + i
            assert int(made.cache_seqlens_int32[row]) == len(path)
            assert made.page_table[row, : len(path)].tolist() == window[path].tolist()


def check_shared_page_indices(runner: ModelRunner) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from freedraft.engines.sglang.graphs import capture

    runner.attn_backend = own = TritonAttnBackend(runner)
    own.init_cuda_graph_state(BATCH, BATCH * NODES)
    runner._get_attention_backend = lambda init_new_workspace: TritonAttnBackend(runner)
    for window in (None, 64):
        runner.sliding_window_size = window
        for width in (1, 4):
            backend = capture(runner, width).backend
            backend.init_cuda_graph_state(BATCH, BATCH * width)
            assert backend.num_draft_tokens == width
            shared = backend.cuda_graph_kv_indices.data_ptr() == own.cuda_graph_kv_indices.data_ptr()
            assert shared == (window is None)
            assert len(backend.cuda_graph_kv_indices) >= BATCH * width * backend.max_context_len


def main(folder: str) -> None:
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.flash_attn"] = MagicMock()
    runner, failed = model_runner(folder), {}
    checks = [(check_shared_page_indices, ()), *((check_masks_in_fa3, (nodes,)) for nodes in (2, 5, NODES))]
    for check, given in checks:
        try:
            check(runner, *given)
        except Exception:
            failed[check.__name__] = traceback.format_exc()
    print("\n" + json.dumps(failed))


if __name__ == "__main__":
    main(sys.argv[1])
