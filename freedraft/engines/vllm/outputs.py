"""What drafting takes from vLLM's requests: tenant, the length up to which they have drafts, the end of the output; and
the `prediction` in requests to its server."""

from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.hooks import check
from freedraft.engines.predictions import FIELD, Prediction
from freedraft.engines.vllm.hooks import PREDICTION_HOOKS
from freedraft.engines.vllm.patching import wrap_once
from freedraft.tenants import opted_out, tenant_key

_BLOCK = 256  # tokens decoded at once
_LOST = 4  # characters that a block decoded alone can lose at its edges: a leading space, half a character
UNLIMITED = 1 << 31
SALT = "freedraft_salt"  # attribute of vLLM's NewRequestData: the key of the request's tenant


def add_salt(data: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """After `NewRequestData.from_request`: pass the tenant to the model runner. vLLM's prefix cache knows adapters by
    name and path, too."""
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora else ()
    if key := tenant_key(request.cache_salt, None, *adapter):
        setattr(data, SALT, key)


def drafted_up_to(parameters: Any, prompt: int) -> int:
    """Total tokens up to which a request may have drafts: its longest answer by its SamplingParams (None: no
    parameters) after a prompt of so many tokens; 0 for none at all."""
    out = opted_out(getattr(parameters, "extra_args", None))
    return 0 if out else prompt + (getattr(parameters, "max_tokens", None) or UNLIMITED)


def trimmed_output(parameters: Any, tokens: Sequence[int], tokenizer: Any = None) -> NDArray[np.int32]:
    """A request's output without tokens that its last steps accepted beyond its end, which the scheduler drops later.
    parameters: its SamplingParams, or None; tokenizer: the target's; None: do not look for stop strings, after which a
    request runs on until the front end, which alone decodes, ends it."""
    tokens = tokens[: getattr(parameters, "max_tokens", None)]
    kind = "stop_token_ids" if getattr(parameters, "ignore_eos", False) else "all_stop_token_ids"
    stops = set[int](getattr(parameters, kind, None) or ())
    if not stops.isdisjoint(tokens):
        tokens = tokens[: next(i for i, token in enumerate(tokens) if token in stops) + 1]
    if getattr(parameters, "repetition_detection", None) is not None:
        tokens = tokens[: _through_repetition(parameters, tokens)]
    if tokenizer is not None and getattr(parameters, "stop", None):
        tokens = tokens[: _through_stop_string(parameters, tokens, tokenizer)]
    return np.array(tokens, np.int32)


def _through_repetition(parameters: Any, tokens: Sequence[int]) -> int:
    """The number of tokens up to the one that completes a repetition, which fewer than `_BLOCK` follow; all without."""
    from vllm.v1.core.sched.utils import check_sequence_repetition as repeats

    detected = parameters.repetition_detection
    longest = detected.max_pattern_size * detected.min_count  # tokens
    ends = range(max(parameters.min_tokens, len(tokens) - _BLOCK, 1), len(tokens))
    return next((end for end in ends if repeats(tokens[max(end - longest, 0) : end], detected)), len(tokens))


def _through_stop_string(parameters: Any, tokens: Sequence[int], tokenizer: Any) -> int:
    """The number of tokens up to the one that completes a stop string after the first `min_tokens`; all without one.
    Clients choose stop strings, perhaps long ones, so those that do not occur in the text are left out first."""

    def text(begin: int, end: int) -> str:
        return str(tokenizer.decode(tokens[begin:end], skip_special_tokens=parameters.skip_special_tokens))

    whole, first = text(0, len(tokens)), parameters.min_tokens
    read = len(text(0, first)) if first else 0
    found = [(whole.find(stop, max(0, read - len(stop) + 1)), stop) for stop in parameters.stop]
    stops = [stop for at, stop in found if at >= 0]
    if not stops:
        return len(tokens)
    ends = min(at + len(stop) for at, stop in found if at >= 0)  # characters
    overlap = max(len(stop.encode()) for stop in stops)  # tokens that may contain its start
    for start in range(first, len(tokens), _BLOCK):
        end = min(start + _BLOCK, len(tokens))
        if read < ends:
            read += len(text(start, end)) + _LOST
        if read < ends:
            continue
        begin = max(0, start - overlap)
        before = len(text(begin, start))

        def completed(end: int, begin: int = begin, before: int = before) -> bool:
            part = text(begin, end)
            return any(part.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in stops)

        if completed(end):
            return start + 1 + bisect_left(range(start + 1, end), True, key=completed)
    return len(tokens)


def take_predictions() -> None:
    """Hook both endpoints, unless this vLLM lacks what that needs: then predictions are ignored, as without us."""
    if check(PREDICTION_HOOKS):
        return
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    wrap_once(OpenAIServingChat, "create_chat_completion", _answer)
    wrap_once(OpenAIServingCompletion, "create_completion", _answer)


async def _answer(original: Callable[..., Any], serving: Any, request: Any, *others: Any, **kwargs: Any) -> Any:
    given = (request.model_extra or {}).get(FIELD)
    if given is None:
        return await original(serving, request, *others, **kwargs)
    try:
        prediction = await Prediction.read(given, serving.renderer.get_tokenizer(), serving.renderer._executor)
    except ValueError as error:
        return serving.create_error_response(str(error), param=FIELD)
    request.vllm_xargs = (request.vllm_xargs or {}) | {FIELD: prediction.tokens}
    answer = await original(serving, request, *others, **kwargs)
    if isinstance(answer, AsyncGenerator):
        return prediction.of_stream(answer)
    if usage := getattr(answer, "usage", None):
        answer.usage = type(usage)(**await prediction.of_response(answer.model_dump()))
    return answer
