"""The speculative algorithm as SGLang's core sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from freedraft.config import ConfigError
from freedraft.engines.hooks import stop_start
from freedraft.engines.sglang.contexts import context_at_start
from freedraft.engines.sglang.cpu import selected
from freedraft.engines.sglang.guards import refuse_unsupported
from freedraft.method import MethodSpec

DEFAULT_NODES = 16


class TreeAlgorithm(CustomSpecAlgo):
    """Speculative algorithm that verifies draft trees built on the host.

    `is_ngram` is True so that SGLang's core uses its NGRAM branches: relay of accepted tokens under overlap scheduling,
    dummy input for graph capture, manager of external corpora.
    """

    spec: MethodSpec
    # Callback for each overlapped decode step, called while the previous step is still running; set by the worker
    prepare: Callable[[Any], Any] | None = None

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # Called by SGLang's core, missing from CustomSpecAlgo 0.5.23.

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
        from freedraft.engines.sglang.future_map import EarlyFutureMap

        future_map = EarlyFutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)
        future_map.prepare = lambda batch: None if self.prepare is None else self.prepare(batch)
        return future_map

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in defaults and reject unsupported settings. Raises ConfigError: an argument is incompatible with tree
        verification, or an option is invalid."""
        try:
            self._complete(server_args)
        except ValueError as error:
            stop_start(ConfigError(str(error)))

    def _complete(self, args: Any) -> None:
        refuse_unsupported(args, self.name, cpu_platform=selected(), runs_model=self.spec.runs_model)
        if args.speculative_num_draft_tokens is None:
            length = self.spec.default_length
            args.speculative_num_draft_tokens = DEFAULT_NODES if length is None else length + 1
        # FA3 reads the tree mask only with topk > 1, in a second call per layer. topk * steps stays within the number
        # of nodes, so that SGLang reserves no more slots.
        args.speculative_eagle_topk = 2
        args.speculative_num_steps = max(1, args.speculative_num_draft_tokens // 2)
        args.enable_mixed_chunk = False
        if args.max_running_requests is None:
            args.max_running_requests = 48
        options = self.spec.options.read()
        if getattr(options, "shape", None) == "chain":
            args.speculative_eagle_topk = 1
        if self.spec.check is not None:
            self.spec.check(options, context_at_start(args))
