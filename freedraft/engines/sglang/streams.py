"""Patches of SGLang 0.5.23, so that a stream does not depend on how many tokens came at once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import STREAM_HOOKS
from freedraft.engines.sglang.patches import configured

PARSERS = ["function_call.function_call_parser.FunctionCallParser", "parser.reasoning_parser.ReasoningParser"]
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"


def register_stream_hooks(names: Callable[[], set[str]]) -> None:
    """Register the patches, active for the algorithms `names`; log one line if this SGLang lacks what they need."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if missing := "; ".join(check(STREAM_HOOKS)):
        line = "freedraft: streamed tool calls may depend on how many tokens come at once (%s); see 'freedraft doctor'"
        logging.getLogger(__name__).warning(line, missing)
        return
    for parser in PARSERS:
        HookRegistry.register(f"sglang.srt.{parser}.__init__", partial(parse_by_token, names=names), HookType.AFTER)
    HookRegistry.register(FINISH, partial(count_reasoning_to_the_end, names=names), HookType.AFTER)


def parse_by_token(_: None, parser: Any, *_args: Any, names: Any, tokenizer: Any = None, **_others: Any) -> None:
    """Let a new parser read chunks token by token: many of SGLang's return one thing of a chunk and lose the others."""
    if tokenizer is not None and configured(names):
        parse = parser.parse_stream_chunk  # returns two texts, or a text and a list of calls
        parser.parse_stream_chunk = lambda chunk_text: reduce(
            lambda before, now: (before[0] + now[0], before[1] + now[1]), map(parse, token_texts(tokenizer, chunk_text))
        )


def token_texts(tokenizer: Any, text: str) -> list[str]:
    """Return the texts of the tokens of `text`, at least one. Characters of several tokens stay whole."""
    ends = [0]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for piece in tokenizer.batch_decode([[token] for token in tokens], skip_special_tokens=False):
        if (at := text.find(piece, ends[-1])) >= 0:
            ends.append(at + len(piece))
    return [text[start:end] for start, end in itertools.pairwise(sorted({*ends, len(text)}))] or [text]


def count_reasoning_to_the_end(_: None, req: Any, *_args: Any, names: Callable[[], set[str]]) -> None:
    """Count no reasoning tokens after the end of a request within a run; SGLang counts the whole run."""
    if req.finished_len is not None and configured(names):
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
