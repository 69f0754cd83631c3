"""Patches of SGLang 0.5.23 where it has no extension point."""

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from freedraft.config import ConfigError
from freedraft.engines.hooks import stop_start
from freedraft.engines.predictions import FIELD, Prediction
from freedraft.engines.sglang.heads import on_top
from freedraft.engines.sglang.hooks import settings
from freedraft.engines.sglang_cpu import selected
from freedraft.method import METHODS, MethodSpec

LORA_CHECK = "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility"
ROW_ROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
NEXT_TURN = "sglang.srt.session.session_controller.Session._concat_token_arrays"
UPDATE_STATES = "sglang.srt.layers.attention.mamba.mamba.selective_state_update"
ANSWER = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"
CHOOSE_DEVICE = "sglang.srt.arg_groups.serving_hook.handle_missing_default_values"


def spec_of(algorithm: str | None) -> MethodSpec | None:
    """Return the method that SGLang calls by this name, if it is one of ours."""
    return next((spec for name, spec in METHODS.items() if name.upper() == (algorithm or "").upper()), None)


def serves_ours() -> bool:
    """Return whether this server's speculative algorithm is one of ours, or has one of ours on top."""
    from sglang.srt.runtime_context import get_context, get_spec

    return spec_of(get_spec().speculative_algorithm) is not None or on_top(get_context().server_args) is not None


def room_for_drafts(original: Callable[[], int]) -> int:
    """Return the number of `req_to_token` columns beyond the longest context. With pages of one token SGLang adds room
    for one tree but reserves slots for two per step, so requests near that context overwrote the next row."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    columns = original()
    if serves_ours():
        columns = max(columns, get_alloc_reserve_per_decode() + 4)
    return columns


def keep_rows_of_states(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Let Mamba 2 store the states after each node where SGLang looks for them, also in steps of fewer nodes than there
    is room for: SGLang takes the number of nodes for the distance between requests."""
    if (states := named.get("intermediate_states_buffer")) is not None:
        named["cache_steps"] = states.shape[1]
    return original(*given, **named)


def cut_last_turn(last_req: Any, *_: Any) -> None:
    """Cut the last turn's output at its end before a session continues it; SGLang would also take what was accepted
    behind a stop."""
    if serves_ours():
        last_req.output_ids = last_req.output_ids_through_stop


def refuse_without_device(args: Any) -> None:
    """Stop the start of our algorithms before SGLang looks for a device that it does not find."""
    if not (args.device or selected()) and spec_of(name := args.speculative_algorithm) and (needs := settings()):
        stop_start(ConfigError(f"--speculative-algorithm {name.lower()} cannot start: {needs[0]}"))


def let_adapters_through(original: Callable[[Any], None], server_args: Any) -> None:
    """Let ours go with LoRA adapters, which verification passes apply whoever has drafted."""
    if spec_of(server_args.speculative_algorithm) is None:
        original(server_args)


def let_corpora_through() -> None:
    """Make the corpus endpoints accept freedraft's algorithms: in the front-end process they compare the name with
    "NGRAM", although the scheduler's corpus manager serves others. Replaces `get_spec` in that module only.

    SGLang's hook registry is no alternative: it replaces a function in every module."""
    from sglang.srt.managers import tokenizer_control_mixin as module

    original = module.get_spec

    @functools.wraps(original)
    def get_spec() -> Any:
        spec = original()
        method = spec_of(spec.speculative_algorithm)
        if method is None or not method.takes_corpora:
            return spec
        most = spec.speculative_ngram_external_corpus_max_tokens  # all that is read there besides the name
        return SimpleNamespace(speculative_algorithm="NGRAM", speculative_ngram_external_corpus_max_tokens=most)

    module.get_spec = get_spec


async def answer(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """SGLang's response to a request. One with a prediction, which SGLang does not read, is drafted from it, and its
    usage says what it brought."""
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
