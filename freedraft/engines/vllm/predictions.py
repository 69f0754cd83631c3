"""`prediction` in the requests of vLLM's server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.predictions import FIELD, Prediction
from freedraft.engines.vllm.hooks import PREDICTION_HOOKS
from freedraft.engines.vllm.patching import wrap_once


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
