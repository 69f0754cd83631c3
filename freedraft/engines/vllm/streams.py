"""Streams bring each token alone, as without drafts: endpoints and parsers lose or misplace text of several."""

import copy
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any, Self

from freedraft.engines.hooks import check
from freedraft.engines.vllm.hooks import STREAM_HOOKS
from freedraft.engines.vllm.patching import wrap_once

_BEGINS = "_freedraft_begins"  # of a detokenizer: offsets of the texts of tokens that have not been sent


class TextOfTokens(str):
    """A text, or the sum of two, that knows what each token added."""

    parts: list[str]

    def __new__(cls, parts: Iterable[str]) -> Self:
        made = super().__new__(cls, "".join(parts := list(parts)))
        made.parts = parts
        return made

    def __add__(self, other: str) -> str:
        return TextOfTokens(self.parts + other.parts) if isinstance(other, TextOfTokens) else str(self) + other


def stream_by_token() -> None:
    """Hook the detokenizer, and what every endpoint of this process reads."""
    if missing := check(STREAM_HOOKS):
        logging.getLogger(__name__).warning("freedraft: streams bring the tokens of a step at once: %s", missing)
        return
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    wrap_once(BaseIncrementalDetokenizer, "update", _update)
    wrap_once(BaseIncrementalDetokenizer, "get_next_output_text", _next_text)
    wrap_once(AsyncLLM, "generate", _generate)


def _update(original: Callable[..., Any], self: Any, new_token_ids: Sequence[int], stop_terminated: bool) -> Any:
    stop, left = None, len(new_token_ids)
    while left and stop is None:
        vars(self).setdefault(_BEGINS, []).append(len(self.output_text))
        stop = original(self, [new_token_ids[-left]], stop_terminated and left == 1)
        left -= 1
    return stop


def _next_text(original: Callable[..., str], self: Any, finished: bool, delta: bool) -> str:
    sent = self._last_output_text_offset + self.stop_buffer_length  # later tokens release what is held back
    text, begins = original(self, finished, delta), vars(self).pop(_BEGINS, [])
    cuts = [max(begin - sent, 0) for begin in begins[1:]]
    parts = (text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))
    return TextOfTokens(parts if begins or text else ()) if delta else text


async def _generate(
    original: Callable[..., Any], engine: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    asked = getattr(sampling_params, "stream_interval", None) or 1
    async with aclosing(original(engine, prompt, sampling_params, *args, **kwargs)) as outputs:
        async for output in outputs:
            for piece in pieces(output, max(asked, engine.output_processor.stream_interval)):
                yield piece


def pieces(output: Any, size: int = 1) -> Iterator[Any]:
    """vLLM's RequestOutput as several, of one choice and at most `size` tokens each; what comes once comes with the
    first of a choice or, at its end, with the last. Each has the cumulative logprob of all."""
    if all(len(getattr(completion.text, "parts", ())) <= size for completion in output.outputs):
        yield output
        return
    for completion in output.outputs:
        parts = getattr(completion.text, "parts", ())
        for start in (starts := range(0, max(len(parts), 1), size)):
            last = start == starts[-1]
            rows = slice(start, None if last else start + size)
            piece, made = copy.copy(output), copy.copy(completion)
            piece.outputs, piece.finished = [made], output.finished and last and completion is output.outputs[-1]
            made.text, made.token_ids = "".join(parts[rows]), completion.token_ids[rows]
            made.logprobs = completion.logprobs and completion.logprobs[rows]
            if (mask := completion.sampling_mask) is not None:
                made.sampling_mask = type(mask)(mask.token_ids[rows])
            if start:
                piece.prompt_logprobs, piece.prompt_token_id_logprobs = output.prompt_logprobs and [], None
            if not last:
                made.finish_reason = made.stop_reason = made.routed_experts = made.spec_decode_metrics = None
                made.weight_versions = piece.kv_transfer_params = piece.ec_transfer_params = None
            yield piece
