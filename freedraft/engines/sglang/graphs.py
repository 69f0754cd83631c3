"""Attention backends and CUDA graphs for every width of the verification pass.

SGLang has one backend and one set of graphs, for the widest pass; other widths would run eagerly, or not at all on a
backend built for one width. Each further width gets its own, built as SGLang builds them for adaptive EAGLE, and
swapped in for the pass.
"""

import functools
import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import FA3_HOOKS
from freedraft.guarded_method import is_device_fault

logger = logging.getLogger("freedraft")


class Captured(NamedTuple):
    """Backend and CUDA graphs of one width; graphs: None runs passes eagerly."""

    backend: Any
    graphs: Any


class WidthGraphs:
    """Backends and graphs of one model runner, by width; empty if one backend runs all widths eagerly."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._of_width: dict[int, Captured] = {}

    def clear(self) -> None:
        """Drop all backends and graphs; their memory can then be reused."""
        self._of_width.clear()

    def capture(self, widths: Sequence[int], *, fixed_width: bool, alone: bool = True) -> tuple[int, ...]:
        """Prepare all of `widths` but the last, which SGLang has prepared; call it after SGLang's own capture. Returns
        the usable widths; those with a failed capture, e.g. for lack of memory, are left out.

        Args:
            fixed_width: whether the attention backend is built for one width.
            alone: whether this is the only rank; other ranks would continue with a capture that fails here.
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
                    "freedraft: drafts of %d tokens are verified as larger ones, which is slower: their CUDA graphs "
                    "could not be captured (%s); if memory was short, lower --mem-fraction-static",
                    width - 1,
                    (str(error) or repr(error)).splitlines()[0],
                )
            gc.collect()  # frees a failed capture, which its error keeps alive in the except clause
            torch.cuda.empty_cache()
        for backend in (self._runner.attn_backend, *(captured.backend for captured in self._of_width.values())):
            for part in _parts(backend):
                write_metadata_at_once(part)
        log_taken(free, f"{len(kept) - 1} sizes of drafts")
        return tuple(kept)

    def use(self, width: int) -> AbstractContextManager[None]:
        """Run passes in this context on the backend and graphs of `width`."""
        captured = self._of_width.get(width)
        return nullcontext() if captured is None else swapped_in(self._runner, captured)


def capture(runner: Any, width: int) -> Captured:
    """Build a backend of `width` nodes per request and, if SGLang captures graphs, its graphs for each of SGLang's
    batch sizes. Captures the model that `runner` holds at the call."""
    from sglang.srt.runtime_context import get_context, get_spec

    spec = get_spec()
    widest = {
        "speculative_num_draft_tokens": spec.speculative_num_draft_tokens,
        "speculative_eagle_topk": spec.speculative_eagle_topk,
    }
    # With topk 1, FA3 skips the mask of a single node, which then costs as much as plain decoding.
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
    """Run passes of `runner` in this context on the backend and graphs of `captured`."""
    before = runner.attn_backend, runner.decode_cuda_graph_runner
    runner.attn_backend, runner.decode_cuda_graph_runner = captured
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = before


def _new_backend(runner: Any) -> Any:
    """Build a backend that shares the workspace (384 MiB and more), page indices and mask of SGLang's own: passes of
    two widths never overlap, and each writes what it reads."""
    own = runner.init_new_workspace
    try:
        backend = runner._get_attention_backend(init_new_workspace=False)
    finally:
        runner.init_new_workspace = own
    for made, stock in zip(_parts(backend), _parts(runner.attn_backend), strict=False):
        if hasattr(made, "max_kv_splits"):
            # Triton's scratch for split-KV decoding, gigabytes with MLA; verification does not use it.
            made.max_kv_splits = 1
        # Sized for the largest width, which is enough.
        indices = getattr(stock, "cuda_graph_kv_indices", None) if type(stock) is type(made) else None
        start = made.init_cuda_graph_state
        # With windows, Triton's backend would allocate as much again for the windows' indices.
        if (
            indices is not None
            and not runner.sliding_window_size
            and "kv_indices_buf" in inspect.signature(start).parameters
        ):
            of_pages = indices[0] if isinstance(indices, list) else indices  # FlashInfer has a list, for windows
            start = functools.partial(start, kv_indices_buf=of_pages)
        made.init_cuda_graph_state = functools.partial(_start_graphs, stock, made, start)
    return backend


def _start_graphs(stock: Any, made: Any, start: Callable[..., None], *sizes: int) -> None:
    """Allocate what the graphs of `made` read. A verify mask of its own, a byte for each node and token of the context,
    is freed at once: SGLang's backends take no other's."""
    start(*sizes)
    for name in ("_verify_mask", "cuda_graph_custom_mask"):
        if hasattr(made, name) and type(made) is type(stock):
            setattr(made, name, getattr(stock, name))


def _parts(backend: Any) -> tuple[Any, ...]:
    """Return the decode and prefill backends of a hybrid backend, or a tuple of the backend itself; with recurrent
    layers also theirs, last."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    if isinstance(backend, HybridLinearAttnBackend):
        return (*_parts(backend.full_attn_backend), backend.linear_attn_backend)
    # Checked by type: FlashInfer's backend has attributes of the same names, for kernels.
    hybrid = isinstance(backend, HybridAttnBackend)
    return (backend.decode_backend, backend.prefill_backend) if hybrid else (backend,)


def free_bytes() -> int:
    """Return the free memory of the CUDA device in bytes; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def log_taken(before: int, graphs: str) -> None:
    """Log the GPU memory that these graphs have taken since `before` bytes of it were free."""
    if before:
        left = free_bytes()
        logger.info(
            "freedraft: %.2f GiB more GPU memory, for CUDA graphs of %s, which --mem-fraction-static does not count; "
            "%.2f GiB are free: if that is tight, lower --mem-fraction-static, or set "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1", (before - left) / 2**30, graphs, left / 2**30,
        )  # fmt: skip


def write_metadata_at_once(backend: Any) -> None:
    """Let `backend`, if it is FlashAttention's, prepare replays of trees by our kernel in place of 25 launches per
    step; no effect on models with windows, and where this SGLang lacks what it takes. Call it after the capture of its
    CUDA graphs; it compiles the kernel."""
    captured = getattr(backend, "target_verify_metadata_topk_expand", {})
    sizes = [key for key in captured if isinstance(key, int)]
    if not sizes or backend.has_swa or check(FA3_HOOKS):
        return
    from freedraft_kernels.device.tree_pages import PagedKeys, write_tree_pages

    def write(bs: int, seq_lens: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        past, nodes = backend.target_verify_metadata_topk_normal[bs], captured[bs]
        keys = (PagedKeys(m.cache_seqlens_int32, m.cu_seqlens_k, m.page_table) for m in (past, nodes))
        write_tree_pages(mask, positions, seq_lens, rows, backend.req_to_token, *keys, page_size=backend.page_size)
        past.max_seq_len_k = backend.max_context_len
        backend.forward_metadata, backend.forward_metadata_spec_decode_expand = past, nodes

    def prepare(forward: Any, in_capture: bool = False) -> None:
        if in_capture or not forward.forward_mode.is_target_verify():
            return type(backend).init_forward_metadata_out_graph(backend, forward, in_capture)
        tree = forward.spec_info
        write(forward.batch_size, forward.seq_lens, forward.req_pool_indices, tree.custom_mask, tree.positions)

    none = torch.zeros(sizes[0], dtype=torch.int64, device=backend.req_to_token.device)
    write(sizes[0], none, none, none.bool(), none[:0])
    backend.init_forward_metadata_out_graph = prepare
