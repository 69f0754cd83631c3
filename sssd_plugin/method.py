"""`SssdMethod`: drafts from n-grams, in any engine."""

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import await_compilation, compile_ahead
from freedraft.cost.acceptance import Acceptance
from freedraft.cost.hardware import choose_profile
from freedraft.cost.policies import Schedule, draft_lengths
from freedraft.draft import DraftBatch
from freedraft.method import Method, MethodSpec
from freedraft.step import EngineContext, NodeLogits, Step
from freedraft.tenants import names_client, tenant_number
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex
from sssd_plugin.datastore.live.store import LiveStore, check_live
from sssd_plugin.drafter import Drafter, Shape
from sssd_plugin.options import SssdOptions
from sssd_plugin.running import LEADING, RunningAnswers
from sssd_plugin.scoring.weights import Weights

logger = logging.getLogger("freedraft.sssd")

NAME = "sssd"
_RULES = {
    "salt": "requests with the same cache_salt share what they wrote, and so do those without one",
    "strict": "requests with the same cache_salt share what they wrote; those without one neither teach nor are taught",
    "shared": "all requests share what they wrote",
}
MOST_PREDICTED = 1 << 16  # tokens of an answer


def to_learn(prompt: NDArray[np.int32], answer: NDArray[np.int32], leading: int) -> NDArray[np.int32]:
    """Return the document to learn from a request: the last `leading` tokens of its prompt, after its last image
    (negative ids), and its answer; empty without an answer. All are int32 [n]."""
    lead = prompt[max(0, len(prompt) - leading) :] if len(answer) else prompt[:0]
    return np.concatenate([lead[np.flatnonzero(lead < 0).max(initial=-1) + 1 :], answer])


def predicted_in(extra: Mapping[str, Any]) -> NDArray[np.int32]:
    """Return the answer that a client predicts, from its fields for the drafter: int32 [n], empty without one. Clients
    may send anything; what is no list of tokens is ignored."""
    given = extra.get("prediction")
    try:
        tokens = np.array(given[:MOST_PREDICTED] if isinstance(given, list) else [], np.int32)
    except (ValueError, TypeError, OverflowError):
        return np.zeros(0, np.int32)
    return tokens if tokens.ndim == 1 else np.zeros(0, np.int32)


def check(options: SssdOptions, context: EngineContext) -> None:
    """Check profile, weights and store before the engine starts. Raises ValueError: one clear line that names the
    option or file and the remedy."""
    choose_profile(options.hardware, context.device)
    if options.scoring == "learned" or options.weights is not None:
        Weights.load(options.weights)
    if options.scoring == "learned":
        compile_ahead(compile_all)
    if options.static_store is not None:
        _open_store(options, context, verify=True)
    if options.live == "store" and options.datastore is not None:
        if isinstance(options.datastore, str) and options.datastore_sha256:
            raise ValueError(
                "option 'datastore_sha256' does not go with `live: store` at a URL, whose store changes: remove one"
            )
        check_live(options.datastore, context.vocab_size, context.tokenizer_fingerprint(), options.isolation)


def compile_all() -> None:
    """Compile, or load from the cache, what the learned scorer, a live store and policy `auto` call."""
    Drafter(vocab_size=8, max_nodes=2, live=LiveStore(8)).close()
    Acceptance.warm_up()


def schedule(options: SssdOptions, context: EngineContext) -> Schedule | None:
    """See `MethodSpec.schedule`."""
    return draft_lengths(context, options.effective_policy, hardware=options.hardware, knee=options.knee)


SPEC = MethodSpec(
    NAME, "sssd_plugin.method:SssdMethod", SssdOptions, check, takes_corpora=True, schedule=schedule, default_length=31
)


def _open_store(options: SssdOptions, context: EngineContext, *, verify: bool) -> Datastore:
    assert options.static_store is not None
    return Datastore.open(
        options.static_store, vocab_size=context.vocab_size, fingerprint=context.tokenizer_fingerprint(),
        verify=verify, sha256=options.datastore_sha256,
    )  # fmt: skip


