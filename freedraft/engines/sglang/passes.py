"""`Passes`: SGLang's forward passes with another function in place of the model, whose layers have to be plain; the
sublayers that a recipe keeps."""

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from freedraft.config import ConfigError
from freedraft.draft_model import Recipe
from freedraft.engines.draft_round import Sublayer, T, on_device, sublayers_of
from freedraft.engines.sglang.graphs import Captured, swapped_in
from freedraft.engines.sglang.verify import SPARE_SLOT
from freedraft.step import Step

Forward = Callable[..., Any]  # Same signature as the forward of SGLang's models
Kept = tuple[Sublayer, ...]  # The sublayers of a pass

# Modules of SGLang with layers that compute h + attention(norm(h)), then h + mlp(norm(h)), and nothing else.
PLAIN = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def kept_of(decoder: Any, recipe: Recipe) -> Kept:
    """Return the sublayers of a decoder that `recipe` keeps, in order."""
    each = zip(sublayers_of(decoder.layers), recipe.bits, strict=True)
    return tuple(_whole(*sublayer) for sublayer, skips in each if not skips)


def _whole(norm: Any, run: Any, is_attention: bool) -> Sublayer:
    """Return a sublayer with its full output on every tensor-parallel rank: some of SGLang's leave the sum over ranks
    to the next layer boundary."""
    projection = run.o_proj if is_attention else run.down_proj
    return norm, run if projection.reduce_results else _Summed(run), is_attention


class _Summed(NamedTuple):
    sublayer: Any

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(self.sublayer(*args, **kwargs))


def check_structure(model: Any) -> None:
    """Check that a model is a stack of plain pre-norm layers, by the code that runs instead of the model's name: a
    family counts as Llama if it runs Llama's code. Raises ConfigError: one line with the reason."""
    name = type(model).__name__

    def refuse(why: str) -> None:
        raise ConfigError(
            f"cannot skip layers of {name} ({why}): what runs as Llama, Mistral, Qwen2 or Qwen3 can be drafted with; "
            "use --speculative-algorithm sssd"
        )

    codes = [(importlib.import_module(f"sglang.srt.models.{module}"), prefix) for module, prefix in PLAIN.items()]

    def runs(module: Any, part: str) -> bool:
        return any(type(module).forward is getattr(code, f"{prefix}{part}").forward for code, prefix in codes)

    if not runs(model, "ForCausalLM") or not runs(getattr(model, "model", None), "Model"):
        refuse("its forward pass is its own")
    layers = list(model.model.layers)
    if getattr(model, "capture_aux_hidden_states", False):
        refuse("it captures hidden states")
    for layer in layers:
        if not runs(layer, "DecoderLayer"):
            refuse(f"its layers are of type {type(layer).__name__}")
        if not runs(layer.mlp, "MLP"):
            refuse(f"its MLPs are of type {type(layer.mlp).__name__}")
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            linear = getattr(norm, "_quant_linear", None)
            if linear is not None and getattr(linear, "input_scale", None) is not None:
                refuse("its norms quantise what they hand on")


class Tokens(NamedTuple):
    """R tokens of a pass.

    Attributes:
        rows: int64 [R] on the CPU, batch row of each token's request; a request may have several tokens.
        past: int64 [R] on the CPU, number of tokens before it in its request.
        rows_there: int64 [R], `rows` on the device; ids: int64 [R].
        positions: int64 [R], `past` on the device; slots: int64 [R], KV slots to write.
    """

    rows: torch.Tensor
    past: torch.Tensor
    rows_there: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class WindowedRead(NamedTuple):
    """Windowed read of R requests of a step. rows: int64 [R], rows of `req_to_token` with the tokens to read; tokens:
    int64 [R] on the CPU, number of omitted tokens; tokens_there: `tokens` on the device."""

    key: bytes
    rows: torch.Tensor
    tokens: torch.Tensor
    tokens_there: torch.Tensor


