"""An attention backend and CUDA graphs for every width of the verify pass.

SGLang has one backend and one set of graphs, for the widest; a batch of another width would run eagerly, and not at all
on a backend that is built for one width. So each further width gets its own, made as SGLang makes them for its adaptive
EAGLE, and swapped in for the pass.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from freedraft.guarded_method import is_device_fault

logger = logging.getLogger("freedraft")


class Captured(NamedTuple):
    """What passes of one width run on; without graphs they run eagerly."""

    backend: Any
    graphs: Any


class WidthGraphs:
    """What each width of one model runner runs on; empty where one backend runs all, eagerly."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._of_width: dict[int, Captured] = {}

    def clear(self) -> None:
        """Forget what was captured, whose memory may then be used again."""
        self._of_width.clear()

    def capture(self, widths: Sequence[int], *, fixed_width: bool, alone: bool = True) -> tuple[int, ...]:
        """Prepare all of `widths` but the last, which SGLang has prepared; call it after SGLang's own capture. Returns
        the widths that may be verified: without those of which the capture failed, e.g. for lack of memory.

        Args:
            fixed_width: whether the attention backend is built for one width.
            alone: whether there are no other ranks, which would go on with a capture that fails on this one.
        """
        if not fixed_width and self._runner.decode_cuda_graph_runner is None:
            return tuple(widths)
        free, kept = free_bytes(), list(widths)
        for width in widths[:-1]:
            try:
                self._of_width[width] = capture(self._runner, width)
            except Exception as error:
                if not alone or is_device_fault(error):
                    raise
                kept.remove(width)
                logger.warning(
                    "freedraft: trees of %d nodes are verified as larger ones: their CUDA graphs could not be captured "
                    "(%s); if memory was short, lower --mem-fraction-static",
                    width,
                    (str(error) or repr(error)).splitlines()[0],
                )
            gc.collect()  # what a capture that has failed holds; in the clause above, its error does
            torch.cuda.empty_cache()
        if free is not None:
            left = free_bytes() or 0
            logger.info(
                "freedraft: CUDA graphs for %d more sizes of trees take %.2f GiB that --mem-fraction-static does not "
                "count; %.2f GiB are free: if that is tight, lower --mem-fraction-static, or set "
                "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1",
                len(kept) - 1,
                (free - left) / 2**30,
                left / 2**30,
            )
        return tuple(kept)

    def use(self, width: int) -> AbstractContextManager[None]:
        """Passes inside run on what belongs to this width."""
        captured = self._of_width.get(width)
        return nullcontext() if captured is None else swapped_in(self._runner, captured)


def capture(runner: Any, width: int) -> Captured:
    """A backend of `width` nodes per request, and its graphs for every batch size that SGLang captures, if it captures
    any, with whatever `runner` has as its model now."""
    from sglang.srt.runtime_context import get_context, get_spec

    spec = get_spec()
    widest = {
        "speculative_num_draft_tokens": spec.speculative_num_draft_tokens,
        "speculative_eagle_topk": spec.speculative_eagle_topk,
    }
    # FA3 leaves the mask of a single node alone with topk 1, and then costs what plain decoding costs.
    topk = 1 if width == 1 else spec.speculative_eagle_topk
    get_context().override("freedraft.capture", speculative_num_draft_tokens=width, speculative_eagle_topk=topk)
    try:
        backend, graphs = _new_backend(runner), None
        if runner.decode_cuda_graph_runner is not None:
            graphs = type(runner.decode_cuda_graph_runner)(
                runner,
                attn_backend=backend,
                speculative_num_steps=spec.speculative_num_steps,
                speculative_num_draft_tokens=width,
            )
    finally:
        get_context().override("freedraft.capture", **widest)
    return Captured(backend, graphs)


@contextmanager
def swapped_in(runner: Any, captured: Captured) -> Iterator[None]:
    """Passes of `runner` go to these."""
    before = runner.attn_backend, runner.decode_cuda_graph_runner
    runner.attn_backend, runner.decode_cuda_graph_runner = captured
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = before


def _new_backend(runner: Any) -> Any:
    """On the workspace (384 MiB and more) and the page indices of SGLang's own backend: passes of two widths never run
    at the same time, and each writes the indices that it reads."""
    own = runner.init_new_workspace
    try:
        backend = runner._get_attention_backend(init_new_workspace=False)
    finally:
        runner.init_new_workspace = own
    for made, stock in zip(_parts(backend), _parts(runner.attn_backend), strict=False):
        if hasattr(made, "max_kv_splits"):
            # Triton's scratch for decoding in parts: gigabytes under MLA, which passes that verify do not read.
            made.max_kv_splits = 1
        # Of the greatest width: they are enough.
        indices = getattr(stock, "cuda_graph_kv_indices", None) if type(stock) is type(made) else None
        if isinstance(indices, list):  # FlashInfer's, a list of one unless there are windows
            indices = indices[0] if len(indices) == 1 else None
        start = made.init_cuda_graph_state
        # With windows, Triton's backend would allocate as much again for theirs.
        if (
            indices is not None
            and not runner.sliding_window_size
            and "kv_indices_buf" in inspect.signature(start).parameters
        ):
            made.init_cuda_graph_state = functools.partial(start, kv_indices_buf=indices)
    return backend


def _parts(backend: Any) -> tuple[Any, ...]:
    """A backend, or the two of one that has others for prefill and decoding."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    # FlashInfer's has attributes of these names, too, for kernels.
    hybrid = isinstance(backend, HybridAttnBackend)
    return (backend.decode_backend, backend.prefill_backend) if hybrid else (backend,)


def free_bytes() -> int | None:
    """Free memory of the device; None without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
