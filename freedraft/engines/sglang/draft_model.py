"""`PagedDraftModel`: the target model with some of its sublayers skipped, on the target's own weights and KV pool."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from freedraft.draft_model import DraftModel
from freedraft.draft_pass import Recipe, Window
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.draft_round import DraftPass, RankedRound, most_likely, run_kept
from freedraft.engines.many_sets import SetScores
from freedraft.engines.on_device import on_device
from freedraft.engines.sglang.graphs import Captured, capture, free_bytes
from freedraft.engines.sglang.layers import Stages, stages_of
from freedraft.engines.sglang.passes import HiddenOf, Passes, Tokens, WindowedRead
from freedraft.guarded_method import is_device_fault
from freedraft.step import Step

logger = logging.getLogger(__name__)

MAX_WINDOW_ROWS = 256


class PagedDraftModel(Passes, DraftModel):
    """The target in SGLang. Kept attention reads the KV that the target wrote for the past. Raises ConfigError: this
    model is not built of plain pre-norm layers."""

    def __init__(self, runner: Any, ranks: DraftRanks, window_rows: WindowRows | None = None) -> None:
        super().__init__(runner)
        self.ranks, self.window_rows = ranks, window_rows
        self.waits = runner.device != "cpu"
        self.n_layers = len(self.decoder.layers)
        windows = [layer.self_attn.attn.sliding_window_size for layer in self.decoder.layers]
        # What the model itself looks back to: the least of its layers.
        self.attended: int | None = min((size for size in windows if size is not None and size > 0), default=None)
        self._to_capture: dict[Stages, None] = {}
        self._graphs: dict[Stages, Captured] = {}

    def build(self, recipe: Recipe, *, top_k: int, entropy: bool, optimize: bool) -> DraftPass:
        """See `DraftModel.build`. What is built after `capture` runs without CUDA graphs."""
        number = self.ranks.tell("build", recipe, {"top_k": top_k, "entropy": entropy, "optimize": optimize})
        stages = stages_of(self.decoder, recipe)
        if optimize:
            self._to_capture[stages] = None
        return DraftPass(stages, recipe.window, top_k, entropy, number)

    def clear(self) -> None:
        """Forget the CUDA graphs, whose memory may then be used again."""
        self._graphs.clear()

    def capture(self) -> None:
        """Capture CUDA graphs of the passes built to be optimized; does nothing where SGLang captures none.

        A graph is of a step of one node per request, as SGLang captures them under speculation. Where capturing fails,
        passes run eagerly, which costs time only. Raises EngineMustEnd: it failed on one of several ranks, which
        capture together.
        """
        if self.runner.decode_cuda_graph_runner is None:
            return
        free = free_bytes()
        try:
            for stages in self._to_capture:
                with self._in_place(self._with_head(self._runs(stages))), self.ranks.together():
                    self._graphs[stages] = capture(self.runner, 1)
        except Exception as error:
            if is_device_fault(error):
                raise
            logger.warning("freedraft: draft passes run without CUDA graphs, which could not be captured (%s)", error)
            self._graphs.clear()
        if free is not None and self._graphs:
            left = free_bytes() or 0
            logger.info(
                "freedraft: CUDA graphs of %d draft passes take %.0f MiB that --mem-fraction-static does not count; "
                "%.2f GiB are free: if that is tight, lower --mem-fraction-static",
                len(self._graphs),
                (free - left) / 2**20,
                left / 2**30,
            )

    def capacities(self, step: Step) -> NDArray[np.int32]:
        """SGLang has reserved slots for the widest tree."""
        return step.capacities

    def start(self, step: Step, draft_pass: DraftPass, rows: NDArray[np.intp], max_draft_len: int) -> PagedRound:
        self.ranks.tell("start", draft_pass.number, max_draft_len)
        return PagedRound(self, step.engine, draft_pass, max_draft_len)

    def follow(self, batch: Any = None) -> None:
        """In ranks other than the first: do what that one does, until it has ended. batch: SGLang's ScheduleBatch of
        the step; None where nothing is run yet."""
        self.ranks.follow(self.build, partial(PagedRound, self, batch))

    def scorer(self, window: int) -> SetScores:
        # SGLang keeps memory for one row per request: so a pass has at most that many recipes, and tokens of each.
        rows = int(self.runner.max_running_requests)
        return SetScores(self, window, max(1, rows // window), min(window, rows))

    def has_graphs(self, stages: Stages) -> bool:
        """Whether these are captured, so that their passes are to be verifications of one node."""
        return stages in self._graphs

    def run(self, stages: Stages, batch: ForwardBatch) -> torch.Tensor:
        """Logits after one token per request, float [R, V]."""
        return self.logits(self._runs(stages), batch, self._graphs.get(stages))

    def _runs(self, stages: Stages) -> HiddenOf:
        decoder = self.decoder
        return lambda ids, positions, batch: run_kept(
            decoder.embed_tokens(ids), stages, decoder.norm, positions=positions, forward_batch=batch
        )


class _Ready(NamedTuple):
    """The tokens of a pass, what they read through a window, and their batch."""

    tokens: Tokens
    read: WindowedRead | None
    batch: ForwardBatch


class PagedRound(RankedRound):
    """One step's draft passes over a batch of B requests.

    Position `seq_lens[b] + j` of request b is slot `slots[b, j]`: reserved by SGLang for this step's verification,
    which rewrites it. Pass j reads the slots of positions below and writes that one: it never touches a committed
    token. What a pass needs goes to the device before the first one; the others count on from there.

    Args:
        batch: SGLang's ScheduleBatch in decoding, before its verification; it is not changed.
        max_draft_len: most positions.
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

    def _ready(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> _Ready:
        past = self._batch.seq_lens_cpu.numpy()[rows].astype(np.int64) + position
        rows_there, ids, positions = on_device(np.stack((rows, tokens, past)), self.slots.device)
        here = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        slots = self._slots(rows_there, positions)
        there = Tokens(here, torch.from_numpy(past), rows_there, ids, positions, slots)
        read = self._windowed(rows, rows_there)
        return _Ready(there, read, self._pass(there, read))

    def _next(self, ready: _Ready, ids: torch.Tensor) -> _Ready:
        tokens, positions = ready.tokens, ready.tokens.positions + 1
        slots = self._slots(tokens.rows_there, positions)
        tokens = tokens._replace(past=tokens.past + 1, ids=ids, positions=positions, slots=slots)
        return ready._replace(tokens=tokens, batch=self._pass(tokens, ready.read))

    def _output(self, ready: _Ready) -> torch.Tensor:
        logits = self._as_sampled(self._model.run(self.draft_pass.layers, ready.batch), ready.tokens.rows_there)
        return most_likely(logits, self.draft_pass.top_k, self.draft_pass.entropy)

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.slots[rows, positions - self._batch.seq_lens[rows]]

    def _pass(self, tokens: Tokens, read: WindowedRead | None) -> ForwardBatch:
        as_nodes = self._model.has_graphs(self.draft_pass.layers)
        return self._model.one_token_each(self._batch, tokens, left_out=read, as_nodes=as_nodes)

    def _windowed(self, rows: NDArray[np.intp], there: torch.Tensor) -> WindowedRead | None:
        """What these requests read; made again only when they change. None for the whole cache."""
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

    def _as_sampled(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The distribution that the request samples from, as far as one request's own settings go."""
        sampling = self._batch.sampling_info
        if sampling.logit_bias is not None:
            logits = logits + sampling.logit_bias[rows]
        return logits if sampling.is_all_greedy else logits / sampling.temperatures.view(-1, 1)[rows]


class WindowRows:
    """Rows of SGLang's `req_to_token` with the part of a request's KV that windowed draft passes read: after those of
    the pool (SGLang's ReqToTokenPool), which it never gives to a request. Attention backends keep the tensor, some of
    them in CUDA graphs, so it has to be there before they are made. rows: int64 [R], their indices."""

    def __init__(self, pool: Any, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        known = self._pool.req_to_token
        more = known.new_zeros(min(self._pool.size, MAX_WINDOW_ROWS), known.shape[1])
        self.rows = torch.arange(len(known), len(known) + len(more), device=known.device)
        self._pool.req_to_token = torch.cat((known, more))

    def write(
        self,
        requests: torch.Tensor,
        roots: NDArray[np.int64],
        window: Window,
        max_draft_len: int,
        attended: int | None,
    ) -> NDArray[np.int64]:
        """Write rows, from the first on, that keep only the sink and window tokens of B <= R requests. Returns int64
        [B], tokens of each that are left out. requests: int64 [B], their rows; roots: int64 [B], positions of their
        roots."""
        size, table = self._page_size, self._pool.req_to_token
        sinks, dropped = window.pages(roots, size, attended=attended, max_draft_len=max_draft_len)
        sinks, dropped = sinks * size, dropped * size
        places = np.arange((roots + max_draft_len - dropped).max())
        places = np.where(places < sinks[:, None], places, places + dropped[:, None])
        there = on_device(np.minimum(places, table.shape[1] - 1), table.device)
        table[self.rows[: len(requests)], : places.shape[1]] = table[requests[:, None], there]
        return dropped
