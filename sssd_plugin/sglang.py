"""SSSD in SGLang: the drafter as a source of draft trees."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.engines.sglang.controller import make_controller
from freedraft.engines.sglang.registration import install
from freedraft.engines.sglang.source import DraftStep, SourceContext
from freedraft.metrics import Metrics, serve
from sssd_plugin.datastore.disk.format import MAX_VOCAB_SIZE
from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex
from sssd_plugin.datastore.live.metrics import LiveMetrics
from sssd_plugin.options import SssdOptions
from sssd_plugin.source_metrics import SourceMetrics

if TYPE_CHECKING:
    from sssd_plugin.datastore.live.store import LiveDatastore

logger = logging.getLogger("freedraft.sssd")

NAME = "sssd"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    install(NAME, make_source, corpora=True, check_start=check_start, options=SssdOptions)


def check_start(options: SssdOptions | None = None) -> None:
    """Refuse, before the engine starts, what would stop it later: the profile, the scorer's weights, the store.

    Args:
        options: None: those that the user set.

    Raises:
        ValueError: one clear line that names the option or file and the remedy.
    """
    options = options or SssdOptions.read()
    options.cost_model(1)
    if options.scoring == "learned":
        from sssd_plugin.learned import Weights

        Weights.load(options.weights)
    if options.static_store is not None:
        from sssd_plugin.datastore.disk.store import Datastore

        Datastore.open(options.static_store).close()
    if options.live and options.live_store is not None:
        from sssd_plugin.datastore.live.segments import check_live

        check_live(
            options.live_store, vocab_size=MAX_VOCAB_SIZE, fingerprint=None, second_writer=options.live_second_writer
        )


def make_source(context: SourceContext, options: SssdOptions | None = None) -> SssdSource:
    return SssdSource(context, options or SssdOptions.read())


class SssdSource:
    """n-gram drafts from each request's own tokens, the datastore, and corpora added over HTTP."""

    def __init__(self, context: SourceContext, options: SssdOptions) -> None:
        from sssd_plugin.datastore.disk.store import Datastore
        from sssd_plugin.datastore.tokenizer import fingerprint
        from sssd_plugin.drafter import Drafter

        self.widths = context.widths
        self.vocab_size = context.vocab_size
        self.min_score = options.min_score or 0.0
        self.cost_model = options.cost_model(context.max_nodes - 1)
        self.controller = make_controller(context, self.cost_model, options.step_times)
        self._query_tokens: int | None = None
        self.store = None
        made_by = fingerprint(context.tokenizer) if options.datastore is not None and context.tokenizer else None
        if options.static_store is not None:
            self.store = Datastore.open(
                options.static_store,
                vocab_size=context.vocab_size,
                tokenizer_fingerprint=made_by,
                verify=False,  # the front-end process has verified every byte already
            )
        self._corpora: dict[str, SubIndex] = {}
        self._built: dict[str, SubIndex] = {}
        self._lock = threading.Lock()
        self.live: LiveDatastore | None = None
        self.live_metrics: LiveMetrics | None = None
        self._learnt_from: dict[str, int] = {}  # where the output of each request begins
        self._live_prompts = options.live_prompts
        if options.live:
            from sssd_plugin.datastore.live.store import open_live

            self.live = open_live(
                options.live_store,
                context.vocab_size,
                static=self._snapshot(),
                fingerprint=made_by,
                isolation=options.isolation,
                max_tokens=options.live_tokens,
                # Of data-parallel replicas one writes; whether another server does, `check_start` has asked.
                second_writer="read",
            )
            self.live_metrics = LiveMetrics()
        self.drafter = Drafter(
            vocab_size=context.vocab_size,
            max_nodes=context.max_nodes,
            scoring=options.scoring,
            weights=options.weights,
            snapshot=self._snapshot() if self.live is None else None,
            live=self.live,
        )
        self.metrics = Metrics(NAME)
        self.source_metrics = SourceMetrics(self._snapshot())
        if options.metrics_port is not None:
            serve(options.metrics_port)
        logger.info(
            "freedraft: sssd drafts trees of up to %d nodes, %d query tokens per step are about free (%s)",
            context.max_nodes,
            self.cost_model.knee,
            self.cost_model.profile.name,
        )

    def width(self, batch_size: int) -> int:
        if self.controller is not None:
            most = self.controller.limit(batch_size) + 1
            return max((width for width in self.widths if width <= most), default=1)
        width = self.cost_model.width(batch_size, self.widths)
        self.metrics.budget.set(batch_size * (width - 1))
        return width

    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        if self.live is not None:
            self._learnt_from.setdefault(request_id, 0 if self._live_prompts else len(tokens))
        self.drafter.begin(request_id, tokens)
        self.metrics.requests.set(len(self.drafter))

    def belongs(self, request_id: str, key: str | None) -> None:
        if self.live is not None and key:
            self.drafter.belongs(request_id, self.live.tenant(key))

    def draft(self, step: DraftStep, width: int) -> DraftBatch:
        started = time.perf_counter()
        self.look(step)
        tree = self.trees(step, width)
        if self.controller is not None:
            if width > 1:
                self.controller.cut(tree)
            self.decided(step, tree, width)
        if width > 1:
            self.metrics.drafted.inc(int(np.maximum(tree.counts - 1, 0).sum()))
            self.metrics.seconds.observe(time.perf_counter() - started)
        return tree

    def look(self, step: DraftStep) -> None:
        """Learn what became of the last step's drafts, and what requests gained."""
        if self.controller is not None:
            self.controller.observe(
                step.request_ids, step.tokens, step.offsets[:-1], step.offsets[1:],
                context=float(step.batch.seq_lens_cpu.float().mean()),
                query_tokens=self._query_tokens if step.undisturbed else None,
            )  # fmt: skip
        self.drafter.append(step.request_ids, step.tokens, step.offsets)
        self.source_metrics.look(self.drafter, step.request_ids, lambda: np.diff(step.offsets))

    def trees(self, step: DraftStep, width: int) -> DraftBatch:
        """Trees of at most `width` nodes, not cut; valid until the next call."""
        return self.drafter.draft(step.request_ids, max_nodes=width, min_score=self.min_score)

    def decided(self, step: DraftStep, tree: DraftBatch, width: int) -> None:
        """The step begins that verifies `tree`; at width 1, nothing of it. The controller hears of it."""
        assert self.controller is not None
        most = int(tree.counts.max(initial=1)) if width > 1 else 1
        self._query_tokens = tree.batch_size * next(w for w in self.widths if w >= most)
        if width > 1:
            self.metrics.budget.set(self._query_tokens - tree.batch_size)
        self.controller.end(step.request_ids)

    def observe(self, accepted: Sequence[int]) -> None:
        self.metrics.accepted.inc(sum(accepted))

    def ended(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        begin = self._learnt_from.pop(request_id, None)
        if self.live is not None and begin is not None:
            self.live.insert(tokens[begin:], self.drafter.tenant_of(request_id))

    def finish(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self.live is not None and self.live_metrics is not None:
            for request_id in request_ids:
                if request_id in self._learnt_from:  # it was given up: what is known of it
                    self.ended(request_id, self.drafter.tokens(request_id))
            self.live_metrics.show(self.live)
        self.drafter.finish(request_ids)
        self.metrics.requests.set(len(self.drafter))

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        with self._lock:
            if corpus_id in self._corpora or corpus_id in self._built:
                raise ValueError(f"there is a corpus '{corpus_id}' already: remove it first, or choose another id")
        if not documents:
            raise ValueError("the corpus holds no token: give documents with text")
        largest = max(int(document.max()) for document in documents)
        if largest >= self.vocab_size:
            raise ValueError(f"the corpus holds token {largest}, the model's vocabulary only {self.vocab_size}")
        parts = [part for document in documents for part in (document, [SEPARATOR])]
        index = SubIndex.build(np.concatenate(parts).astype(np.int32), self.vocab_size)
        with self._lock:
            self._built[corpus_id] = index
        return sum(len(document) for document in documents)

    def commit_corpus(self, corpus_id: str) -> None:
        with self._lock:
            self._corpora[corpus_id] = self._built.pop(corpus_id)
        self._use_corpora()

    def remove_corpus(self, corpus_id: str) -> None:
        with self._lock:
            if self._corpora.pop(corpus_id, None) is None:
                raise ValueError(f"there is no corpus '{corpus_id}'")
        self._use_corpora()

    def corpora(self) -> dict[str, int]:
        with self._lock:
            return {name: int((index.tokens[: index.n] >= 0).sum()) for name, index in self._corpora.items()}

    def close(self) -> None:
        self.drafter.close()
        if self.controller is not None:
            self.controller.save()
        if self.store is not None:
            self.store.close()

    def _use_corpora(self) -> None:
        snapshot = self._snapshot()
        self.drafter.use(snapshot)
        self.source_metrics.show_static(snapshot)

    def _snapshot(self) -> Snapshot:
        stored = self.store.snapshot.sub_indices if self.store is not None else ()
        return Snapshot.of([*stored, *self._corpora.values()])
