"""Registration of methods in SGLang."""

import logging
from functools import cache, partial
from typing import Any

from freedraft.engines.hooks import check, installed_version
from freedraft.engines.sglang import heads, hooks, patches, streams
from freedraft.engines.sglang_cpu import choose_cpu, register_platform, selected
from freedraft.method import METHODS, REPLACED, MethodSpec
from freedraft.on_top import register_installed

logger = logging.getLogger(__name__)


def register_all() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    register_installed(register)


def register(spec: MethodSpec) -> bool:
    """Make SGLang accept `--speculative-algorithm <name>`. Called in every SGLang process; never raises. Returns
    whether the method is registered; False, with one log line, if this SGLang lacks a required hook."""
    needed = hooks.HOOKS + (hooks.MODEL_HOOKS if spec.runs_model else ())
    if missing := check(needed + (hooks.CPU_HOOKS if selected() else ())):
        logger.warning(
            "freedraft: speculative algorithm '%s' is not registered: SGLang %s lacks what it needs (%s); "
            "'freedraft doctor' says which versions are tested",
            spec.name,
            installed_version(hooks.DISTRIBUTIONS),
            "; ".join(missing),
        )
        return False
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from freedraft.engines.sglang.algorithm import TreeAlgorithm

    def worker(server_args: Any) -> Any:
        from freedraft.engines.sglang.worker import TreeVerifyWorker

        return partial(TreeVerifyWorker, spec=spec)

    SpeculativeAlgorithm.register(spec.name.upper(), supports_overlap=True, spec_class=TreeAlgorithm)(worker)
    algorithm = get_spec(spec.name)
    assert isinstance(algorithm, TreeAlgorithm)
    algorithm.spec = METHODS[spec.name] = spec
    _patch_once()
    return True


@cache
def _patch_once() -> None:
    """Register what replaces algorithms, and patches in SGLang's hook registry, which applies them after all plugins
    are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from freedraft.engines.sglang.algorithm import Replaced

    for name in REPLACED:
        SpeculativeAlgorithm.register(name.upper(), supports_overlap=True, spec_class=Replaced)(lambda _: object)
    HookRegistry.register(patches.ROW_ROOM, patches.room_for_drafts, HookType.AROUND)
    HookRegistry.register(patches.UPDATE_STATES, patches.keep_rows_of_states, HookType.AROUND)
    if not check(hooks.HEAD_HOOKS):
        HookRegistry.register(heads.RESOLVE, heads.rename, HookType.AROUND)
        HookRegistry.register(heads.COMPLETE, heads.complete, HookType.AROUND)
        HookRegistry.register(heads.CREATE_WORKER, heads.with_ngrams, HookType.AROUND)
    if not check(hooks.DEVICE_HOOKS):
        HookRegistry.register(patches.CHOOSE_DEVICE, patches.refuse_without_device, HookType.BEFORE)
        HookRegistry.register(patches.CHOOSE_DEVICE, choose_cpu, HookType.BEFORE)
    if not check(hooks.LORA_HOOKS):
        HookRegistry.register(patches.LORA_CHECK, patches.let_adapters_through, HookType.AROUND)
    if not check(hooks.SESSION_HOOKS):
        HookRegistry.register(patches.NEXT_TURN, patches.cut_last_turn, HookType.BEFORE)
    if not check(hooks.CORPUS_HOOKS):
        patches.let_corpora_through()
    streams.register_stream_hooks()
    if not check(hooks.PREDICTION_HOOKS):
        HookRegistry.register(patches.ANSWER, patches.answer, HookType.AROUND)
    if selected():
        register_platform()
