"""`PagedDraftModel`: the target model with skipped sublayers, on the target's own weights and KV pool."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from freedraft.draft_model import DraftModel, PassOutputs, Recipe, Window
from freedraft.engines.draft_round import DraftPass, DraftRanks, RankedRound, most_likely, on_device, run_kept
from freedraft.engines.matchness import SetScores
from freedraft.engines.sglang.graphs import Captured, capture, free_bytes, log_taken
from freedraft.engines.sglang.passes import Forward, Kept, Passes, Tokens, WindowedRead, kept_of
from freedraft.guarded_method import is_device_fault
from freedraft.step import Step

logger = logging.getLogger(__name__)

MAX_WINDOW_ROWS = 256


class PagedDraftModel(Passes, DraftModel):
    """Draft model on SGLang's target. Kept attention sublayers read the KV that the target wrote for past tokens.
    Raises ConfigError: the model is not built of plain pre-norm layers."""

    def __init__(self, runner: Any, ranks: DraftRanks, window_rows: WindowRows | None = None) -> None:
        super().__init__(runner)
        self.ranks, self.window_rows = ranks, window_rows
        self.waits = runner.device != "cpu"
        self.n_layers = len(self.decoder.layers)
        windows = [layer.self_attn.attn.sliding_window_size for layer in self.decoder.layers]
        # Smallest sliding window of the model's layers.
        self.attended: int | None = min((size for size in windows if size is not None and size > 0), default=None)
        self._to_capture: dict[Kept, None] = {}
        self._graphs: dict[Kept, Captured] = {}

    def build(self, recipe: Recipe, outputs: PassOutputs, *, optimize: bool) -> DraftPass:
        """See `DraftModel.build`. Passes built after `capture` run without CUDA graphs."""
        number = self.ranks.tell("build", recipe, outputs, optimize)
        kept = kept_of(self.decoder, recipe)
        if optimize:
            self._to_capture[kept] = None
        return DraftPass(kept, recipe.window, outputs, number)

    def clear(self) -> None:
        """Drop the CUDA graphs; their memory can then be reused."""
        self._graphs.clear()

    def capture(self) -> None:
        """Capture CUDA graphs of the passes built with `optimize`; no effect if SGLang captures none.

        A graph covers a step of one node per request, as SGLang captures them under speculation. If capturing fails,
        passes run eagerly, which costs time only. Raises EngineMustEnd: it failed on one of several ranks, which
        capture together.
        """
        if self.runner.decode_cuda_graph_runner is None:
            return
        free = free_bytes()
        try:
            for kept in self._to_capture:
                with self._in_place(self._forward_of(kept)), self.ranks.together():
                    self._graphs[kept] = capture(self.runner, 1)
        except Exception as error:
            if is_device_fault(error):
                raise
            logger.warning("freedraft: draft passes run without CUDA graphs, which could not be captured (%s)", error)
            self._graphs.clear()
        if self._graphs:
            log_taken(free, f"{len(self._graphs)} draft passes")

    def start(self, step: Step, draft_pass: DraftPass, rows: NDArray[np.intp], max_draft_len: int) -> PagedRound:
        self.ranks.tell("start", draft_pass.number, max_draft_len)
        return PagedRound(self, step.engine, draft_pass, max_draft_len)

    def serve(self, batch: Any = None) -> None:
        """Worker ranks: run the commands of rank 0 until it signals the end. batch: SGLang's ScheduleBatch of the step;
        None before the first step."""
        self.ranks.serve(self.build, partial(PagedRound, self, batch))

    def scorer(self, window: int) -> SetScores:
        # SGLang has memory for one row per request, which bounds the recipes of a pass and the tokens of each.
        rows = int(self.runner.max_running_requests)
        return SetScores(self, window, max(1, rows // window), min(window, rows))

    def has_graphs(self, kept: Kept) -> bool:
        """Whether graphs of `kept` are captured; its passes must then have the form of a one-node verification."""
        return kept in self._graphs

    def run(self, kept: Kept, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits after one token per request, float [R, V]."""
        return self.run_in_place(self._forward_of(kept), batch, self._graphs.get(kept)).next_token_logits

    def _forward_of(self, kept: Kept) -> Forward:
        model, decoder = self._model, self.decoder

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **_: Any) -> Any:
            hidden = run_kept(
                decoder.embed_tokens(input_ids), kept, decoder.norm, positions=positions, forward_batch=forward_batch
            )
            return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)

        return forward


Ready = tuple[Tokens, WindowedRead | None, ForwardBatch]  # of a pass