class SssdMethod(Method):
    """n-gram drafts from each request's own tokens, the datastore, learnt outputs of other requests, and corpora added
    over HTTP."""

    def __init__(self, options: SssdOptions, context: EngineContext) -> None:
        from sssd_plugin.metrics import LiveMetrics, SourceMetrics

        await_compilation()
        super().__init__(options, context, options.make_controller(context), NAME)
        assert context.vocab_size is not None
        self._corpora: dict[str, SubIndex] = {}
        self._lock = threading.Lock()  # corpora are added in a thread of the engine
        # The front-end process has verified every byte.
        self.store = None if options.static_store is None else _open_store(options, context, verify=False)
        self.live = self._open_live() if options.live != "off" else None
        self.learns = self.live is not None
        self.live_metrics = LiveMetrics()
        can_recycle = context.gives_logits and options.scoring == "learned"
        if options.recycle == "on" and not can_recycle:
            lacks = "this engine gives no logits" if options.scoring == "learned" else "scoring 'paper' takes no logits"
            logger.warning("freedraft: option 'recycle' is on, but %s: n-grams are drafted without them", lacks)
        self.needs_logits = can_recycle and options.recycle != "off"
        self._begun: dict[str, tuple[int, int]] = {}  # prompt length and tenant, by request
        self._secret = secrets.token_bytes(16)  # of tenants' numbers, without a store
        self._alone = count(-1, -1)  # numbers of requests that share nothing
        self.drafter = Drafter(
            vocab_size=context.vocab_size, max_nodes=context.max_draft_tokens + 1, scoring=options.scoring,
            weights=options.weights, snapshot=self._snapshot() if self.live is None else (), live=self.live,
            recycle_megabytes=options.recycle_megabytes if self.needs_logits else 0, marks=context.marks,
        )  # fmt: skip
        # Running answers are no source on top of a head: draft lengths there were judged without them.
        self._running = None if self.live is None or context.head else RunningAnswers(self.drafter, self.live.runs)
        self.source_metrics = SourceMetrics(self._snapshot())
        logger.info("freedraft: sssd drafts up to %d tokens per request", context.max_draft_tokens)

    def _open_live(self) -> LiveStore:
        options, context = self.options, self.context
        place = options.datastore if options.live == "store" else None
        logger.info(
            "freedraft: learning from finished requests, %s, up to %s tokens; isolation '%s': %s",
            "in memory" if place is None else f"in {place}", f"{options.live_tokens:,}", options.isolation,
            _RULES[options.isolation],
        )  # fmt: skip
        static = self.store.snapshot if self.store else ()
        max_age = None if options.live_max_age is None else 3600 * options.live_max_age
        open_at = partial(
            LiveStore, context.vocab_size or 0, static=static, fingerprint=context.tokenizer_fingerprint(),
            isolation=options.isolation, max_tokens=options.live_tokens, max_age=max_age,
        )  # fmt: skip
        try:
            return open_at(place)
        except DatastoreError as error:
            if context.rank == 0:
                raise
            # A replica on another host: the folder belongs to the first one.
            logger.warning("freedraft: %s; this replica learns in memory only", error)
            return open_at(None)

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        number = self._number_of(tenant)
        begun = self._begun.get(request_id)
        if begun is None or begun[1] != number:  # an id may come again, of another client
            begun = len(tokens), number
            self.drafter.predict(request_id, tokens, predicted_in(extra))
        self._begun[request_id] = begun  # a preempted request begins again, with its output after its prompt
        self.drafter.set_tenant(request_id, 0 if self.options.isolation == "shared" else number)
        self.drafter.replace(request_id, tokens)

    def _number_of(self, tenant: str | None) -> int:
        """Return the number of a tenant, or for a request that shares nothing a negative one of its own."""
        secret = self._secret if self.live is None else self.live.key
        if secret is None or (self.options.isolation == "strict" and not names_client(tenant)):
            return next(self._alone)
        return tenant_number(secret, tenant)

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        begun = self._begun.pop(request_id, None)
        try:
            if self.live is not None and begun is not None:
                tokens, (prompt_length, tenant) = self.drafter.tokens(request_id), begun
                prompt, answer = tokens[:prompt_length], tokens[prompt_length:] if output is None else output
                if not self.live.insert(to_learn(prompt, answer, LEADING), tenant) and tenant >= 0:
                    self.live.runs.show(tenant, ())  # what is not learnt is not shown any longer
                self.live_metrics.show(self.live)
        finally:
            self.drafter.finish([request_id])

    def update(self, step: Step) -> None:
        request_ids, new = step.request_ids, (step.tokens, step.starts, step.ends)
        for row in self.drafter.update(request_ids, *new, step.contexts, step.drafted):
            if request_ids[row] not in self._begun:  # it could not begin: nobody knows whose it is
                self.drafter.set_tenant(request_ids[row], next(self._alone))
            self.drafter.replace(request_ids[row], step.history(row))
        if self._running is not None:
            self._running.gained(int(step.gained.sum()), self._begun)

    def record_acceptance(self, step: Step) -> None:
        super().record_acceptance(step)
        self.source_metrics.add(self.drafter.sourced)

    def rests(self) -> bool:
        return self.controller.rests()

    def recycle(self, logits: NodeLogits) -> None:
        self.drafter.recycle(logits)

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        shape: Shape = "tree" if step.trees.any() and self.options.shape != "chain" else "chain"
        ids, wanted = step.request_ids, step.capacities > 0
        if wanted.any() and not wanted.all():  # no request has this id
            ids = [request_id if own else "" for request_id, own in zip(ids, wanted.tolist(), strict=True)]
        return self.drafter.draft(ids, max_nodes=max_draft_len + 1, shape=shape)

    def close(self) -> None:
        super().close()
        self.drafter.close()

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        if corpus_id in self._corpora:
            raise ValueError(f"there is a corpus '{corpus_id}' already: remove it first, or choose another id")
        if not documents:
            raise ValueError("the corpus holds no token: give documents with text")
        vocab_size, largest = self.drafter.vocab_size, max(int(document.max()) for document in documents)
        if largest >= vocab_size:
            raise ValueError(f"the corpus holds token {largest}, the model's vocabulary only {vocab_size}")
        parts = [part for document in documents for part in (document, [SEPARATOR])]
        index = SubIndex.build(np.concatenate(parts).astype(np.int32), vocab_size)
        with self._lock:
            self._corpora[corpus_id] = index
            self._use_corpora()
        return sum(len(document) for document in documents)

    def remove_corpus(self, corpus_id: str) -> None:
        with self._lock:
            if self._corpora.pop(corpus_id, None) is None:
                raise ValueError(f"there is no corpus '{corpus_id}'")
            self._use_corpora()

    def corpora(self) -> dict[str, int]:
        with self._lock:
            return {name: int((index.tokens[: index.n] >= 0).sum()) for name, index in self._corpora.items()}

    def _use_corpora(self) -> None:
        snapshot = self._snapshot()
        self.drafter.use(snapshot)
        self.source_metrics.set_static(snapshot)

    def _snapshot(self) -> Snapshot:
        stored = self.store.snapshot if self.store is not None else ()
        return (*stored, *self._corpora.values())