class Passes:
    """Runs functions in place of the model in SGLang's forward call. Raises ConfigError: the model is not built of
    plain pre-norm layers."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._model = runner.model
        check_structure(self._model)
        self.decoder = self._model.model

    def run_in_place(self, forward: Forward, batch: ForwardBatch, captured: Captured | None = None) -> Any:
        """Run `forward` in place of the model, eagerly unless `captured`. Returns SGLang's LogitsProcessorOutput."""
        graphs = swapped_in(self.runner, captured or Captured(self.runner.attn_backend, None))
        with self._in_place(forward), graphs, torch.no_grad():
            return self.runner.forward(batch).logits_output

    @contextlib.contextmanager
    def _in_place(self, forward: Forward) -> Iterator[None]:
        """Replace the model's forward by `forward` in this context; SGLang's code around the model stays the same."""
        model = self._model
        model.forward = forward
        try:
            yield
        finally:
            del model.forward

    def one_token_each(
        self, whole: Any, tokens: Tokens, *, left_out: WindowedRead | None = None, as_nodes: bool = False
    ) -> ForwardBatch:
        """Build a pass over one token for each of R rows. left_out: windowed read; None reads the whole past. as_nodes:
        run as verification of one node, the form that graphs are captured in, instead of plain decoding, which every
        attention backend runs eagerly."""
        part = copy.copy(whole)
        part.input_ids, part.out_cache_loc = tokens.ids, tokens.slots
        part.reqs = [whole.reqs[i] for i in tokens.rows.tolist()]
        part.req_pool_indices = whole.req_pool_indices[tokens.rows_there]
        read, read_there = tokens.past, tokens.positions
        if left_out is not None:
            part.req_pool_indices = left_out.rows.to(part.req_pool_indices.dtype)
            read, read_there = read - left_out.tokens, read_there - left_out.tokens_there
        read_there = read_there.to(whole.seq_lens.dtype)
        if whole.orig_seq_lens is not None:
            part.orig_seq_lens = whole.orig_seq_lens[tokens.rows_there]
        if as_nodes:  # as the worker verifies a tree that is only a root
            part.forward_mode = ForwardMode.TARGET_VERIFY
            part.seq_lens, part.seq_lens_cpu = read_there, read
            part.spec_info = NgramVerifyInput(
                draft_token=tokens.ids,
                custom_mask=tokens.ids.new_ones(int(read.sum()) + len(read), dtype=torch.bool),
                positions=tokens.positions,
                draft_token_num=1,
            )
        else:
            part.forward_mode = ForwardMode.DECODE
            part.seq_lens, part.seq_lens_cpu = read_there + 1, read + 1
            part.spec_info = None
        part.seq_lens_sum = int(part.seq_lens_cpu.sum())
        part.return_logprob = False
        part.top_logprobs_nums = part.token_ids_logprobs = None
        batch = ForwardBatch.init_new(part, self.runner, return_hidden_states_before_norm=False)
        if left_out is not None:  # positions with which the keys were rotated
            batch.positions = tokens.positions
        return batch

    # Methods of `Target`

    def parts(self) -> tuple[Any, Any, Any, Any]:
        model, decoder = self._model, self.decoder

        def head(hidden: torch.Tensor, forward_batch: Any) -> Any:
            ids = forward_batch.input_ids
            return model.logits_processor(ids, hidden, model.lm_head, forward_batch).next_token_logits

        return decoder.embed_tokens, decoder.layers, decoder.norm, head

    def prompt_lengths(self, step: Step) -> NDArray[Any]:
        return np.array([len(request.origin_input_ids_unpadded) for request in step.engine.reqs])

    def locate(self, step: Step, row: int) -> tuple[Any, int]:
        return (step.engine, row), int(step.engine.seq_lens_cpu[row])

    def read_again(self, place: Any, tokens: NDArray[np.int64], first: int, sets: int, work: Callable[..., T]) -> T:
        """See `Target.read_again`. Eager decoding pass with a row per token, written to SGLang's spare slot. An
        attention backend that reads the token's own KV from the pool (the CPU platform's does) reads the target's."""
        (whole, row), results = place, list[T]()
        past = np.tile(np.arange(first, first + len(tokens)), sets)
        rows = np.full(len(past), row)
        rows_there, ids, positions = on_device(np.stack((rows, np.tile(tokens, sets), past)), whole.seq_lens.device)
        slots = torch.full((len(past),), SPARE_SLOT, device=whole.seq_lens.device)
        here = torch.from_numpy(rows), torch.from_numpy(past)
        batch = self.one_token_each(whole, Tokens(*here, rows_there, ids, positions, slots))

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, **_: Any) -> Any:
            results.append(work(input_ids, positions, forward_batch=forward_batch))
            return LogitsProcessorOutput(next_token_logits=None)

        self.run_in_place(forward, batch)
        return results[0]
