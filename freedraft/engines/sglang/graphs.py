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
        self._graphs: dict[int, Captured] = {}

    def capture(self, widths: Sequence[int]) -> None:
        """Capture all of `widths` but the last, which SGLang has captured; call it after SGLang's own capture."""
        if self._runner.decode_cuda_graph_runner is None:
            return
        for width in widths[:-1]:
            self._graphs[width] = capture(self._runner, width)

    @contextmanager
    def use(self, width: int) -> Iterator[None]:
        """Run a pass of this width on its own graph."""
        if width not in self._graphs:
            yield
            return
        with swapped_in(self._runner, self._graphs[width]):
            yield


Captured = tuple[Any, Any]  # attention backend, graph runner


def capture(runner: Any, width: int) -> Captured:
    """Capture graphs of `width` nodes per request, for every batch size that SGLang captures, with whatever `runner`
    has as its model now."""
    from sglang.srt.runtime_context import get_context, get_spec

    widest = get_spec().speculative_num_draft_tokens
    get_context().override("freedraft.capture", speculative_num_draft_tokens=width)
    try:
        backend = _new_backend(runner)
        graph = type(runner.decode_cuda_graph_runner)(
            runner,
            attn_backend=backend,
            speculative_num_steps=get_spec().speculative_num_steps,
            speculative_num_draft_tokens=width,
        )
    finally:
        get_context().override("freedraft.capture", speculative_num_draft_tokens=widest)
    return backend, graph


@contextmanager
def swapped_in(runner: Any, captured: Captured) -> Iterator[None]:
    """Passes of `runner` go to these graphs."""
    before = runner.attn_backend, runner.decode_cuda_graph_runner
    runner.attn_backend, runner.decode_cuda_graph_runner = captured
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = before


def _new_backend(runner: Any) -> Any:
    shared = runner.init_new_workspace
    try:
        return runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = shared
