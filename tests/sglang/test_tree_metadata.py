"""What SGLang's FlashAttention backend prepares for a replayed graph of trees: our one kernel writes, to the bit, what
its own operations do. In a process of its own, in Triton's interpreter; no graph is captured."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.sglang.test_attention_masks import HERE, run_interpreted
from tests.support.random_trees import on, random_batch
from tests.support.triton_launches import record_launches

SIZES = (1, 2, 4, 8)  # batches that graphs are captured for
TABLES = ("cache_seqlens_int32", "cu_seqlens_k", "page_table")


def test_one_kernel_writes_what_sglang_does(tiny):
    pytest.importorskip("triton")
    printed = run_interpreted(HERE / "test_tree_metadata.py", tiny)
    *operations, launches, cases = map(int, printed.split()[-4:])
    assert cases == 48 and operations[0] > 20 and operations[1] == 0 and launches == 1


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts those that compute something."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = operation(*arguments, **keywords or {})
        self.count += not operation.is_view and isinstance(made, torch.Tensor)
        return made


def backend_for(runner: Any, nodes: int, page: int) -> Any:
    """SGLang's, as after a capture for batches of `SIZES`."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_context

    get_context().override("test", speculative_num_draft_tokens=nodes, speculative_eagle_topk=2)
    runner.page_size, runner.sliding_window_size = page, None
    backend = FlashAttentionBackend(runner)
    slots = np.random.default_rng(0).permutation(12 * 2100).astype(np.int32)
    backend.req_to_token = torch.from_numpy(slots.reshape(12, 2100))
    backend.init_cuda_graph_state(SIZES[-1], SIZES[-1] * nodes)
    for size in SIZES:
        backend._bind_metadata_buffers(size, size * nodes, None, ForwardMode.TARGET_VERIFY, None, "cpu")
    return backend


def replay(rng: np.random.Generator, batch: int, nodes: int) -> Any:
    """A step's view at replay: requests that fill up the graph have one token each, and row 0."""
    from freedraft_kernels import tree_inputs
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    lengths = torch.from_numpy(rng.integers(1, rng.choice([9, 1900]), batch))
    drafts = random_batch(rng, batch, nodes, 50, rng.integers(1, nodes + 1, batch).tolist())
    inputs = tree_inputs(on("cpu", drafts), lengths, int(lengths.sum()))
    tree = NgramVerifyInput(
        draft_token=inputs.input_ids, custom_mask=inputs.mask, positions=inputs.positions, draft_token_num=nodes
    )
    size = next(size for size in SIZES if size >= batch)
    rows = torch.from_numpy(rng.permutation(11)[:batch] + 1)
    seq_lens = torch.cat((lengths, torch.ones(size - batch, dtype=torch.int64)))
    rows = torch.cat((rows, torch.zeros(size - batch, dtype=torch.int64)))
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=size, input_ids=inputs.input_ids, req_pool_indices=rows,
        seq_lens=seq_lens, seq_lens_cpu=seq_lens, seq_lens_sum=int(seq_lens.sum()), out_cache_loc=inputs.positions,
        positions=inputs.positions, spec_info=tree,
    )  # fmt: skip


def metadata_of(backend: Any, size: int) -> tuple[Any, Any]:
    return backend.target_verify_metadata_topk_normal[size], backend.target_verify_metadata_topk_expand[size]


def prepared(backend: Any, forward: Any) -> list[torch.Tensor]:
    """Copies of all that is written, over junk."""
    both = metadata_of(backend, forward.batch_size)
    for metadata, name in itertools.product(both, TABLES):
        getattr(metadata, name)[int(name == "cu_seqlens_k") :] = -7
    backend.forward_metadata = backend.forward_metadata_spec_decode_expand = None
    backend.init_forward_metadata_out_graph(forward)
    assert (backend.forward_metadata, backend.forward_metadata_spec_decode_expand) == both
    assert both[0].max_seq_len_k == backend.max_context_len
    return [getattr(metadata, name).clone() for metadata, name in itertools.product(both, TABLES)]


def operations_of(backend: Any, forward: Any) -> tuple[int, int]:
    """Operations of PyTorch, and launches of our kernels, which do not run."""
    with pytest.MonkeyPatch.context() as patch, Operations() as operations:
        launched = record_launches(patch, run=False)
        backend.init_forward_metadata_out_graph(forward)
    return operations.count, len(launched)


def main(folder: str) -> None:
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.flash_attn"] = MagicMock()
    from freedraft.engines.sglang.graphs import write_metadata_at_once
    from tests.sglang.attention_backends import model_runner

    runner, cases = model_runner(folder), 0
    for nodes, page in itertools.product((2, 5, 16), (1, 4)):
        rng = np.random.default_rng(nodes)
        own, ours = backend_for(runner, nodes, page), backend_for(runner, nodes, page)
        write_metadata_at_once(ours)
        for batch in range(1, 9):
            forward = replay(rng, batch, nodes)
            assert all(map(torch.equal, prepared(own, forward), prepared(ours, forward))), (nodes, page, batch)
            cases += 1
    (before, _), (after, launches) = operations_of(own, forward), operations_of(ours, forward)
    print(before, after, launches, cases)


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
