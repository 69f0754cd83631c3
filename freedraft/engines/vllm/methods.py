"""Speculative methods of ours by name: `--speculative-config '{"method": "NAME", ...}'`.

vLLM knows the method "custom_class", whose model is the dotted path of a Python class, and refuses every key that it
does not know. So the user's dictionary is rewritten just before vLLM reads it: method and model become what vLLM
expects, and the options of ours travel in `additional_config`, which reaches every process of the engine.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from freedraft.config import ConfigError, PluginOptions, suggestion
from freedraft.engines.hooks import Hook, check
from freedraft.engines.vllm.fixes import apply_fixes
from freedraft.engines.vllm.hooks import CONFIG_HOOKS, RUNNER_HOOKS, vllm_version
from freedraft.engines.vllm.lookahead_slots import reserve_slots
from freedraft.engines.vllm.patching import share_logging, wrap_once

logger = logging.getLogger(__name__)

CONFIG_KEY = "freedraft"
MAX_DRAFT_TOKENS = 64
K = "num_speculative_tokens"
# Keys of vLLM's SpeculativeConfig that say something to a drafter of ours.
ENGINE_KEYS = ("method", K, "num_speculative_tokens_per_batch_size", "rejection_sample_method")


@dataclass(frozen=True, slots=True)
class Method:
    """A speculative method.

    Attributes:
        name: what the user writes as "method".
        proposer: dotted path of its `StepProposer`.
        options: its options, or what makes them when they are needed; unknown ones stop the engine.
        check: called with the options and vLLM's ModelConfig before the engine starts; raises ValueError with one clear
            line when the method cannot work.
        check_engine: called with vLLM's EngineArgs, likewise.
        writes_kv: whether the proposer writes KV past the request's tokens; the scheduler then reserves slots for it.
        hooks: what it needs of vLLM besides `RUNNER_HOOKS`.
    """

    name: str
    proposer: str
    options: type[PluginOptions] | Callable[[], type[PluginOptions]]
    check: Callable[[Any, Any], None] | None = None
    check_engine: Callable[[Any], None] | None = None
    writes_kv: bool = False
    hooks: tuple[Hook, ...] = ()

    def option_type(self) -> type[PluginOptions]:
        return self.options if isinstance(self.options, type) else self.options()


METHODS: dict[str, Method] = {}


def register(method: Method) -> bool:
    """Make vLLM accept `method`. Safe to call in every process and more than once; never raises.

    Returns:
        whether the method is registered; False, with a log line, when this vLLM lacks what that takes.
    """
    share_logging()
    missing = check(CONFIG_HOOKS)
    if missing:
        logger.warning(
            "freedraft: vLLM %s lacks what speculative method '%s' needs (%s): not registered; "
            "see 'freedraft doctor' for what this version of freedraft supports",
            vllm_version(),
            method.name,
            "; ".join(missing),
        )
        return False
    from vllm.engine.arg_utils import EngineArgs

    apply_fixes(early=True)
    METHODS[method.name] = method
    if method.writes_kv and not check(method.hooks):
        reserve_slots(_writes_kv)
    wrap_once(EngineArgs, "create_speculative_config", _with_methods)
    return True


def _writes_kv(proposer: str) -> bool:
    return any(method.writes_kv and method.proposer == proposer for method in METHODS.values())


def method_options(vllm_config: Any) -> dict[str, Any]:
    """The options that `create_speculative_config` put on the way, in any process of the engine."""
    additional = vllm_config.additional_config
    return dict(additional.get(CONFIG_KEY, {})) if isinstance(additional, Mapping) else {}


def _with_methods(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {str(key).replace("-", "_"): value for key, value in (self.speculative_config or {}).items()}
        method = METHODS.get(given.get("method") or getattr(self, "spec_method", None) or "")
        if method is None:
            return original(self, *args, **kwargs)
        missing = check((*RUNNER_HOOKS, *method.hooks))
        if missing:
            logger.warning(
                "freedraft: vLLM %s lacks what speculative method '%s' needs (%s): serving without speculation; "
                "see 'freedraft doctor' for what this version of freedraft supports",
                vllm_version(),
                method.name,
                "; ".join(missing),
            )
            with _restored(self):
                self.speculative_config = None
                return original(self, *args, **kwargs)
        model_config = kwargs.get("target_model_config", args[0] if args else None)
        try:
            config, options = _split(self, method, given, model_config)
        except ConfigError as error:
            _stop(error)
        with _restored(self):
            self.speculative_config = config
            self.additional_config = {**(self.additional_config or {}), CONFIG_KEY: options}
            return original(self, *args, **kwargs)

    return create_speculative_config


class _restored:
    """What the user gave as method stays on the EngineArgs: vLLM may make its configuration more than once."""

    def __init__(self, engine_args: Any) -> None:
        self.engine_args = engine_args
        self.names = [
            n for n in ("speculative_config", "spec_method", "spec_model", "spec_tokens") if hasattr(engine_args, n)
        ]

    def __enter__(self) -> None:
        self.values = [getattr(self.engine_args, name) for name in self.names]
        for name in self.names:
            setattr(self.engine_args, name, None)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, value in zip(self.names, self.values, strict=True):
            setattr(self.engine_args, name, value)


def _split(
    engine_args: Any, method: Method, given: dict[str, Any], model_config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's part of the user's dictionary, rewritten, and ours, checked."""
    from vllm.config import SpeculativeConfig

    source = f"speculative config of method '{method.name}'"
    option_type = method.option_type()
    config = {"method": "custom_class", "model": method.proposer}
    flags = {}
    engine_keys = {field.name for field in dataclasses.fields(SpeculativeConfig)} - {"method", "model"}
    for key, value in given.items():
        if key in option_type.model_fields:
            flags[key] = value
        elif key in engine_keys:
            config[key] = value
        elif key != "method":
            raise ConfigError(
                f"{source}: unknown option '{key}': {suggestion(key, [*ENGINE_KEYS, *option_type.model_fields])}"
            )
    if getattr(engine_args, "spec_model", None) is not None:
        raise ConfigError(f"{source}: option '--spec-model' has no meaning here: remove it")
    spec_tokens = getattr(engine_args, "spec_tokens", None)
    if spec_tokens is not None:
        if K in config:
            raise ConfigError(f"{source}: {K} is given twice: remove --spec-tokens or the key in --speculative-config")
        config[K] = spec_tokens
    tokens = config.get(K)
    if tokens is None:
        raise ConfigError(f"{source}: option '{K}' is missing: add \"{K}\": 8")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"{source}: option '{K}' must be a whole number from 1 to {MAX_DRAFT_TOKENS}, not {tokens!r}: try 8"
        )
    if not isinstance(engine_args.additional_config or {}, Mapping):
        raise ConfigError(f"{source}: --additional-config must be a dictionary, so that our options can travel in it")
    options = option_type.read(flags)
    if method.check is not None or method.check_engine is not None:
        try:
            if method.check_engine is not None:
                method.check_engine(engine_args)
            if method.check is not None:
                method.check(options, model_config)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
    return config, options.model_dump(mode="json", exclude_none=True)


def _stop(error: ConfigError) -> None:
    """Stop the start of the engine; if nobody catches it, the user sees the one line and no stack."""
    if not hasattr(sys.excepthook, "_freedraft"):
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
            if isinstance(value, ConfigError):
                print(f"freedraft: {value}", file=sys.stderr)
            else:
                previous(kind, value, trace)

        excepthook._freedraft = True  # type: ignore[attr-defined]
        sys.excepthook = excepthook
    raise error
