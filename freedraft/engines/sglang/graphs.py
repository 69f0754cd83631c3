"""CUDA graphs for every width of the verify pass.

SGLang captures one graph, for the widest; a batch of another width would run eagerly. So each further width gets an
attention backend and a graph runner of its own, made as SGLang makes them for its adaptive EAGLE, and swapped in for
the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class WidthGraphs:
    """The graph runner of each width of one model runner. Empty, and doing nothing, where graphs are off."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._graphs: dict[int, tuple[Any, Any]] = {}

    def capture(self, widths: Sequence[int]) -> None:
        """Capture all of `widths` but the last, which SGLang has captured; call it after SGLang's own capture."""
        if self._runner.decode_cuda_graph_runner is None:
            return
        from sglang.srt.runtime_context import get_context, get_spec

        graph_class = type(self._runner.decode_cuda_graph_runner)
        widest = get_spec().speculative_num_draft_tokens
        for width in widths[:-1]:
            get_context().override("freedraft.capture", speculative_num_draft_tokens=width)
            try:
                backend = self._new_backend()
                graph = graph_class(
                    self._runner,
                    attn_backend=backend,
                    speculative_num_steps=get_spec().speculative_num_steps,
                    speculative_num_draft_tokens=width,
                )
            finally:
                get_context().override("freedraft.capture", speculative_num_draft_tokens=widest)
            self._graphs[width] = backend, graph

    @contextmanager
    def use(self, width: int) -> Iterator[None]:
        """Run a pass of this width on its own graph."""
        if width not in self._graphs:
            yield
            return
        runner = self._runner
        before = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self._graphs[width]
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = before

    def _new_backend(self) -> Any:
        shared = self._runner.init_new_workspace
        try:
            return self._runner._get_attention_backend(init_new_workspace=True)
        finally:
            self._runner.init_new_workspace = shared
