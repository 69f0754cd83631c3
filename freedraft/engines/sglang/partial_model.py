"""`PartialModel`: the target model without some of its sublayers, on the target's own weights and KV pool."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from freedraft.config import ConfigError
from freedraft.engines.sglang.graphs import Captured, capture, swapped_in
from freedraft.engines.sglang.platform import selected

logger = logging.getLogger(__name__)


class Stage(NamedTuple):
    """A sublayer that runs.

    Attributes:
        norm: before it.
        sublayer: attention or MLP.
        is_attention: which of the two.
        owes_sum: whether its output is this tensor-parallel rank's share, still to be summed.
    """

    norm: Any
    sublayer: Any
    is_attention: bool
    owes_sum: bool


Stages = tuple[Stage, ...]
HiddenOf = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(token ids [R], positions [R], ForwardBatch) -> hidden states [R, H], normed."""

# Modules of SGLang whose layers compute h + attention(norm(h)), then h + mlp(norm(h)), and nothing else.
PLAIN = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class PartialModel:
    """Runs draft passes: one token per request through a subset of the target's sublayers.

    In the residual stream of a pre-norm model a skipped sublayer is no operation at all, so only what is kept runs:
    its norm, the sublayer, and the sum over tensor-parallel ranks. The weights are the target's, by reference. Kept
    attention reads the KV that the target wrote for the past, and writes where it is told.
    """

    def __init__(self, model_runner: Any) -> None:
        """
        Raises:
            ConfigError: this model is not built of plain pre-norm layers.
        """
        self._runner = model_runner
        self._model = model_runner.model
        check_structure(self._model)
        self.n_layers = len(self._model.model.layers)
        self._ranks = get_parallel().tp_group
        self._sum: Callable[[torch.Tensor], torch.Tensor] = self._ranks.all_reduce
        self._graphs: dict[Stages, Captured] = {}
        # Whether a pass is run as the verification of one node, which graphs are captured of, not as plain decoding.
        self.as_nodes = False

    def stages(self, without_attention: Set[int], without_mlp: Set[int]) -> Stages:
        """What remains of the model without the attention and the MLP of the given layers."""
        kept = []
        for i, layer in enumerate(self._model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            if i not in without_attention:
                kept.append(Stage(layer.input_layernorm, attention, True, self._owes_sum(attention.o_proj)))
            if i not in without_mlp:
                kept.append(Stage(layer.post_attention_layernorm, mlp, False, self._owes_sum(mlp.down_proj)))
        return tuple(kept)

    def _owes_sum(self, linear: Any) -> bool:
        return self._ranks.world_size > 1 and not linear.reduce_results

    def share(self, stages: Stages) -> float:
        """Weight bytes that a pass over these stages reads, by those of the whole model; the head is read by both."""
        head = _bytes(self._model.lm_head)
        whole = sum(_bytes(stage.sublayer) for stage in self.stages(frozenset(), frozenset()))
        return (head + sum(_bytes(stage.sublayer) for stage in stages)) / (head + whole)

    def window(self, batch: Any, width: int) -> DraftWindow:
        """The slots that verification of `width` nodes per request will write, to draft in.

        Args:
            batch: SGLang's ScheduleBatch in decoding, before its verification; it is not changed.
        """
        return DraftWindow(self, batch, width)

    def capture(self, sets: Sequence[Stages]) -> None:
        """Capture CUDA graphs of passes over these; does nothing where SGLang captures none.

        A graph is of a step of one node per request, as SGLang captures them under speculation. Where capturing fails,
        passes run eagerly, which costs time only.
        """
        if self._runner.decode_cuda_graph_runner is None:
            return
        try:
            for stages in sets:
                with self.in_place(self._runs(stages)):
                    self._graphs[stages] = capture(self._runner, 1)
        except Exception as error:
            self._graphs.clear()
            logger.warning("freedraft: draft passes run without CUDA graphs, which could not be captured (%s)", error)
            return
        self.as_nodes = True

    def forward(self, stages: Stages, batch: ForwardBatch) -> torch.Tensor:
        """Logits after one token per request, float [R, V]."""
        return self.logits(self._runs(stages), batch, self._graphs.get(stages))

    def logits(self, hidden_of: HiddenOf, batch: ForwardBatch, captured: Captured | None = None) -> torch.Tensor:
        """Logits behind what `hidden_of` computes in place of the model, float [R, V]; eager unless `captured`."""
        graphs = swapped_in(self._runner, captured or (self._runner.attn_backend, None))
        with self.in_place(hidden_of), graphs, torch.no_grad():
            return self._runner.forward(batch).logits_output.next_token_logits

    def _runs(self, stages: Stages) -> HiddenOf:
        return lambda ids, positions, batch: run(self._model.model, stages, ids, positions, batch, self._sum)

    @contextlib.contextmanager
    def in_place(self, hidden_of: HiddenOf) -> Iterator[None]:
        """SGLang runs `hidden_of` where it runs the model: everything around the model is its own."""
        model = self._model

        def partial(input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **_: Any) -> Any:
            hidden = hidden_of(input_ids, positions, forward_batch)
            return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)

        model.forward = partial
        try:
            yield
        finally:
            del model.forward

    @property
    def runner(self) -> Any:
        return self._runner

    @property
    def rank(self) -> int:
        """Of this process among the tensor-parallel ones."""
        return self._ranks.rank_in_group

    def agree(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Rank 0's `values` on every rank: what decides which passes run must not differ. All ranks call it together,
        with as many values."""
        mine = np.asarray(values, np.int64)
        if self._ranks.world_size == 1:
            return mine
        told = torch.from_numpy(mine).to(self._runner.device)
        self._ranks.broadcast(told, src=0)
        return told.cpu().numpy()


def run(
    decoder: Any,
    stages: Stages,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    batch: Any,
    sum_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Hidden states [R, H] after the kept sublayers and the final norm.

    `residual` holds what all sublayers before the last one have added up; each norm adds the last one's output to it.
    """
    hidden = decoder.embed_tokens(input_ids)
    residual: torch.Tensor | None = None
    for norm, sublayer, is_attention, owes_sum in stages:
        if residual is None:
            residual, hidden = hidden, norm(hidden)
        else:
            hidden, residual = norm(hidden, residual)
        if is_attention:
            hidden = sublayer(positions=positions, hidden_states=hidden, forward_batch=batch)
        else:
            hidden = sublayer(hidden)
        if owes_sum:
            hidden = sum_ranks(hidden)
    return decoder.norm(hidden) if residual is None else decoder.norm(hidden, residual)[0]


class DraftWindow:
    """One step's draft passes over a batch of B requests.

    Position `seq_lens[b] + j` of request b is slot `slots[b, j]`: reserved by SGLang for this step's verification,
    which rewrites it. Pass j reads the slots of positions below and writes that one: it never touches a committed
    token.
    """

    def __init__(self, model: PartialModel, batch: Any, width: int) -> None:
        self._model = model
        self._batch = batch
        self._lengths = batch.seq_lens_cpu
        self.width = width
        self.slots: torch.Tensor = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=len(batch.reqs),
            draft_token_num=width,
            device=batch.seq_lens.device,
        ).view(-1, width)

    def draft(
        self,
        stages: Stages,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        depth: int,
        candidates: int,
        entropy: bool = False,
    ) -> Candidates:
        """Run one pass.

        Args:
            stages: what of the model runs.
            rows: int64 [R], requests of the batch, ascending.
            tokens: int32 [R], the token at `depth` of each: the root at 0.
            depth: of the tokens, below the window's width; all smaller depths have been run for these rows.
            candidates: how many of the most likely next tokens are wanted.
            entropy: whether the distribution's entropy is wanted.
        """
        here = torch.from_numpy(rows)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.slots.device, non_blocking=True)
        logits = self._model.forward(stages, self._pass(here, ids, depth))
        return best(self._as_sampled(logits, here), candidates, entropy)

    def _as_sampled(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The distribution that the request samples from, as far as one request's own settings go."""
        sampling = self._batch.sampling_info
        rows = rows.to(logits.device)
        if sampling.logit_bias is not None:
            logits = logits + sampling.logit_bias[rows]
        return logits if sampling.is_all_greedy else logits / sampling.temperatures.view(-1, 1)[rows]

    def _pass(self, rows: torch.Tensor, tokens: torch.Tensor, depth: int) -> ForwardBatch:
        slots = self.slots[rows.to(self.slots.device), depth]
        return one_token_each(self._model, self._batch, rows, tokens, self._lengths[rows] + depth, slots)


def one_token_each(
    model: PartialModel,
    whole: Any,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    past: torch.Tensor,
    slots: torch.Tensor,
) -> ForwardBatch:
    """A pass over one token for each of R rows.

    Args:
        whole: SGLang's ScheduleBatch; it is not changed.
        rows: int64 [R] on the CPU, the request of the batch that each token belongs to; one may have several.
        tokens: int64 [R].
        past: int64 [R] on the CPU, how many tokens of its request each reads, those before it.
        slots: int64 [R], where its KV is written.
    """
    part = copy.copy(whole)
    there = rows.to(whole.seq_lens.device)
    past_there = past.to(whole.seq_lens.device, whole.seq_lens.dtype)
    part.input_ids, part.out_cache_loc = tokens, slots
    part.reqs = [whole.reqs[i] for i in rows.tolist()]
    part.req_pool_indices = whole.req_pool_indices[there]
    if whole.orig_seq_lens is not None:
        part.orig_seq_lens = whole.orig_seq_lens[there]
    if model.as_nodes:  # as the worker verifies a tree of nothing but its root
        part.forward_mode = ForwardMode.TARGET_VERIFY
        part.seq_lens, part.seq_lens_cpu = past_there, past
        seen = len(rows) if selected() else int(past.sum()) + len(rows)
        part.spec_info = NgramVerifyInput(
            draft_token=tokens,
            custom_mask=torch.ones(seen, dtype=torch.bool, device=tokens.device),
            positions=past_there.to(torch.int64),
            draft_token_num=1,
        )
    else:
        part.forward_mode = ForwardMode.DECODE
        part.seq_lens, part.seq_lens_cpu = past_there + 1, past + 1
        part.spec_info = None
    part.seq_lens_sum = int(part.seq_lens_cpu.sum())
    part.return_logprob = False
    part.top_logprobs_nums = part.token_ids_logprobs = None
    return ForwardBatch.init_new(part, model.runner, return_hidden_states_before_norm=False)


class Candidates(NamedTuple):
    """What a pass drafts for R requests.

    Attributes:
        tokens: int32 [R, K], best first; beyond the vocabulary's size undefined.
        probabilities: float32 [R, K]; beyond the vocabulary's size 0.
        entropy: float32 [R] in nats, or None where it was not wanted.
    """

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    entropy: NDArray[np.float32] | None


def best(logits: torch.Tensor, candidates: int, entropy: bool = False) -> Candidates:
    """The most likely tokens of each row of float [R, V]."""
    logits = logits.float()
    total = torch.logsumexp(logits, -1, keepdim=True)
    known = min(candidates, logits.shape[1])
    values, tokens = logits.topk(known, -1) if known > 1 else logits.max(-1, keepdim=True)
    parts = [tokens.double(), torch.exp(values - total).double()]
    if entropy:
        probabilities = torch.exp(logits - total)
        parts.append((total - (probabilities * logits).nan_to_num(0.0).sum(-1, keepdim=True)).double())
    host = torch.cat(parts, 1).cpu().numpy()  # one transfer
    padding = ((0, 0), (0, candidates - known))
    return Candidates(
        np.pad(host[:, :known].astype(np.int32), padding),
        np.pad(host[:, known : 2 * known].astype(np.float32), padding),
        host[:, -1].astype(np.float32) if entropy else None,
    )


def check_structure(model: Any) -> None:
    """Refuse a model that is not a stack of plain pre-norm layers.

    Told by the code that runs, not by the model's name: a family counts as Llama when it runs Llama's code.

    Raises:
        ConfigError: one line with what is in the way.
    """
    import importlib

    name = type(model).__name__

    def refuse(why: str) -> None:
        raise ConfigError(
            f"cannot skip layers of {name} ({why}): what runs as Llama, Mistral, Qwen2 or Qwen3 can be drafted with; "
            "use --speculative-algorithm sssd"
        )

    known = []
    for module, prefix in PLAIN.items():
        code = importlib.import_module(f"sglang.srt.models.{module}")
        known.append(
            tuple(getattr(code, f"{prefix}{part}") for part in ("ForCausalLM", "Model", "DecoderLayer", "MLP"))
        )

    def runs(module: Any, part: int) -> bool:
        return any(type(module).forward is kind[part].forward for kind in known)

    if not runs(model, 0) or not runs(getattr(model, "model", None), 1):
        refuse("its forward pass is its own")
    layers = list(model.model.layers)
    if getattr(model, "capture_aux_hidden_states", False):
        refuse("it captures hidden states")
    for layer in layers:
        if not runs(layer, 2):
            refuse(f"its layers are of type {type(layer).__name__}")
        if not runs(layer.mlp, 3):
            refuse(f"its MLPs are of type {type(layer.mlp).__name__}")
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            linear = getattr(norm, "_quant_linear", None)
            if linear is not None and getattr(linear, "input_scale", None) is not None:
                refuse("its norms quantise what they hand on")


def _bytes(module: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())
