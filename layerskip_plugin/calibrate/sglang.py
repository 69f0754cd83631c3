"""`SglangModel`: the model that is calibrated, in SGLang: with the dtype, kernels and KV pool that will serve."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freedraft.config import ConfigError
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.hooks import check, installed_version
from freedraft.engines.sglang.cpu import selected
from freedraft.engines.sglang.draft_model import PagedDraftModel, most_likely, on_host
from freedraft.engines.sglang.graphs import WidthGraphs
from freedraft.engines.sglang.guards import BACKENDS, verify_backend_of
from freedraft.engines.sglang.hooks import CALIBRATION_HOOKS, DISTRIBUTIONS, MODEL_HOOKS
from freedraft.engines.sglang.layers import Stages, run_stages, stages_of
from layerskip_plugin.calibrate.model import CalibrationModel
from layerskip_plugin.calibrate.pass_times import VERIFIED, PassTimes, engine_times
from layerskip_plugin.calibrate.sample import Sample, Text
from layerskip_plugin.skip_set import model_fingerprint

ROWS = 64
"""Most rows of a pass."""


@dataclass(frozen=True)
class PooledText(Text):
    """A text that `SglangModel` has read.

    Attributes:
        slots: int64[T], those of its KV, which are free again when nothing refers to the text.
    """

    slots: Tensor


class SglangModel(CalibrationModel):
    """SGLang's ModelRunner in this process, without a scheduler, that serves nobody.

    As in `VllmModel`, a token is drafted as a decoding row of its own, whose KV goes to a copy of the page that it
    belongs to, so that all else it reads is the whole model's. There is no second copy of the weights.

    Args:
        folder: of the model.
        context: tokens that a text, or a context to be timed, may have.
        engine_args: of SGLang's `ServerArgs`, as it will be served with.

    Raises:
        ValueError: the engine does not start, is spread over ranks, or its layers cannot be skipped.
    """

    def __init__(self, folder: Path, context: int, engine_args: Mapping[str, Any]) -> None:
        self.runner = _start(folder, {"context_length": context} | dict(engine_args))
        try:
            self.draft_model = PagedDraftModel(self.runner, DraftRanks(get_parallel().tp_group))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        self.decoder = self.draft_model.decoder
        self.n_layers = self.draft_model.n_layers
        self.fingerprint = model_fingerprint(self.runner.model_config.hf_config)
        self.device = str(self.runner.device)
        self.allocator = self.runner.token_to_kv_pool_allocator
        self.page_size: int = self.allocator.page_size
        pool = self.runner.req_to_token_pool
        self.slots_of_row = pool.req_to_token
        self.rows = self._tensor(pool.alloc_rows(min(ROWS, pool.available_size())))
        self.own = self._take(len(self.rows) * self.page_size).view(-1, self.page_size)
        self.whole = stages_of(self.decoder, self.empty())
        self.widths = WidthGraphs(self.runner)
        self._passes: list[Stages] = []

    def close(self) -> None:
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        self.__dict__.clear()
        gc.collect()
        destroy_model_parallel()
        destroy_distributed_environment()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        size = len(self.rows)
        if len(prompts) > size:
            return self.generate(prompts[:size], max_new_tokens) + self.generate(prompts[size:], max_new_tokens)
        taken: list[Tensor] = []
        try:
            for prompt in prompts:
                self._check_length(len(prompt) + max_new_tokens)
                taken.append(self._take(len(prompt) + max_new_tokens))
            return self._answers(prompts, taken, max_new_tokens)
        finally:
            for slots in taken:
                self.allocator.free(slots)

    def _answers(
        self, prompts: Sequence[Sequence[int]], taken: Sequence[Tensor], max_new_tokens: int
    ) -> list[list[int]]:
        """The answer to the prompt of each row, whose KV goes to these slots."""
        ends, answers = self.runner.model_config.hf_eos_token_id or (), []
        for row, (prompt, slots) in enumerate(zip(prompts, taken, strict=True)):
            self.slots_of_row[self.rows[row], : len(slots)] = slots.int()
            answers.append(self._next(self._prompt(row, prompt, slots)))
        while going := [i for i, a in enumerate(answers) if len(a) < max_new_tokens and a[-1] not in ends]:
            past = torch.tensor([len(prompts[i]) + len(answers[i]) - 1 for i in going])
            ids = self._tensor([answers[i][-1] for i in going])
            slots = torch.stack([taken[i][n] for i, n in zip(going, past.tolist(), strict=True)])
            batch = self._decode(self.rows[self._tensor(going)], ids, past, slots)
            for i, token in zip(going, self._next(batch), strict=True):
                answers[i].append(token)
        return answers

    def _next(self, batch: ForwardBatch) -> list[int]:
        hidden_of = partial(run_stages, self.decoder, self.whole)
        return self.draft_model.logits(hidden_of, batch).argmax(-1).tolist()

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> PooledText:
        n = len(tokens)
        self._check_length(n)
        taken = self._take(n)
        slots = taken[:n]
        self.slots_of_row[self.rows[0], :n] = slots.int()
        keep = (torch.zeros(0, dtype=torch.int64) if keep is None else keep).to(self.device)
        states: list[Tensor] = []
        batch = self._prompt(0, tokens, slots)
        final = self.draft_model.compute(partial(self._layers, keep, states), batch)
        text = PooledText(batch.input_ids, self.best(final), final, keep, torch.stack(states), slots)
        weakref.finalize(text, self.allocator.free, taken).atexit = False
        return text

    def _layers(
        self, keep: Tensor, states: list[Tensor], ids: Tensor, positions: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """The normed last hidden states, float[T, hidden]; `states` takes those before each sublayer."""
        h = self.decoder.embed_tokens(ids)
        states.append(h[keep])
        for layer in self.decoder.layers:
            normed = layer.input_layernorm(h)
            h = h + layer.self_attn(positions=positions, hidden_states=normed, forward_batch=batch)
            states.append(h[keep])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            states.append(h[keep])
        return self.norm(h)

    @torch.inference_mode()
    def sublayer(self, index: int, h: Tensor, sample: Sample) -> Tensor:
        layer, rows = self.decoder.layers[index // 2], h.flatten(0, 1)
        if index % 2:
            return h + layer.mlp(layer.post_attention_layernorm(rows)).view_as(h)
        positions = torch.cat(sample.positions).cpu()
        slots = pad_sequence([text.slots for text in sample.texts], batch_first=True)
        counts = torch.tensor([len(p) for p in sample.positions], device=self.device)
        slots = slots.repeat_interleave(counts, 0)
        token = torch.arange(len(rows)) % len(positions)
        size = len(self.rows)
        parts = [
            self._attend(layer, part, positions[of], slots[of.to(self.device)])
            for part, of in zip(rows.split(size), token.split(size), strict=True)
        ]
        return h + torch.cat(parts).view_as(h)

    def _attend(self, layer: Any, h: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """What attention adds to each row of float[n, hidden], a decoding row at its position (on the CPU) of a text
        with these slots, int64[n, T]."""
        n, size = len(h), self.page_size
        own, rows, at = self.own[: len(h)], self.rows[: len(h)], positions.to(self.device)
        places = (at // size * size)[:, None] + torch.arange(size, device=self.device)
        if size > 1:
            pool, layer_id = self.runner.token_to_kv_pool, layer.self_attn.attn.layer_id
            of_page = slots.gather(1, places.clamp(max=slots.shape[1] - 1))
            for cache in (pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)):
                values = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
                values[own] = values[of_page]
        self.slots_of_row[rows, : slots.shape[1]] = slots.int()
        self.slots_of_row[rows[:, None], places] = own.int()
        batch = self._decode(rows, torch.zeros_like(at), positions, own[torch.arange(n, device=self.device), at % size])

        def attend(_: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
            normed = layer.input_layernorm(h)
            added: Tensor = layer.self_attn(positions=positions, hidden_states=normed, forward_batch=batch)
            return added

        return self.draft_model.compute(attend, batch)

    @torch.inference_mode()
    def norm(self, h: Tensor) -> Tensor:
        normed: Tensor = self.decoder.norm(h.reshape(-1, h.shape[-1]))
        return normed.view_as(h)

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        found = []
        for part in final.reshape(-1, final.shape[-1]).split(len(self.rows)):
            n = len(part)
            nothing = torch.zeros(n, dtype=torch.int64)
            batch = self._decode(self.rows[:n], self._tensor(nothing), nothing, self.own[:n, 0])
            found.append(self.draft_model.logits(lambda *_, part=part: part, batch).argmax(-1))
        return torch.cat(found).view(final.shape[:-1])

    @torch.inference_mode()
    def pass_times(self, context: int) -> PassTimes:
        """Draft passes and verification run as they will be served, with CUDA graphs where the engine has them."""
        self._check_length(context + VERIFIED[-1], f"context {context}: with what is verified behind it ")
        if not self._passes:
            self._passes = self._build_passes()
        slots = self._take(context + VERIFIED[-1])
        try:
            self.slots_of_row[self.rows[0], : len(slots)] = slots.int()
            passes = [partial(self._draft, stages, slots, context) for stages in self._passes]
            verify = [partial(self._verify, slots, context, n) for n in VERIFIED]
            return engine_times(passes, verify, self.n_layers, context)
        finally:
            self.allocator.free(slots)

    def _build_passes(self) -> list[Stages]:
        made = [
            self.draft_model.build(skip, top_k=1, entropy=False, optimize=True).stages for skip in self.timed_sets()
        ]
        self.draft_model.capture()
        self.widths.capture(VERIFIED, fixed_width=BACKENDS[verify_backend_of(self.runner)].fixed_width)
        return made

    def _draft(self, stages: Stages, slots: Tensor, context: int) -> None:
        if self.draft_model.has_graphs(stages):
            batch = self._nodes(slots, context - 1, 1)
        else:
            past = torch.tensor([context - 1])
            batch = self._decode(self.rows[:1], self._tensor([0]), past, slots[context - 1 : context])
        on_host(most_likely(self.draft_model.run(stages, batch), 1)[None], 1, False)

    def _verify(self, slots: Tensor, context: int, n: int) -> None:
        with self.widths.use(n):
            self.runner.forward(self._nodes(slots, context - 1, n)).logits_output.next_token_logits.argmax(-1).cpu()

    def _prompt(self, row: int, tokens: Sequence[int], slots: Tensor) -> ForwardBatch:
        """A pass over a whole text in this row, whose KV goes to these slots."""
        n = len(tokens)
        length, none = self._tensor([n]), self._tensor([0])
        return self._batch(
            ForwardMode.EXTEND,
            self.rows[row : row + 1],
            self._tensor(np.asarray(tokens, np.int64)),
            torch.arange(n, device=self.device),
            torch.tensor([n]),
            slots[:n],
            extend_num_tokens=n,
            extend_seq_lens=length.int(),
            extend_prefix_lens=none.int(),
            extend_start_loc=none.int(),
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[n],
            extend_logprob_start_lens_cpu=[0],
        )

    def _decode(self, rows: Tensor, ids: Tensor, past: Tensor, slots: Tensor) -> ForwardBatch:
        """A pass over one token for each row, behind as many as `past` says (on the CPU)."""
        return self._batch(ForwardMode.DECODE, rows, ids, self._tensor(past), past + 1, slots)

    def _nodes(self, slots: Tensor, past: int, n: int) -> ForwardBatch:
        """A pass that verifies a chain of n nodes in the first row, behind so many tokens."""
        ids = torch.zeros(n, dtype=torch.int64, device=self.device)
        positions = torch.arange(past, past + n, device=self.device)
        mask = torch.ones(n, past + n, dtype=torch.bool, device=self.device).tril(past)
        verified = NgramVerifyInput(
            draft_token=ids,
            custom_mask=(mask[:, past:] if selected() else mask).flatten(),
            positions=positions,
            draft_token_num=n,
        )
        where, length = slots[past : past + n], torch.tensor([past])
        return self._batch(ForwardMode.TARGET_VERIFY, self.rows[:1], ids, positions, length, where, spec_info=verified)

    def _batch(
        self,
        mode: ForwardMode,
        rows: Tensor,
        ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        slots: Tensor,
        **more: Any,
    ) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=self._tensor(lengths),
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            orig_seq_lens=self._tensor(lengths).int(),
            out_cache_loc=slots,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **more,
        )

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)

    def _check_length(self, n: int, what: str = "a text ") -> None:
        limit = min(int(self.runner.model_config.context_len), self.slots_of_row.shape[1])
        if not 0 < n <= limit:
            raise ValueError(
                f"{what}must have between 1 and {limit} tokens, not {n}: ask for shorter ones, or raise context_length "
                "in --engine-args"
            )

    def _take(self, count: int) -> Tensor:
        """int64: slots of the engine's pool for so many tokens, in whole pages."""
        pages = -(-count // self.page_size)
        slots: Tensor | None = self.allocator.alloc(pages * self.page_size)
        if slots is None:
            raise ValueError(
                f"the KV pool has room for {self.allocator.available_size()} more tokens, not {count}: calibrate on "
                "fewer prompts, or give the engine more memory (mem_fraction_static or max_total_tokens in "
                "--engine-args)"
            )
        return slots


def _start(folder: Path, engine_args: dict[str, Any]) -> Any:
    """SGLang's ModelRunner, in this process."""
    if missing := check(MODEL_HOOKS + CALIBRATION_HOOKS):
        raise ValueError(
            f"SGLang {installed_version(DISTRIBUTIONS)} lacks what calibration needs ({'; '.join(missing)})"
        )
    for key, value in engine_args.items():
        if key in ("tp_size", "dp_size", "pp_size") and value != 1:
            raise ValueError(f"engine-args: {key} {value}: calibration runs on one rank: leave it out")
        if key.startswith("speculative_") or key in ("enable_lora", "lora_paths"):
            raise ValueError(f"engine-args: {key}: the model is calibrated by itself: leave it out")
    from sglang.benchmark.one_batch import load_model
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    # With speculation, so that attention is what verifies drafts.
    given = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": VERIFIED[-1]} | engine_args
    try:
        args = ServerArgs(model_path=str(folder), **given)
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        return load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner
    except TypeError as error:
        raise ValueError(f"engine-args: {error}") from None
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"SGLang does not start: {error} (calibration starts an engine of its own: stop a server on the same "
            "device)"
        ) from None
