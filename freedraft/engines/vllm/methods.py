"""Speculative methods of ours by name: `--speculative-config '{"method": "NAME", ...}'`.

vLLM has the method "custom_class" (model: the dotted path of a Python class), and refuses unknown keys. So the user's
dictionary is rewritten just before vLLM reads it: method and model become the ones that vLLM expects. Our method's name
and options become an attribute of the SpeculativeConfig, which reaches every process of the engine and is not part of
the cache key of compiled graphs.
"""

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from freedraft.config import ConfigError, PluginOptions, suggestion
from freedraft.cost.auto_by_batch import candidate_lengths
from freedraft.engines.hooks import Hook, check, installed_version, stop_start
from freedraft.engines.vllm import guards, heads, hooks, patching
from freedraft.engines.vllm.context import (
    ADAPTIVE,
    ATTRIBUTE,
    SCHEDULE,
    Configured,
    configured,
    context_of_engine,
    engine_context,
)
from freedraft.engines.vllm.heads import refusal
from freedraft.engines.vllm.outputs import add_salt, take_predictions
from freedraft.engines.vllm.patching import MARK, after, before, rewritten, signature_of, unless, wrap_once
from freedraft.engines.vllm.room import USAGE
from freedraft.engines.vllm.streams import stream_by_token
from freedraft.engines.vllm.v2.lengths import agree_on_lengths, receive_lengths
from freedraft.method import METHODS, REPLACED, MethodSpec
from freedraft.on_top import DEFAULT, BothOptions, register_installed
from freedraft.step import EngineContext

logger = logging.getLogger(__name__)

PROPOSER = "freedraft.engines.vllm.v1.runner.MethodProposer"
V2_METHOD = "ngram_gpu"  # supported by model runner V2 and async scheduling; its speculator is replaced by ours
# Built-in method reported to vLLM in place of ours: on V1 (False), and on V2 (True)
ENGINE_METHOD: dict[bool, dict[str, Any]] = {
    False: {"method": "custom_class", "model": PROPOSER},
    True: {"method": V2_METHOD, "prompt_lookup_min": 1, "prompt_lookup_max": 1},
}
MAX_DRAFT_TOKENS = 64
K = "num_speculative_tokens"
VERIFICATION = "rejection_sample_method"
ENGINE_KEYS = (K, SCHEDULE, ADAPTIVE, VERIFICATION)  # of vLLM's SpeculativeConfig, those that apply to our methods
LOSSY = ("fly", "synthetic")  # verification methods of vLLM


def register_all() -> None:
    """Entry point of `vllm.general_plugins`: runs in every process of vLLM."""
    register_installed(register)


def register(spec: MethodSpec) -> bool:
    """Make vLLM accept a method. Safe to call in every process and more than once; never raises. Returns whether the
    method is registered; False, with a log line, if this vLLM lacks a required hook."""
    patching.share_logging()
    if missing := check(hooks.CONFIG_HOOKS):
        _warn(spec, missing, "not registered")
        return False
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler

    patching.start_with_numba_loaded()
    METHODS[spec.name] = spec
    if spec.runs_model and not check(hooks.MODEL_HOOKS):
        _reserve_slots()
    wrap_once(EngineArgs, "create_speculative_config", _with_methods)
    wrap_once(EngineArgs, "create_engine_config", _check_window)
    wrap_once(NewRequestData, "from_request", after(add_salt))
    # vLLM refuses `min_p` and `logit_bias` with drafts, which its rejection samplers ignore. Ours on V1 applies them.
    wrap_once(SamplingParams, "_validate_spec_decode", unless(_is_v1))
    wrap_once(Scheduler, "_update_request_with_output", after(_resume_at_stop))
    if not check(hooks.SCHEDULER_HOOKS):
        wrap_once(Scheduler, "update_from_output", before(receive_lengths))
        agree_on_lengths()
    if hasattr(VllmConfig, "_maybe_disable_dynamic_sd_for_v1"):
        # vLLM 0.33 removes draft lengths from unknown proposers on V1. Ours draft no more than is scheduled.
        wrap_once(VllmConfig, "_maybe_disable_dynamic_sd_for_v1", unless(_is_ours))
    if HAS_TRITON:
        from vllm.v1.worker.worker_base import WorkerBase

        wrap_once(WorkerBase, "__init__", before(_install_v2))
    return True


