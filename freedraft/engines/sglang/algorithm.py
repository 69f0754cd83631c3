"""The speculative algorithm as SGLang's core sees it, and the registration of one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from freedraft.engines.sglang.guards import refuse_unsupported
from freedraft.engines.sglang.platform import selected
from freedraft.engines.sglang.source import DraftSource, SourceContext

logger = logging.getLogger(__name__)

MakeSource = Callable[[SourceContext], DraftSource]

DEFAULT_NODES = 16
_taking_corpora: set[str] = set()


class TreeAlgorithm(CustomSpecAlgo):
    """Verifies draft trees that come from the host.

    It passes for NGRAM (`is_ngram`), SGLang's own algorithm of that kind, to get its branches in the core: the relay of
    accepted tokens under overlap, the dummy input for graph capture, the manager of external corpora.
    """

    check_start: Callable[[], None] | None = None
    check_arguments: Callable[[Any], None] | None = None

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # The core calls these three, which CustomSpecAlgo 0.5.23 lacks.

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Set what the user left open, and refuse what cannot work.

        Raises:
            ConfigError: an argument does not go with tree verification.
        """
        args = server_args
        if self.check_start is not None:
            self.check_start()
        refuse_unsupported(args, self.name, cpu_platform=selected())
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = DEFAULT_NODES
        # FA3 reads the tree mask only with topk > 1. The product stays within the nodes, so that no more slots are
        # reserved.
        args.speculative_eagle_topk = 2
        args.speculative_num_steps = max(1, args.speculative_num_draft_tokens // 2)
        args.enable_mixed_chunk = False
        if args.max_running_requests is None:
            args.max_running_requests = 48
        if self.check_arguments is not None:
            self.check_arguments(args)


def taking_corpora() -> set[str]:
    """Names, in capitals, of the registered algorithms whose sources take external corpora."""
    return _taking_corpora


def register(
    name: str,
    make_source: MakeSource,
    *,
    corpora: bool = False,
    runs_model: bool = False,
    check_start: Callable[[], None] | None = None,
    check_arguments: Callable[[Any], None] | None = None,
) -> None:
    """Register `--speculative-algorithm <name>`, whose draft trees come from `make_source`.

    Args:
        corpora: whether the source takes corpora over SGLang's HTTP calls.
        runs_model: whether the source runs the target model: then every tensor-parallel rank has one.
        check_start: raises in the front-end process, in one clear line, what would fail in the scheduler later.
        check_arguments: the same, given ServerArgs with our defaults in.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    def worker(server_args: Any) -> Any:
        from freedraft.engines.sglang.worker import TreeVerifyWorker

        return functools.partial(TreeVerifyWorker, make_source=make_source, every_rank=runs_model)

    SpeculativeAlgorithm.register(name.upper(), supports_overlap=True, spec_class=TreeAlgorithm)(worker)
    algorithm = get_spec(name)
    assert isinstance(algorithm, TreeAlgorithm)
    algorithm.check_start = check_start
    algorithm.check_arguments = check_arguments
    if corpora:
        _taking_corpora.add(name.upper())