class PagedRound(RankedRound):
    """Draft passes of one step over a batch of B requests.

    Position `seq_lens[b] + j` of request b is slot `slots[b, j]`: SGLang reserved it for this step's verification,
    which overwrites it. Pass j reads the slots of lower positions and writes its own, never that of a committed token.
    Inputs are copied to the device before the first pass and advanced there for the later ones.

    Args:
        batch: SGLang's ScheduleBatch of a decoding step before its verification; not modified.
        max_draft_len: maximum number of positions.
    """

    def __init__(self, model: PagedDraftModel, batch: Any, draft_pass: DraftPass, max_draft_len: int) -> None:
        super().__init__(model.ranks, draft_pass, max_draft_len)
        self._model, self._batch = model, batch
        self._read: WindowedRead | None = None
        self.slots: torch.Tensor = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + max_draft_len,
            batch_size=len(batch.reqs),
            draft_token_num=max_draft_len,
            device=batch.seq_lens.device,
        ).view(-1, max_draft_len)

    def _ready(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> Ready:
        past = self._batch.seq_lens_cpu.numpy()[rows].astype(np.int64) + position
        rows_there, ids, positions = on_device(np.stack((rows, tokens, past)), self.slots.device)
        here = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        slots = self._slots(rows_there, positions)
        there = Tokens(here, torch.from_numpy(past), rows_there, ids, positions, slots)
        read = self._windowed(rows, rows_there)
        return there, read, self._pass(there, read)

    def _next(self, ready: Ready, ids: torch.Tensor) -> Ready:
        tokens, read, _ = ready
        positions = tokens.positions + 1
        slots = self._slots(tokens.rows_there, positions)
        tokens = tokens._replace(past=tokens.past + 1, ids=ids, positions=positions, slots=slots)
        return tokens, read, self._pass(tokens, read)

    def _output(self, ready: Ready) -> torch.Tensor:
        tokens, _, batch = ready
        logits, rows = self._model.run(self.draft_pass.layers, batch), tokens.rows_there
        sampling = self._batch.sampling_info
        if sampling.logit_bias is not None:
            logits = logits + sampling.logit_bias[rows]
        if not sampling.is_all_greedy:
            logits = logits / sampling.temperatures.view(-1, 1)[rows]
        return most_likely(logits, self.draft_pass.outputs)

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.slots[rows, positions - self._batch.seq_lens[rows]]

    def _pass(self, tokens: Tokens, read: WindowedRead | None) -> ForwardBatch:
        as_nodes = self._model.has_graphs(self.draft_pass.layers)
        return self._model.one_token_each(self._batch, tokens, left_out=read, as_nodes=as_nodes)

    def _windowed(self, rows: NDArray[np.intp], there: torch.Tensor) -> WindowedRead | None:
        """Return the windowed read of these requests, rebuilt when they change; None if the whole cache is read."""
        window, window_rows, n = self.draft_pass.window, self._model.window_rows, len(rows)
        if window is None or window_rows is None or n > len(window_rows.rows):
            return None
        key = rows.tobytes()
        if self._read is None or self._read.key != key:
            roots = self._batch.seq_lens_cpu.numpy()[rows].astype(np.int64)
            requests = self._batch.req_pool_indices[there].long()
            dropped = window_rows.write(requests, roots, window, self.max_draft_len, self._model.attended)
            dropped_there = on_device(dropped, there.device)
            self._read = WindowedRead(key, window_rows.rows[:n], torch.from_numpy(dropped), dropped_there)
        return self._read


class WindowRows:
    """Extra rows of SGLang's `req_to_token` for the part of a request's KV that windowed draft passes read. They come
    after the rows of `pool` (SGLang's ReqToTokenPool), which it never assigns to requests. Create before the attention
    backends: these keep the tensor, some of them in CUDA graphs. rows: int64 [R], indices of the extra rows."""

    def __init__(self, pool: Any, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        known = self._pool.req_to_token
        more = known.new_zeros(min(self._pool.size, MAX_WINDOW_ROWS), known.shape[1])
        self.rows = torch.arange(len(known), len(known) + len(more), device=known.device)
        self._pool.req_to_token = torch.cat((known, more))

    def write(
        self, requests: torch.Tensor, roots: NDArray[np.int64], window: Window, max_draft_len: int, attended: int | None
    ) -> NDArray[np.int64]:
        """Fill the first rows with only the sink and window tokens of B <= R requests. Returns the number of omitted
        tokens of each request, int64 [B]. requests: int64 [B], their rows; roots: int64 [B], positions of their roots.
        """
        size, table = self._page_size, self._pool.req_to_token
        sinks, dropped = window.pages(roots, size, attended=attended, max_draft_len=max_draft_len)
        sinks, dropped = sinks * size, dropped * size
        places = np.arange((roots + max_draft_len - dropped).max())
        places = np.where(places < sinks[:, None], places, places + dropped[:, None])
        there = on_device(np.minimum(places, table.shape[1] - 1), table.device)
        table[self.rows[: len(requests)], : places.shape[1]] = table[requests[:, None], there]
        return dropped
