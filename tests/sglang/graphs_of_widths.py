"""What SGLang's own Triton backends of several widths read page indices from, on a real ModelRunner.

Argument: a model folder. No graph is captured: this machine has no device for it.
"""

from __future__ import annotations

import sys

from sglang.srt.model_executor.model_runner import ModelRunner

from tests.sglang.masks_in_fa3 import model_runner

BATCH, NODES = 3, 8


def check(runner: ModelRunner) -> None:
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


if __name__ == "__main__":
    check(model_runner(sys.argv[1]))
