"""Parsers of reasoning and tool calls read each token alone, since many lose or misplace text of several; what they
find in the tokens of a step is still one message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.hooks import STREAM_HOOKS
from freedraft.engines.vllm.patching import after, wrap_once

_BEGINS = "_freedraft_begins"  # of a detokenizer: offsets of the texts of tokens that have not been sent


class TextOfTokens(str):
    """A text, or the sum of two, that knows what each token added."""

    parts: list[str]

    def __new__(cls, parts: Iterable[str]) -> TextOfTokens:
        made = super().__new__(cls, "".join(parts := list(parts)))
        made.parts = parts
        return made

    def __add__(self, other: str) -> str:
        return TextOfTokens(self.parts + other.parts) if isinstance(other, TextOfTokens) else str(self) + other


def parse_by_token() -> None:
    """Hook the detokenizer, and the parsers that this process gets from now on."""
    if missing := check(STREAM_HOOKS):
        logging.getLogger(__name__).warning("freedraft: parsers read the tokens of a step at once: %s", missing)
        return
    from vllm.parser.parser_manager import ParserManager
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    wrap_once(BaseIncrementalDetokenizer, "update", _update)
    wrap_once(BaseIncrementalDetokenizer, "get_next_output_text", _next_text)
    wrap_once(ParserManager, "get_parser", after(_hook_parser))


def _hook_parser(parser: Any, *args: Any, **kwargs: Any) -> None:
    if parser is not None:
        wrap_once(parser, "parse_delta", _parse_delta)


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


def _parse_delta(
    original: Callable[..., Any], self: Any, delta_text: str, delta_token_ids: list[int], *args: Any, finished: bool,
    **kwargs: Any,
) -> Any:  # fmt: skip
    found, left = None, list(delta_token_ids)
    *texts, last = getattr(delta_text, "parts", None) or [delta_text]
    for text in texts:
        found = _joined(found, original(self, text, left[:1], *args, finished=False, **kwargs))
        del left[:1]
    return _joined(found, original(self, last, left, *args, finished=finished, **kwargs))


def _joined(whole: Any, message: Any) -> Any:
    if whole is None or message is None:
        return message if whole is None else whole
    calls = whole.tool_calls
    for call in message.tool_calls:
        begun = calls[-1].function if calls and calls[-1].index == call.index else None
        if begun and call.function and not (call.id or call.function.name):
            begun.arguments = (begun.arguments or "") + (call.function.arguments or "")
        else:
            calls = [*calls, call]
    for name in message.model_fields_set:
        old, new = getattr(whole, name, None), getattr(message, name)
        setattr(whole, name, calls if name == "tool_calls" else old + new if old and new else old or new)
    return whole
