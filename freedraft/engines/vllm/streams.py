"""Parsers of reasoning and tool calls read a run of accepted tokens one by one; the client still gets one message.

vLLM's parsers read a stream by deltas. Where a delta has several tokens, many of them lose, double or misplace text. So
a delta's text remembers what each token added, and `parse_delta` is called once per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.hooks import STREAM_HOOKS, vllm_version
from freedraft.engines.vllm.patching import after, wrap_once

logger = logging.getLogger(__name__)

_ENDS = "_freedraft_ends"  # of a detokenizer: length of the output text after each token that was not sent yet


class TextOfTokens(str):
    """A text that knows its tokens' parts, also of a sum of two."""

    parts: tuple[str, ...]

    def __new__(cls, parts: Iterable[str]) -> TextOfTokens:
        parts = tuple(parts)
        made = super().__new__(cls, "".join(parts))
        made.parts = parts
        return made

    def __add__(self, other: str) -> str:
        return TextOfTokens(self.parts + other.parts) if isinstance(other, TextOfTokens) else str(self) + other


def parse_by_token() -> None:
    """Hook the detokenizer and all parsers that this process makes from now on. Safe to call more than once."""
    if missing := check(STREAM_HOOKS):
        line = (
            "freedraft: vLLM %s lacks %s: its parsers of streamed reasoning and tool calls may misplace runs of tokens"
        )
        logger.warning(line, vllm_version(), "; ".join(missing))
        return
    from vllm.parser.parser_manager import ParserManager
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    wrap_once(BaseIncrementalDetokenizer, "update", _update_by_token)
    wrap_once(BaseIncrementalDetokenizer, "get_next_output_text", _with_parts)
    wrap_once(ParserManager, "get_parser", after(_hook_parser))


def _hook_parser(parser: Any, *args: Any, **kwargs: Any) -> None:
    if parser is not None:
        wrap_once(parser, "parse_delta", _parse_by_token)


def _update_by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, new_token_ids: Sequence[int], stop_terminated: bool) -> str | None:
        ends = vars(self).setdefault(_ENDS, [])
        for left, token in zip(reversed(range(len(new_token_ids))), new_token_ids, strict=True):
            stop: str | None = original(self, [token], stop_terminated and not left)
            ends.append(len(self.output_text))
            if stop is not None:
                return stop
        return None

    return update


def _with_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_next_output_text(self: Any, finished: bool, delta: bool) -> str:
        sent = self._last_output_text_offset
        text: str = original(self, finished, delta)
        ends: list[int] = vars(self).pop(_ENDS, [])
        if not delta or not (ends or text):
            return text
        # What may begin a stop string is sent with later tokens.
        cuts = [min(max(end - self.stop_buffer_length - sent, 0), len(text)) for end in ends[:-1]]
        return TextOfTokens(text[begin:end] for begin, end in pairwise([0, *cuts, len(text)]))

    return get_next_output_text


def _parse_by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse_delta(
        self: Any, delta_text: str, delta_token_ids: list[int], *args: Any, finished: bool, **kwargs: Any
    ) -> Any:
        texts = getattr(delta_text, "parts", (delta_text,))
        last = len(texts) - 1
        messages = []
        for at, text in enumerate(texts):
            ids = delta_token_ids[at : None if at == last else at + 1]
            messages.append(original(self, text, ids, *args, finished=finished and at == last, **kwargs))
        return _joined([message for message in messages if message is not None])

    return parse_delta


def _joined(messages: list[Any]) -> Any:
    """One DeltaMessage of several: texts are appended, and arguments to the call that they continue; None of none."""
    if not messages:
        return None
    whole, *rest = messages
    for message in rest:
        calls = whole.tool_calls
        for call in message.tool_calls:
            begun = calls[-1].function if calls and calls[-1].index == call.index else None
            if begun and call.function and not (call.id or call.function.name):
                begun.arguments = (begun.arguments or "") + (call.function.arguments or "")
            else:
                calls = [*calls, call]
        for name in message.model_fields_set:
            old, new = getattr(whole, name, None), getattr(message, name)
            value = calls if name == "tool_calls" else new if old is None else old if new is None else old + new
            setattr(whole, name, value)
    return whole
