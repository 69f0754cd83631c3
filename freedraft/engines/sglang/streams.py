"""Patches of SGLang 0.5.23, so that a stream does not depend on how many tokens came at once."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import STREAM_HOOKS
from freedraft.engines.sglang.patches import configured

logger = logging.getLogger(__name__)
PARSERS = (
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.__init__",
    "sglang.srt.parser.reasoning_parser.ReasoningParser.__init__",
)
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"


def register_stream_hooks(names: Callable[[], set[str]]) -> None:
    """Register the patches in SGLang's hook registry. names: algorithms that they are active for."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if missing := check(STREAM_HOOKS):
        logger.warning(
            "freedraft: streamed tool calls and reasoning may depend on how many tokens come at once (%s); "
            "see 'freedraft doctor' for what this version of freedraft supports",
            "; ".join(missing),
        )
        return
    for parser in PARSERS:
        HookRegistry.register(parser, partial(parse_by_token, names=names), HookType.AFTER)
    HookRegistry.register(FINISH, partial(count_reasoning_to_the_end, names=names), HookType.AFTER)


def parse_by_token(
    _: None, parser: Any, *_args: Any, names: Callable[[], set[str]], tokenizer: Any = None, **_others: Any
) -> None:
    """Let a new parser read a chunk token by token. Many of SGLang's return one thing per chunk and lose the others, or
    look for a mark at its start."""
    if tokenizer is None or not configured(names):
        return
    parse = parser.parse_stream_chunk

    def parse_stream_chunk(chunk_text: str) -> tuple[Any, Any]:
        texts, others = zip(*map(parse, token_texts(tokenizer, chunk_text)), strict=True)
        return reduce(operator.add, texts), reduce(operator.add, others)

    parser.parse_stream_chunk = parse_stream_chunk


def token_texts(tokenizer: Any, text: str) -> list[str]:
    """Return the texts of the tokens of `text`, at least one. Characters of several tokens stay whole; what decodes to
    another text stays with the next token."""
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
