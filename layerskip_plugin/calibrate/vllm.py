"""`VllmModel`: the model that is calibrated, in vLLM: with the dtype, the kernels and the KV cache that will serve."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freedraft.engines.hooks import check
from freedraft.engines.vllm.draft_model import PagedDraftModel
from freedraft.engines.vllm.draft_passes import DraftPass, PagedDraftRound
from freedraft.engines.vllm.guards import check_model
from freedraft.engines.vllm.hooks import CALIBRATION_HOOKS, MODEL_HOOKS, vllm_version
from freedraft.engines.vllm.kept_layers import Backbone
from freedraft.engines.vllm.pages import Pages
from layerskip_plugin.calibrate.model import CalibrationModel
from layerskip_plugin.calibrate.pass_times import VERIFIED, PassTimes, engine_times
from layerskip_plugin.calibrate.sample import Sample, Text
from layerskip_plugin.skip_set import model_fingerprint

HEAD_ROWS = 256
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model must be in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # both runners have the same modules and kernels
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_AOT_COMPILE": "0",  # reloading such a cache fails on CPU in 0.32
}


@dataclass(frozen=True)
class PagedText(Text):
    """A text that `VllmModel` has read.

    Attributes:
        pages: int32[P], the pages of its KV, which are free again when nothing refers to the text.
    """

    pages: Tensor


class VllmModel(CalibrationModel):
    """An engine of this process that serves nobody else.

    Texts are read by the engine's modules into pages of its KV cache. A token is drafted as in a draft pass: a decoding
    row of its own, whose KV goes to a copy of the page that it belongs to, so that all else it reads is the whole
    model's. There is no second copy of the weights.

    Args:
        folder: of the model.
        max_model_len: tokens that a text, or a context to be timed, may have.
        engine_args: of vLLM's `LLM`, as they will be served with.

    Raises:
        ValueError: the engine does not start, is spread over ranks, or its layers cannot be skipped.
    """

    def __init__(self, folder: Path, max_model_len: int, engine_args: Mapping[str, Any]) -> None:
        self.llm = _start(folder, {"max_model_len": max_model_len} | dict(engine_args))
        engine = self.llm.llm_engine
        self.runner = engine.model_executor.driver_worker.worker.model_runner
        self.pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self.draft_model = PagedDraftModel(self.runner, Backbone.of(self.runner.model), engine.vllm_config)
        self.backbone = self.draft_model.backbone
        self.n_layers = self.draft_model.n_layers
        self.fingerprint = model_fingerprint(engine.vllm_config.model_config.hf_config)
        self.device = str(self.runner.device)
        table = self.runner.input_batch.block_table[0]
        self.page_size, self.table_width = table.block_size, table.max_num_blocks_per_req
        # Attention may take a block of the pool for several pages.
        self.pages_of_block = engine.vllm_config.cache_config.block_size // self.page_size
        self.blocks = self.runner.kv_cache_config.num_blocks
        self.rows = max(1, min(self.runner.max_num_reqs, self.pool.get_num_free_blocks() // 2))
        self.own_pages, _ = self._take(self.rows)
        self._passes: list[DraftPass] = []

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.__dict__.clear()
        gc.collect()
        cleanup_dist_env_and_memory()

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        parameters = SamplingParams(temperature=0, max_tokens=max_new_tokens, detokenize=False)
        requests = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(requests, parameters, use_tqdm=False)]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], keep: Tensor | None = None) -> PagedText:
        n, limit = len(tokens), min(self.runner.max_model_len, self.runner.max_num_tokens)
        if not 0 < n <= limit:
            raise ValueError(f"a text must have between 1 and {limit} tokens, not {n}: raise max_num_batched_tokens")
        pages, blocks = self._take(-(-n // (self.page_size * self.pages_of_block)))
        positions = torch.arange(n, device=self.device)
        ids = torch.as_tensor(np.asarray(tokens, np.int64), device=self.device)
        keep = (torch.zeros(0, dtype=torch.int64) if keep is None else keep).to(self.device)
        states: list[Tensor] = []
        final = self.draft_model.run(
            partial(self._layers, keep, states),
            ids,
            positions=positions,
            slots=self._slots(pages, positions),
            lengths=np.array([n], np.int32),
            starts=self._starts(1, n),
            pages=pages[None],
        )
        text = PagedText(ids, self.best(final), final, keep, torch.stack(states), pages)
        weakref.finalize(text, self.pool.free_blocks, blocks).atexit = False
        return text

    def _layers(self, keep: Tensor, states: list[Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        """The normed last hidden states, float[T, hidden]; `states` takes those before each sublayer."""
        h = self.backbone.embedding(ids)
        states.append(h[keep])
        for layer in self.backbone.layers:
            h = h + layer.self_attn(positions=positions, hidden_states=layer.input_layernorm(h))
            states.append(h[keep])
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            states.append(h[keep])
        return self.norm(h)

    @torch.inference_mode()
    def sublayer(self, index: int, h: Tensor, sample: Sample) -> Tensor:
        layer, rows = self.backbone.layers[index // 2], h.flatten(0, 1)
        if index % 2:
            parts = [layer.mlp(layer.post_attention_layernorm(part)) for part in rows.split(self.runner.max_num_tokens)]
        else:
            positions = torch.cat([p.to(self.device) for p in sample.positions])
            tables = pad_sequence([text.pages for text in sample.texts], batch_first=True)
            counts = torch.tensor([len(p) for p in sample.positions], device=self.device)
            tables = tables.repeat_interleave(counts, 0)
            token = torch.arange(len(rows), device=self.device) % len(positions)
            parts = [
                self._attend(layer, part, positions[of], tables[of])
                for part, of in zip(rows.split(self.rows), token.split(self.rows), strict=True)
            ]
        return h + torch.cat(parts).view_as(h)

    def _attend(self, layer: Any, h: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """What attention adds to each row of float[n, hidden], a decoding row at its position over its block table."""
        n, own = len(h), self.own_pages[: len(h)]
        page = (positions // self.page_size)[:, None]
        _copy_pages(layer.self_attn.attn.kv_cache, self.blocks * self.pages_of_block, tables.gather(1, page)[:, 0], own)
        added: Tensor = self.draft_model.run(
            lambda h, positions: layer.self_attn(positions=positions, hidden_states=layer.input_layernorm(h)),
            h,
            positions=positions,
            slots=own.long() * self.page_size + positions % self.page_size,
            lengths=(positions + 1).int().cpu().numpy(),
            starts=self._starts(n, 1),
            pages=tables.scatter(1, page, own[:, None]).contiguous(),
        )
        return added

    @torch.inference_mode()
    def norm(self, h: Tensor) -> Tensor:
        normed: Tensor = self.backbone.norm(h.reshape(-1, h.shape[-1]))
        return normed.view_as(h)

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        parts = final.reshape(-1, final.shape[-1]).split(HEAD_ROWS)
        return torch.cat([self.backbone.logits(part).argmax(-1) for part in parts]).view(final.shape[:-1])

    @torch.inference_mode()
    def pass_times(self, context: int) -> PassTimes:
        """Draft passes run as they will be served, compiled and with CUDA graphs where the engine has them: one
        through all sublayers, one without every second attention, one without every second MLP."""
        longest = context + VERIFIED[-1]
        if longest > self.runner.max_model_len:
            raise ValueError(
                f"context {context}: the engine was started for {self.runner.max_model_len} tokens, and timing needs "
                f"{longest}: ask for shorter contexts, or raise max_model_len in --engine-args"
            )
        if not self._passes:
            self._passes = self._build_passes()
        pages, blocks = self._take(-(-longest // (self.page_size * self.pages_of_block)))
        try:
            passes = [partial(self._draft, each, pages, context) for each in self._passes]
            verify = [partial(self._verify, pages, context, n) for n in VERIFIED]
            times = engine_times(passes, verify, self.n_layers, context)
        finally:
            self.pool.free_blocks(blocks)
        # A plain step is served like the draft pass of all sublayers; of verification only the growth is taken, since
        # it runs without CUDA graphs here.
        whole = times.draft(self.empty())
        return replace(times, verify=lambda n: whole + times.verify(n) - times.verify(1))

    def _build_passes(self) -> list[DraftPass]:
        passes = [self.draft_model.build(skip, top_k=1, entropy=False, optimize=True) for skip in self.timed_sets()]
        if self.device != "cpu":
            self.draft_model.capture(self.table_width)
        return passes

    def _draft(self, draft_pass: DraftPass, pages: Tensor, context: int) -> None:
        of_request = Pages(pages[None], np.zeros(1, np.intp), np.array([len(pages)]), self.page_size)
        draft_round = PagedDraftRound(self.draft_model, draft_pass, of_request, np.array([context - 1]), 1)
        draft_round.read(draft_round.launch(np.zeros(1, np.intp), np.zeros(1, np.int32), 0))

    def _verify(self, pages: Tensor, context: int, n: int) -> None:
        positions = torch.arange(context - 1, context - 1 + n, device=self.device)
        self.draft_model.run(
            self._passes[0].layers,
            torch.zeros_like(positions),
            positions=positions,
            slots=self._slots(pages, positions),
            lengths=np.array([context - 1 + n], np.int32),
            starts=self._starts(1, n),
            pages=pages[None],
        ).cpu()

    def _slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        return pages[positions // self.page_size].long() * self.page_size + positions % self.page_size

    def _starts(self, requests: int, query_tokens: int) -> tuple[Tensor, Tensor]:
        """Where the query tokens of each request begin; on the device and on the host."""
        starts = torch.arange(0, requests * query_tokens + 1, query_tokens, dtype=torch.int32)
        return starts.to(self.device), starts

    def _take(self, count: int) -> tuple[Tensor, list[Any]]:
        """int32[count * pages of a block], pages of blocks that are taken from the engine's pool; and these blocks."""
        free = self.pool.get_num_free_blocks()
        if count > free:
            raise ValueError(
                f"the KV cache has room for {free} more blocks, not {count}: calibrate on fewer prompts, or give the "
                "engine more memory (gpu_memory_utilization in --engine-args, VLLM_CPU_KVCACHE_SPACE on a CPU)"
            )
        blocks = self.pool.get_new_blocks(count)
        first = torch.tensor([block.block_id for block in blocks], dtype=torch.int32) * self.pages_of_block
        pages = first[:, None] + torch.arange(self.pages_of_block, dtype=torch.int32)
        return pages.flatten().to(self.device), blocks