def _install_v2(_: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Hook model runner V2 only in workers that use it: importing it takes seconds."""
    has_head = configured(vllm_config).head > 0
    if _is_ours(vllm_config) and (has_head or vllm_config.speculative_config.method == V2_METHOD):
        from freedraft.engines.vllm.v2.install import install

        install()


def _is_ours(vllm_config: Any) -> bool:
    return configured(vllm_config).name in METHODS


def _resume_at_stop(updated: tuple[Any, bool], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Take no token as computed that was accepted behind the end of a turn of streamed input: the next turn takes its
    place. Before 0.33 vLLM does so with async scheduling only."""
    at_once = not scheduler.scheduler_config.async_scheduling and _is_ours(scheduler.vllm_config)
    if updated[1] and request.resumable and at_once:
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)


def _reserve_slots() -> None:
    """Make `VllmConfig.num_lookahead_tokens` include drafts of methods that run the model. vLLM reserves slots past the
    scheduled tokens for its own drafters that run a model, and none for custom ones. The scheduler and the worker's
    warm-up both read this property, so replacing it keeps them in agreement."""
    from vllm.config import VllmConfig

    original = VllmConfig.__dict__["num_lookahead_tokens"]
    if hasattr(original.fget, MARK):
        return

    def num_lookahead_tokens(self: Any) -> int:
        config = self.speculative_config
        if _is_ours(self) and METHODS[configured(self).name].runs_model:
            # A draft of k tokens writes the KV of the last sampled token and of its first k - 1 tokens: k slots past
            # the computed ones, which the scheduler's own count does not include.
            return config.num_speculative_tokens
        return original.fget(self)

    setattr(num_lookahead_tokens, MARK, original.fget)
    setattr(VllmConfig, "num_lookahead_tokens", property(num_lookahead_tokens, doc=original.__doc__))  # noqa: B010


def _warn(spec: MethodSpec, missing: list[str], consequence: str) -> None:
    logger.warning(
        "freedraft: %s: vLLM %s lacks what speculative method '%s' needs (%s); "
        "'freedraft doctor' says which versions are tested",
        consequence, installed_version(hooks.DISTRIBUTIONS), spec.name, "; ".join(missing),
    )  # fmt: skip


def _with_methods(original: Callable[..., Any], args: Any, *others: Any, **kwargs: Any) -> Any:
    given = {str(key).replace("-", "_"): value for key, value in (args.speculative_config or {}).items()}
    name = str(given.get("method") or getattr(args, "spec_method", None)).lower()
    if name in REPLACED:
        stop_start(ConfigError(REPLACED[name]))
    if (spec := METHODS.get(name)) is None:
        name, plus, head = name.partition("+")
        if not plus or (spec := METHODS.get(name)) is None:
            return original(args, *others, **kwargs)
        return _with_head(original, args, others, kwargs, spec, head, given)
    try:
        config, options = _split(args, spec, given)
        chosen = K in given or getattr(args, "spec_tokens", None) is not None
        v2 = runs_v2(args, spec)
        if isinstance(options, BothOptions):
            chosen = options.ngram_tokens is not None or config[K] > DEFAULT
            options, config[K] = options.engine_tokens(config[K])
    except ConfigError as error:
        stop_start(error)
    config = ENGINE_METHOD[v2] | config
    needed: tuple[Hook, ...] = hooks.V2_HOOKS if v2 else hooks.RUNNER_HOOKS
    needed += hooks.MODEL_HOOKS if spec.runs_model else ()
    if missing := check(needed):
        _warn(spec, missing, "serving without speculation")
        with rewritten(args, None):
            return original(args, *others, **kwargs)
    try:
        model_config, parallel_config = signature_of(original).bind(args, *others, **kwargs).args[1:3]
        shape = getattr(options, "shape_at_one_length", getattr(options, "shape", "chain"))
        if shape == "auto" and guards.unseen_platform():
            shape = "chain"
        context = _check(args, spec, options, model_config, parallel_config, config, shape, v2=v2, given=chosen)
        learnt = tuple[int, ...]()
        decides = v2 and SCHEDULE not in config and not config.get(ADAPTIVE)  # by batch size, before drafting
        if decides and spec.schedule is not None and (found := spec.schedule(options, context)):
            config[SCHEDULE], learnt = found
    except ConfigError as error:
        stop_start(error)
    if spec.runs_model and hooks.AOT_SWITCH.problem():  # before vLLM 0.33: for all modules, or for none
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    with rewritten(args, config):
        made = original(args, *others, **kwargs)
    return _marked(made, args, spec, options, learnt, shape)


