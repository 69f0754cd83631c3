"""Registration of our algorithms in SGLang: all of it, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from freedraft.config import PluginOptions
from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import CPU_HOOKS, HOOKS, MODEL_HOOKS
from freedraft.engines.sglang.patches import ASSIGN_SLOTS, assign_slots, let_corpora_through
from freedraft.engines.sglang.platform import selected

if TYPE_CHECKING:
    from freedraft.engines.sglang.algorithm import MakeSource
    from freedraft.engines.sglang.source import DraftSource

logger = logging.getLogger(__name__)
_patched = False


@dataclass(frozen=True, slots=True)
class Part:
    """An algorithm that may be a part of another; see `install`."""

    options: type[PluginOptions]
    make_source: Callable[..., DraftSource]
    check_start: Callable[..., None] | None
    check_arguments: Callable[..., None] | None


PARTS: dict[str, Part] = {}


def install(
    name: str,
    make_source: MakeSource,
    *,
    corpora: bool = False,
    runs_model: bool = False,
    check_start: Callable[[], None] | None = None,
    check_arguments: Callable[[Any], None] | None = None,
    options: type[PluginOptions] | None = None,
) -> bool:
    """Make SGLang accept `--speculative-algorithm <name>`. Called in every process of SGLang; never raises.

    Args:
        make_source: builds the source of drafts in the scheduler of tensor-parallel rank 0.
        corpora: whether the source takes corpora over SGLang's HTTP calls.
        runs_model: whether the source runs the target model, so that it must be built and asked on every rank.
        check_start: raises, in the front-end process, what would fail in the scheduler later: wrong options, say.
        check_arguments: the same, for what depends on SGLang's own arguments (it gets ServerArgs).
        options: of an algorithm that may be a part of another; the three functions then take them as a last argument.

    Returns:
        whether the algorithm is registered; False, with one log line, when this SGLang lacks what it takes.
    """
    missing = check(HOOKS + (MODEL_HOOKS if runs_model else ()) + (CPU_HOOKS if selected() else ()))
    if missing:
        logger.warning(
            "freedraft: SGLang %s lacks what speculative algorithm '%s' needs (%s): not registered; "
            "see 'freedraft doctor' for what this version of freedraft supports",
            sglang_version(),
            name,
            "; ".join(missing),
        )
        return False
    from freedraft.engines.sglang.algorithm import register

    if options is not None:
        PARTS[name] = Part(options, make_source, check_start, check_arguments)
    register(
        name,
        make_source,
        corpora=corpora,
        runs_model=runs_model,
        check_start=check_start,
        check_arguments=check_arguments,
    )
    _patch_once()
    return True


def _patch_once() -> None:
    """Patches, by SGLang's own hook registry, which applies them after all plugins are loaded."""
    global _patched
    if _patched:
        return
    _patched = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from freedraft.engines.sglang.algorithm import taking_corpora

    let_corpora_through(taking_corpora)
    if not selected():
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from freedraft.engines.sglang.guards import CPU_BACKEND

    @register_attention_backend(CPU_BACKEND)
    def tree_attention(model_runner: Any) -> Any:
        from freedraft.engines.sglang.cpu_attention import TreeAttentionBackend

        return TreeAttentionBackend(model_runner)

    HookRegistry.register(ASSIGN_SLOTS, assign_slots, HookType.REPLACE)


def sglang_version() -> str:
    """Version of the installed SGLang; "?" when it is not a distribution."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "?"
