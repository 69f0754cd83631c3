"""SSSD in vLLM: translates between the engine's step and the drafter."""

from __future__ import annotations

import atexit
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.vllm.controller import make_controller
from freedraft.engines.vllm.methods import Method
from freedraft.engines.vllm.methods import register as register_method
from freedraft.engines.vllm.runner import Step, StepProposer
from freedraft.engines.vllm.tenants import carry_salt
from freedraft.metrics import Metrics, check_port, serve
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.metrics import LiveMetrics
from sssd_plugin.options import SssdOptions
from sssd_plugin.source_metrics import SourceMetrics

if TYPE_CHECKING:
    from freedraft.cost.controller import Controller
    from freedraft.draft import DraftBatch
    from sssd_plugin.datastore.disk.store import Datastore
    from sssd_plugin.datastore.live.store import LiveDatastore

logger = logging.getLogger("freedraft.sssd")

NAME = "sssd"


def register() -> None:
    """Entry point of `vllm.general_plugins`: runs in every process of vLLM."""
    if register_method(Method(NAME, f"{__name__}.SssdProposer", SssdOptions, check_start)):
        carry_salt()


def check_start(options: SssdOptions, model_config: Any) -> None:
    """Refuse, before the engine starts, what would stop it later: profile, port, weights or store.

    Raises:
        ValueError: one clear line that names the option or file and the remedy.
    """
    options.cost_model(1)
    if options.metrics_port is not None:
        check_port(options.metrics_port)
    if options.weights is not None:
        from sssd_plugin.learned import Weights

        Weights.load(options.weights)
    if options.static_store is not None:
        open_store(options.static_store, model_config, verify=True).close()
    if options.live and options.isolation == "tenant" and not carry_salt():
        raise ValueError(
            "this vLLM does not tell drafters whose a request is, so live datastores cannot keep tenants apart: "
            "remove option 'live', or set isolation 'shared' if there is one tenant only (see 'freedraft doctor')"
        )
    if options.live and options.live_store is not None:
        from sssd_plugin.datastore.live.segments import check_live

        check_live(
            options.live_store,
            vocab_size=model_config.get_vocab_size(),
            fingerprint=tokenizer_fingerprint(model_config),
            second_writer=options.live_second_writer,
        )


def open_store(path: Path, model_config: Any, *, verify: bool) -> Datastore:
    """The datastore at `path`, if it fits the model's vocabulary and tokenizer.

    Raises:
        DatastoreError: the store is missing, damaged, of another tokenizer or of a newer format.
    """
    from sssd_plugin.datastore.disk.store import Datastore

    return Datastore.open(
        path,
        vocab_size=model_config.get_vocab_size(),
        tokenizer_fingerprint=tokenizer_fingerprint(model_config),
        verify=verify,
    )