def _marked(
    made: Any, args: Any, spec: MethodSpec, options: PluginOptions, learnt: tuple[int, ...], shape: str, head: int = 0
) -> Any:  # fmt: skip
    """A SpeculativeConfig with our data, and the front end's hooks. Arguments: see `Configured`."""
    stream_by_token()
    take_predictions()
    given = options.model_dump(mode="json", exclude_none=True)
    graph_mode_given = args.compilation_config.cudagraph_mode is not None
    setattr(made, ATTRIBUTE, Configured(spec.name, given, learnt, graph_mode_given, shape, head))
    return made


def _with_head(
    original: Callable[..., Any], args: Any, others: tuple[Any, ...], kwargs: dict[str, Any], spec: MethodSpec,
    head: str, given: dict[str, Any],
) -> Any:  # fmt: skip
    """vLLM's configuration of a drafter of its own, made for its own K; then with room for n-grams behind."""
    try:
        most = heads.take(spec, head, given := {"model": getattr(args, "spec_model", None)} | given)
        config, options = _split(args, spec, given, head)
        heads.check(spec, head, config, options, v2=runs_v2(args, spec))
    except ConfigError as error:
        stop_start(error)
    missing = check(hooks.V2_HOOKS + hooks.HEAD_HOOKS)
    with rewritten(args, config):
        try:
            made = original(args, *others, **kwargs)
        except (NotImplementedError, ValueError, OSError) as error:
            said = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                said = " ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
            why = f"({' '.join(said.split())}): mend that, or"
            why = "of this model:" if isinstance(error, NotImplementedError) else why
            stop_start(refusal(spec, f"vLLM makes no drafter '{head}' {why} use 'sssd' alone"))
    if missing:
        _warn(spec, missing, f"'{head}' drafts alone")
        return made
    try:
        model_config, parallel_config = signature_of(original).bind(args, *others, **kwargs).args[1:3]
        own = made.num_speculative_tokens
        config[K] = heads.longest(spec, made, most, model_config, parallel_config)
        chosen = most is not None
        context = _check(
            args, spec, options, model_config, parallel_config, config, "chain", v2=True, given=chosen, head=own
        )
        made.num_speculative_tokens, learnt = config[K], tuple[int, ...]()
        schedule = None if config[K] == own or config.get(ADAPTIVE) else spec.schedule
        if schedule is not None and (found := schedule(options, context)):
            rows, learnt = found
            setattr(made, SCHEDULE, rows)
    except ConfigError as error:
        stop_start(error)
    return _marked(made, args, spec, options, learnt, "chain", own)


def _is_v1(_: Any, speculative_config: Any) -> bool:
    return getattr(speculative_config, "model", None) == PROPOSER


def _check_window(
    original: Callable[..., Any], engine_args: Any, usage_context: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Note how vLLM is used, and check a window against the page size, which vLLM decides after
    `create_speculative_config`."""
    setattr(engine_args, USAGE, usage_context)
    vllm_config = original(engine_args, usage_context, *args, **kwargs)
    ours = configured(vllm_config)
    if (spec := METHODS.get(ours.name)) is not None:
        draft_window = getattr(spec.options.parse(ours.options), "draft_window", None)
        try:
            if draft_window is not None:
                draft_window(context_of_engine(vllm_config))
        except ValueError as error:
            stop_start(refusal(spec, str(error)))
    return vllm_config


def runs_v2(engine_args: Any, spec: MethodSpec) -> bool:
    """Whether model runner V2 serves this method: if vLLM would use it without speculation. Raises ConfigError: an
    option does not go with the runner."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON
    from vllm.utils import platform_utils

    asked = getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False)
    missing = check(hooks.V2_HOOKS) if HAS_TRITON or asked else ["Triton"]
    if not missing and not platform_utils.is_uva_available():
        missing = ["pinned memory, through which tokens and drafts go"]
    if asked and missing:
        lacks = f"lacks what it needs ({'; '.join(missing)})"
        version = installed_version(hooks.DISTRIBUTIONS)
        raise refusal(spec, f"model runner V2 of vLLM {version} {lacks}: unset VLLM_USE_V2_MODEL_RUNNER")
    stock = HAS_TRITON and not (
        getattr(engine_args, "enable_dbo", False)
        or getattr(engine_args, "ubatch_size", 0)
        or getattr(engine_args, "distributed_executor_backend", None) == "external_launcher"
    )
    v2 = not missing and (stock if asked is None else asked)
    if not v2 and getattr(engine_args, "async_scheduling", None):
        reason = "model runner V1, which serves it here, has no async scheduling for it"
        raise refusal(spec, f"{reason}: leave --async-scheduling out")
    return bool(v2)


