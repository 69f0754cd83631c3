"""`prediction` in the requests of SGLang's server, which leaves it out of what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from freedraft.engines.predictions import FIELD, Prediction
from freedraft.engines.sglang.patches import serves_ours

ANSWER = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"


async def answer(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """SGLang's response to a request; one with a prediction is drafted from it, and its usage says what it brought."""
    body = await raw_request.body() if hasattr(request, "custom_params") and serves_ours() else b""
    given = json.loads(body).get(FIELD) if f'"{FIELD}"'.encode() in body else None
    if given is None or (tokenizer := serving.tokenizer_manager.tokenizer) is None:
        return await original(serving, request, raw_request)
    try:
        prediction = await Prediction.read(given, tokenizer)
    except ValueError as error:
        return serving.create_error_response(str(error), param=FIELD)
    request.custom_params = (request.custom_params or {}) | {FIELD: prediction.tokens}
    found = await original(serving, request, raw_request)
    if hasattr(found, "body_iterator"):
        found.body_iterator = prediction.of_stream(found.body_iterator)
    elif hasattr(found, "usage"):
        from fastapi.responses import JSONResponse

        response = found.model_dump(mode="json", by_alias=True)
        return JSONResponse(response | {"usage": await prediction.of_response(response)})
    return found
