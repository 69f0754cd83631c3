"""Streams bring each token alone, as without drafts: endpoints and parsers lose or misplace text of several."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import STREAM_HOOKS
from freedraft.engines.sglang.patches import serves_ours

GENERATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
COUNTS = "completion_tokens", "reasoning_tokens", "output_token_logprobs_length"  # of all tokens so far
PART = "\N{REPLACEMENT CHARACTER}"  # of a character of several tokens
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
    from sglang.srt.runtime_context import get_serving

    splits, incremental = getattr(request, "stream", False) and serves_ours(), manager.incremental_streaming_output
    size = get_serving().stream_interval
    seen: dict[int, tuple[int, int]] = {}  # by choice, lengths of text and tokens that outputs repeat
    async with aclosing(original(manager, request, *args, **kwargs)) as outputs:
        async for output in outputs:
            if not splits or not isinstance(output.get("text"), str):
                yield output
                continue
            before = seen.get(choice := output.get("index", 0), (0, 0))
            if not incremental:
                seen[choice] = len(output["text"]), output["meta_info"]["completion_tokens"]
            for piece in pieces(manager.tokenizer, output, *before, size=size, incremental=incremental):
                yield piece


def pieces(
    tokenizer: Any, output: dict[str, Any], characters: int = 0, tokens: int = 0, *, size: int = 1, incremental: bool
) -> Iterator[dict[str, Any]]:
    """An output as one for each token, or `size` of them, that adds to the text; the last one has what else it brings.

    Args:
        characters, tokens: those of the output before, which this one repeats.
        incremental: whether outputs repeat nothing.
    """
    text, given, meta = output["text"], output["output_ids"], output["meta_info"]
    ids = given if incremental else given[: meta["completion_tokens"]]  # SGLang appends to this list
    lists = {key: of for key, of in meta.items() if isinstance(of, list) and key.startswith("output_")}
    lists = {key: of for key, of in lists.items() if len(of) == len(given)}
    ends = [*token_ends(tokenizer, text, ids[tokens:], characters), len(text)]
    begin = first = 0
    for count, end in enumerate(ends, len(ids) - len(ends) + 1):
        last = count == len(ids)
        if not last and (end == characters or count < tokens + size):
            continue
        characters, tokens = end, count
        total = meta["completion_tokens"] + count - len(ids)
        known = {key: min(meta[key], total) for key in COUNTS if key in meta}
        known |= {key: of[first:count] for key, of in lists.items()} | ({} if last else {"finish_reason": None})
        yield output | {"text": text[begin:end], "output_ids": ids[first:count], "meta_info": meta | known}
        if incremental:
            begin, first = end, count


def token_ends(tokenizer: Any, text: str, ids: Sequence[int], begin: int = 0) -> list[int]:
    """Return where each of these tokens but the last ends in `text`, of which those before `ids` have `begin`
    characters or, if a character of several tokens was not complete, more. One without a text ends as that before."""
    ends: list[int] = []
    held: list[int] = []
    *ids, last = ids or [0]
    if ids:
        rest = text.removesuffix(tokenizer.decode([last])).rstrip(" ")
        begin = max(begin, len(rest) - len(tokenizer.decode(ids).lstrip(PART)))
    for token in ids:
        piece = tokenizer.decode(held := [*held, token])
        if not piece.endswith(PART):
            held, piece = [], piece.lstrip(PART)
            at = text.find(piece, begin)
            begin = at + len(piece) if at >= 0 else begin
        ends.append(begin)
    return ends


def count_reasoning_to_the_end(_: None, req: Any, *_args: Any) -> None:
    """Count no reasoning tokens after the end of a request within a run; SGLang counts the whole run."""
    if req.finished_len is not None and serves_ours():
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