def _split(
    engine_args: Any, spec: MethodSpec, given: dict[str, Any], head: str = ""
) -> tuple[dict[str, Any], PluginOptions]:
    """Settings of vLLM's SpeculativeConfig, and our options. head: drafter of vLLM's whose settings are given, too."""
    from vllm.config import SpeculativeConfig

    option_type = spec.options
    config: dict[str, Any] = {}
    flags = {}
    others = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    for key, value in given.items():
        if key in option_type.model_fields:
            flags[key] = value
        elif key in ENGINE_KEYS or (head and key in others - {"method"}):
            config[key] = value
        elif key != "method":
            nearest = suggestion(key, ["method", *ENGINE_KEYS, *option_type.model_fields])
            remedy = "leave it out, it is for vLLM's other methods" if key in others else nearest
            raise refusal(spec, f"unknown option '{key}': {remedy}")
    if head:
        config |= {} if head == heads.AUTO else {"method": head}
    elif getattr(engine_args, "spec_model", None) is not None:
        raise refusal(spec, "option '--spec-model' has no meaning here: remove it")
    spec_tokens = getattr(engine_args, "spec_tokens", None)
    if spec_tokens is not None:
        if K in config:
            raise refusal(spec, f"{K} is given twice: remove --spec-tokens or the key in --speculative-config")
        config[K] = spec_tokens
    tokens = config.setdefault(K, None if head else spec.default_length)
    if tokens is None:
        raise refusal(spec, f"option '{K}' is missing: add \"{K}\": {3 if head else 8}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise refusal(spec, f"option '{K}' must be a whole number from 1 to {MAX_DRAFT_TOKENS}, not {tokens!r}: try 8")
    if (way := config.get(VERIFICATION)) in LOSSY:
        raise refusal(spec, f"'{VERIFICATION}' '{way}' accepts other tokens than the model's: leave it out")
    return config, option_type.read(flags)


def _check(
    engine_args: Any, spec: MethodSpec, options: PluginOptions, model_config: Any, parallel_config: Any,
    config: dict[str, Any], shape: str, *, v2: bool, given: bool, head: int = 0,
) -> EngineContext:  # fmt: skip
    """The engine's context; `config` gets a length that fits. Raises ConfigError for settings that would fail later."""
    patching.share_logging()  # vLLM sets up its own once plugins are loaded
    try:
        guards.check_ranks(engine_args, v2=v2, layers=spec.runs_model or bool(head))
        guards.check_states(model_config, v2=v2)
        guards.check_verification(engine_args, config, shape)
        if spec.runs_model:
            guards.check_engine(engine_args)
            guards.check_model(model_config)
        attention = str(engine_args.attention_backend or engine_args.attention_config.backend)
        trees = shape == "tree" or (shape == "auto" and "TRITON_ATTN" in attention)
        trees = trees and v2 and not config.get(ADAPTIVE)
        sizes = engine_args, model_config, parallel_config, config[K]
        most = (
            config[K]
            if config[K] == head
            else guards.fitting_length(*sizes, given=given, trees=trees, adaptive=bool(config.get(ADAPTIVE)))
        )
        config[K] = most = max(most, head)
        lengths = (head, *(n for n in candidate_lengths(most) if n > head)) if v2 else None
        context = engine_context(
            model_config, most, kv_dtype=str(engine_args.kv_cache_dtype), page_size=engine_args.block_size,
            tensor_parallel=engine_args.tensor_parallel_size, rank=engine_args.data_parallel_rank or 0,
            lengths=lengths, head=head,
        )  # fmt: skip
        if engine_args._api_process_rank < 0 or engine_args._api_process_count == 1:
            spec.check(options, context)  # other front ends start when the engine may serve already
        return context
    except ConfigError:
        raise
    except ValueError as error:
        raise refusal(spec, str(error)) from None