def tokenizer_fingerprint(model_config: Any) -> str | None:
    """Fingerprint of the model's tokenizer; None when vLLM was told to load none."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import get_tokenizer

    from sssd_plugin.datastore.tokenizer import fingerprint

    return fingerprint(
        get_tokenizer(
            model_config.tokenizer,
            tokenizer_mode=model_config.tokenizer_mode,
            revision=model_config.tokenizer_revision,
            trust_remote_code=model_config.trust_remote_code,
        )
    )


def said(tokens: list[int], parameters: Any) -> list[int]:
    """The output without what the last step accepted beyond its end, which the scheduler drops later."""
    end = getattr(parameters, "max_tokens", None)
    tokens = tokens[:end]
    if parameters is not None and not getattr(parameters, "ignore_eos", False):
        stops = getattr(parameters, "all_stop_token_ids", ())
        for i, token in enumerate(tokens):
            if token in stops:
                return tokens[: i + 1]
    return tokens


def open_live_store(options: SssdOptions, vllm_config: Any, store: Datastore | None) -> LiveDatastore:
    """The store that grows, over the static one. Of all workers and replicas, one writes."""
    from sssd_plugin.datastore.live.store import open_live

    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    live = open_live(
        options.live_store,
        model_config.get_vocab_size(),
        static=store.snapshot if store else None,
        fingerprint=tokenizer_fingerprint(model_config),
        isolation=options.isolation,
        max_tokens=options.live_tokens,
        writer=parallel.rank % parallel.tensor_parallel_size == 0 and not parallel.data_parallel_rank,
        second_writer=options.live_second_writer,
        lockstep=parallel.tensor_parallel_size > 1,
    )
    atexit.register(live.close)  # vLLM does not tell drafters that it ends; what is queued gets written
    return live


class SssdProposer(StepProposer):
    """The proposer that vLLM creates for `{"method": "sssd"}`."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        from sssd_plugin.drafter import Drafter

        options = SssdOptions.parse(self.options)
        self.store: Datastore | None = None
        if options.static_store is not None:
            # The front-end process has verified every byte already.
            self.store = open_store(options.static_store, vllm_config.model_config, verify=False)
        self.live = open_live_store(options, vllm_config, self.store) if options.live else None
        self.live_prompts = options.live_prompts
        self.runner: Any = None
        self.cost_model = options.cost_model(self.max_draft_tokens)
        self.controller = make_controller(vllm_config, self.cost_model, options.step_times)
        cost = 0.0 if self.controller else self.cost_model.profile.token_cost
        self.min_score = cost if options.min_score is None else options.min_score
        self.drafter = Drafter(
            vocab_size=vllm_config.model_config.get_vocab_size(),
            max_nodes=self.max_draft_tokens + 1,
            scoring=options.scoring,
            weights=options.weights,
            snapshot=self.store.snapshot if self.store and self.live is None else None,
            live=self.live,
        )
        self.metrics = Metrics(NAME)
        self.live_metrics = LiveMetrics() if self.live else None
        self.source_metrics = SourceMetrics(self.store.snapshot if self.store else Snapshot.empty())
        if options.metrics_port is not None:
            rank = vllm_config.parallel_config.rank
            serve(options.metrics_port + rank if options.metrics_port else 0)
        logger.info(
            "freedraft: sssd drafts up to %d tokens per request, %d query tokens per step are about free (%s)",
            self.max_draft_tokens,
            self.cost_model.knee,
            self.cost_model.profile.name,
        )

    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        self.drafter.begin(request_id, tokens)
        self.metrics.requests.set(len(self.drafter))

    def belongs(self, request_id: str, salt: str) -> None:
        if self.live is not None:
            self.drafter.belongs(request_id, self.live.tenant(salt))

    def ready(self, runner: Any) -> None:
        self.runner = runner

    def finish(self, request_ids: set[str]) -> None:
        if self.live is not None and self.runner is not None:
            self._learn(self.live, request_ids)
        self.drafter.finish(request_ids)
        self.metrics.requests.set(len(self.drafter))

    def draft(self, step: Step) -> list[list[int]]:
        self.note(*step.verified)
        return self._by_rule(step) if self.controller is None else self._by_gain(step, self.controller)

    def note(self, drafted: int, accepted: int) -> None:
        """Count draft tokens that were verified."""
        self.metrics.drafted.inc(drafted)
        self.metrics.accepted.inc(accepted)

    def chains(self, step: Step, most: int) -> DraftBatch:
        """Chains of at most `most` draft tokens, in the order of `step.rows`; valid until the next call."""
        return self._chains(step, most, None)

    def _learn(self, live: LiveDatastore, request_ids: set[str]) -> None:
        # Sorted: a set's order differs between processes, and all tensor-parallel ranks must learn in the same one.
        for request_id in sorted(request_ids):
            state = self.runner.requests.get(request_id)
            if state is None:
                continue
            tokens = said(state.output_token_ids, state.sampling_params)
            if self.live_prompts and state.prompt_token_ids is not None:
                tokens = [*state.prompt_token_ids, *tokens]
            live.insert(np.array(tokens, np.int32), self.drafter.tenant_of(request_id))
        if self.live_metrics is not None:
            self.live_metrics.show(live)

    def _by_rule(self, step: Step) -> list[list[int]]:
        started = time.perf_counter()
        batch_size = len(step.rows)
        most = min(step.max_draft_tokens, self.cost_model.per_request(batch_size))
        budget = min(self.cost_model.budget(batch_size), batch_size * most)
        self.metrics.budget.set(budget)
        if budget == 0:
            return step.no_drafts()
        drafts = step.drafts(self._chains(step, most, budget))
        self.metrics.seconds.observe(time.perf_counter() - started)
        return drafts

    def _by_gain(self, step: Step, controller: Controller) -> list[list[int]]:
        started = time.perf_counter()
        request_ids = step.request_ids
        step.tell(controller)
        drafts, chosen = None, 0
        if most := controller.limit(len(step.rows), step.max_draft_tokens):
            chains = self.chains(step, most)
            chosen = controller.cut(chains)
            if chosen:
                drafts = step.drafts(chains)
        self.metrics.budget.set(chosen)
        if most:
            self.metrics.seconds.observe(time.perf_counter() - started)
        controller.end(request_ids)
        return step.no_drafts() if drafts is None else drafts

    def _chains(self, step: Step, most: int, budget: int | None) -> DraftBatch:
        request_ids = step.request_ids
        self.drafter.extend(request_ids, step.token_rows, step.rows, step.lengths)
        sampled = step.sampled_token_ids
        self.source_metrics.look(
            self.drafter, request_ids, lambda: np.array([len(sampled[row]) for row in step.rows.tolist()], np.int64)
        )
        return self.drafter.draft(
            request_ids, max_nodes=most + 1, total_draft_tokens=budget, shape="chain", min_score=self.min_score
        )
