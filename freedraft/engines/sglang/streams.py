"""Streams bring each token alone, as without drafts: endpoints and parsers lose or misplace text of several."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import STREAM_HOOKS
from freedraft.engines.sglang.patches import serves_ours

GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
LENGTHS = "completion_tokens", "output_token_logprobs_length"  # of all tokens so far
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"


def register_stream_hooks() -> None:
    """Register the patches of streams; log one line if this SGLang lacks what they need."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if missing := "; ".join(check(STREAM_HOOKS)):
        line = "freedraft: streams bring the tokens of a step at once, which parsers may misread (%s)"
        logging.getLogger(__name__).warning(line, missing)
        return
    HookRegistry.register(GENERATE, stream_by_token, HookType.AROUND)
    HookRegistry.register(FINISH, count_reasoning_to_the_end, HookType.AFTER)


async def stream_by_token(
    original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """What every endpoint reads: SGLang's outputs, those of a stream token by token."""
    splits, incremental = getattr(request, "stream", False) and serves_ours(), manager.incremental_streaming_output
    seen: dict[int, tuple[int, int]] = {}  # by choice, lengths of text and tokens that outputs repeat
    async with aclosing(original(manager, request, *args, **kwargs)) as outputs:
        async for output in outputs:
            if not splits or not isinstance(output.get("text"), str):
                yield output
                continue
            choice = output.get("index", 0)
            before = seen.get(choice, (0, 0))
            if not incremental:
                seen[choice] = len(output["text"]), len(output["output_ids"])
            for piece in pieces(manager.tokenizer, output, *before, incremental=incremental):
                yield piece


def pieces(
    tokenizer: Any, output: dict[str, Any], characters: int = 0, tokens: int = 0, *, incremental: bool = False
) -> Iterator[dict[str, Any]]:
    """An output as one for each token that has a text; the last one keeps what else it brings.

    Args:
        characters, tokens: those of the output before, which this one repeats.
        incremental: whether outputs repeat nothing.
    """
    text, ids, meta = output["text"], output["output_ids"], output["meta_info"]
    count = len(ids)  # which SGLang may append to
    lists = {key: of for key, of in meta.items() if key.startswith("output_") and isinstance(of, list)}
    *earlier, _ = token_texts(tokenizer, text[characters:])
    for one in earlier:
        begin, first = (characters, tokens) if incremental else (0, 0)
        characters, tokens = characters + len(one), min(tokens + 1, count)
        known = {key: meta[key] + tokens - count for key in LENGTHS if key in meta}
        known |= {key: of[first:tokens] for key, of in lists.items() if len(of) == count}
        shown = {"text": text[begin:characters], "output_ids": ids[first:tokens]}
        yield output | shown | {"meta_info": meta | known | {"finish_reason": None}}
    if incremental and tokens:
        known = {key: of[tokens:] for key, of in lists.items() if len(of) == count}
        output = output | {"text": text[characters:], "output_ids": ids[tokens:], "meta_info": meta | known}
    yield output


def token_texts(tokenizer: Any, text: str) -> list[str]:
    """Return the texts of the tokens of `text`, at least one. Characters of several tokens stay whole."""
    ends = [0]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for piece in tokenizer.batch_decode([[token] for token in tokens], skip_special_tokens=False):
        if (at := text.find(piece, ends[-1])) >= 0:
            ends.append(at + len(piece))
    return [text[start:end] for start, end in itertools.pairwise(sorted({*ends, len(text)}))] or [text]


def count_reasoning_to_the_end(_: None, req: Any, *_args: Any) -> None:
    """Count no reasoning tokens after the end of a request within a run; SGLang counts the whole run."""
    if req.finished_len is not None and serves_ours():
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