def _start(folder: Path, engine_args: dict[str, Any]) -> Any:
    """vLLM's `LLM`, in this process."""
    if missing := check(MODEL_HOOKS + CALIBRATION_HOOKS):
        raise ValueError(f"vLLM {vllm_version()} lacks what calibration needs ({'; '.join(missing)})")
    for key, value in engine_args.items():
        if key.endswith("_parallel_size") and value != 1:
            raise ValueError(f"engine-args: {key} {value}: calibration runs on one rank: leave it out")
        if key in ("speculative_config", "enable_lora", "kv_transfer_config"):
            raise ValueError(f"engine-args: {key}: the model is calibrated by itself: leave it out")
    os.environ.update(ENVIRONMENT)
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    # Pages of texts are ours alone.
    given = engine_args | {"enable_prefix_caching": False}
    try:
        check_model(EngineArgs(str(folder), **given).create_model_config())
        return LLM(str(folder), **given)
    except TypeError as error:
        raise ValueError(f"engine-args: {error}") from None
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"vLLM does not start: {error} (calibration starts an engine of its own: stop a server on the same device)"
        ) from None


def _copy_pages(kv_cache: Tensor, number: int, sources: Tensor, targets: Tensor) -> None:
    """Copy pages of one layer's KV cache, which has `number` of them along one of its dimensions."""
    dimension = kv_cache.shape.index(number)
    values = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
    values.index_copy_(dimension, targets.long(), values.index_select(dimension, sources.long()))
