"""Layer skip in SGLang: the target drafts for itself, with some of its sublayers left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from freedraft.composition import Outlook
from freedraft.config import ConfigError
from freedraft.draft import DraftBatch
from freedraft.engines.sglang.registration import install
from freedraft.engines.sglang.source import DraftStep, SourceContext
from freedraft.metrics import Metrics, check_port, serve
from layerskip_plugin.caterpillar import MOST, caterpillar
from layerskip_plugin.lookahead import Cost, Lookahead, Prices, make_lookahead
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.served_times import PlainTurns, ServedTimes
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

if TYPE_CHECKING:
    from freedraft.engines.sglang.partial_model import DraftWindow, PartialModel, Stages

logger = logging.getLogger("freedraft.layerskip")

NAME = "layerskip"
MOST_SETS = 4
# Where a request names the skip set that it wants: sampling_params={"custom_params": {"skip_set": NAME}}, in the
# OpenAI API "custom_params" in the body. The name is that of the file without its ending.
CHOICE = "skip_set"


class Options(LayerSkipOptions):
    """Layer skipping in SGLang, which verifies trees.

    Attributes:
        tree: verify the draft's other candidates beside its chain (SWIFT's dynamic verification).
        length: tokens that lookahead "fixed" drafts.
    """

    tree: bool = True
    length: int = Field(default=5, ge=1, le=255)


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    install(
        NAME, make_source, runs_model=True, check_start=check_start, check_arguments=check_arguments, options=Options
    )


def check_start(options: Options | None = None) -> None:
    """Refuse options that are wrong whatever the model, before the engine starts. None: those that the user set.

    Raises:
        ValueError: one clear line that names the option or file and the remedy.
    """
    options = options or Options.read()
    if options.metrics_port is not None:
        check_port(options.metrics_port)


def check_arguments(args: Any, options: Options | None = None) -> None:
    """Refuse what does not go with these arguments: a skip set or a classifier of another model, several ranks.

    Raises:
        ValueError: one clear line.
    """
    if args.tp_size > 1:  # the code for it is there, but has not been run to the end on any machine
        raise ConfigError(
            f"--speculative-algorithm {NAME} does not run under tensor parallelism yet: use --tp-size 1, or "
            "--speculative-algorithm sssd"
        )
    config = _config(args)
    options = options or Options.read()
    options.skip_sets(config)
    _lookahead(options, model_fingerprint(config), ServedTimes(1.0))


def make_source(context: SourceContext, options: Options | None = None) -> LayerSkipSource:
    from freedraft.engines.sglang.partial_model import PartialModel

    options = options or Options.read()
    runner = context.target_worker.model_runner
    config = _config(runner.server_args)
    try:
        model = PartialModel(runner)
        sets = options.skip_sets(config)
    except ConfigError as error:
        raise ConfigError(f"--speculative-algorithm {NAME} {error}") from None
    kept = [model.share(model.stages(s.attention, s.mlp)) for s in sets.values()]
    times = ServedTimes(sum(kept) / len(kept))
    lookahead = _lookahead(options, model_fingerprint(config), times)
    if options.metrics_port is not None and model.rank == 0:
        serve(options.metrics_port)
    logger.info(
        "freedraft: layerskip drafts with %s of the weights (%s), lookahead '%s', %s of up to %d nodes",
        " / ".join(f"{share:.0%}" for share in kept),
        ", ".join(f"{name or 'nothing skipped'}: {len(s)} of {2 * s.n_layers} sublayers" for name, s in sets.items()),
        options.lookahead,
        "trees" if options.tree else "chains",
        context.max_nodes,
    )
    return LayerSkipSource(context, model, sets, lookahead, times, tree=options.tree)


def _config(args: Any) -> Any:
    """The model's config as it was published: SGLang rounds the one that it works with to what its ranks can share."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision)


def _lookahead(options: Options, model: str, times: ServedTimes) -> Lookahead:
    return make_lookahead(
        options.lookahead,
        length=options.length,
        threshold=options.threshold,
        classifier=options.disco,
        prices=Prices(times.draft, times.verify, times.plain),
        model=model,
    )


class LayerSkipSource:
    """Draft trees from passes of the target over its own KV pool, without the sublayers of a skip set.

    Each pass drafts one more token for the requests that the lookahead policy lets go on; requests of different skip
    sets run in passes of their own. Prefill and verification always run the whole model.

    Under tensor parallelism every rank runs the same passes: rank 0 decides and draws, the others follow it.
    """

    def __init__(
        self,
        context: SourceContext,
        model: PartialModel,
        skip_sets: Mapping[str, SkipSet],
        lookahead: Lookahead,
        times: ServedTimes,
        *,
        tree: bool = True,
    ) -> None:
        """
        Args:
            skip_sets: by name, at most 4; requests draft with the first one unless they choose another.
            lookahead: of rank 0; not asked on the others.
            times: filled with what this source measures.
            tree: verify the draft's other candidates too (SWIFT's dynamic verification), not the chain alone.

        Raises:
            ValueError: a skip set has another number of layers, or there are more than 4.
        """
        if not 1 <= len(skip_sets) <= MOST_SETS:
            raise ValueError(f"{len(skip_sets)} skip sets: give 1 to {MOST_SETS}")
        self.model = model
        self.max_nodes, self.widths = context.max_nodes, context.widths
        self.lookahead = lookahead
        self.times = times
        self.tree = tree
        self.candidates = max(lookahead.needs_top, min(MOST, context.vocab_size) if tree else 1)
        self.stages: tuple[Stages, ...] = tuple(
            self.model.stages(s.attention, s.mlp) for s in (s.require(self.model.n_layers) for s in skip_sets.values())
        )
        self.numbers = {name: number for number, name in enumerate(skip_sets)}
        self._set_of: dict[str, int] = {}
        self._last: _Round | None = None
        self._measuring: tuple[float, int, int] | None = None
        self._turns = PlainTurns()
        self.metrics = Metrics(NAME)

    # -- calls of the verify worker ------------------------------------------------------------------------------------

    def width(self, batch_size: int) -> int:
        drafts = self.model.rank == 0 and self._drafts(batch_size)
        width = self.max_nodes if self.model.agree([drafts])[0] else 1
        self.metrics.budget.set(batch_size * (width - 1))
        return width

    def _drafts(self, batch_size: int) -> bool:
        """Whether this step drafts. A policy that compares with plain decoding needs to know what that takes."""
        priced = isinstance(self.lookahead, Cost)
        if priced and (not self.times.plain_known(batch_size) or self._turns.due(batch_size)):
            return False
        return self.lookahead.affordable(batch_size)

    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        """Nothing to prepare: what the requests hold is in the KV pool."""

    def capture_graphs(self) -> None:
        """Called once, after SGLang has captured its own CUDA graphs."""
        self.model.capture(self.stages)

    def _choose(self, batch: Any) -> None:
        """Note the skip sets that new requests ask for."""
        for request in batch.reqs:
            if request.rid not in self._set_of:
                wanted = (getattr(request.sampling_params, "custom_params", None) or {}).get(CHOICE, "")
                if wanted != "" and wanted not in self.numbers:
                    logger.warning(
                        "freedraft: there is no skip set '%s' here, only %s", wanted, ", ".join(self.numbers)
                    )
                self._set_of[request.rid] = self.numbers.get(wanted, 0)

    def assign(self, request_id: str, skip_set: int) -> None:
        """Draft for this request with the skip set of that number, from its next step on."""
        self._set_of[request_id] = skip_set

    def draft(self, step: DraftStep, width: int) -> DraftBatch:
        started = time.perf_counter()
        batch = len(step.request_ids)
        if step.undisturbed and self._measuring is not None and self._measuring[1] == batch:
            since, _, tokens = self._measuring
            self.times.note_step(batch, tokens, started - since)
        self._observe(step)
        roots = step.tokens[step.offsets[1:] - 1]
        if width > 1:
            tree = self._trees(step, np.arange(batch), roots, width)
            self.metrics.drafted.inc(int(tree.counts.sum()) - batch)
            self.metrics.seconds.observe(time.perf_counter() - started)
        else:
            tree = DraftBatch.empty(batch, 1)
            tree.tokens[:, 0], tree.parents[:, 0], tree.scores[:, 0], tree.counts[:] = roots, -1, 1.0, 1
        most = int(tree.counts.max(initial=1))
        self._measuring = time.perf_counter(), batch, batch * next(w for w in self.widths if w >= most)
        return tree

    def observe(self, accepted: Sequence[int]) -> None:
        """For the metrics only: the policy learns from the tokens themselves, which say which drafts were accepted."""
        self.metrics.accepted.inc(sum(accepted))

    def finish(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        for request_id in ids:
            self._set_of.pop(request_id, None)
        self.lookahead.finish(ids)

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        raise ValueError("layer skip drafts without a corpus")

    def commit_corpus(self, corpus_id: str) -> None:
        raise ValueError("layer skip drafts without a corpus")

    def remove_corpus(self, corpus_id: str) -> None:
        raise ValueError(f"there is no corpus '{corpus_id}'")

    def corpora(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass

    # -- as a part of a composed source (freedraft.engines.sglang.composed) --------------------------------------------

    def priced_by(self, verify: Callable[[ArrayLike, ArrayLike], NDArray[np.float64]]) -> None:
        """Take what steps cost from another's measurements: (batch, query tokens) -> seconds.

        Raises:
            ConfigError: the lookahead policy does not go by prices.
        """
        if not isinstance(self.lookahead, Cost):
            raise ConfigError("drafters are weighed by their prices: set FREEDRAFT_LOOKAHEAD=cost")
        self.lookahead.prices = Prices(self.times.draft, verify, lambda batch: verify(batch, batch))

    def outlook(self, batches: NDArray[np.int64], most: int) -> Outlook:
        """What draft passes over each number of requests would bring and take."""
        assert isinstance(self.lookahead, Cost)
        return self.lookahead.outlook(batches, most)

    def look(self, step: DraftStep) -> None:
        """Learn what became of the last round, at every step."""
        self._observe(step)

    def trees(
        self, step: DraftStep, chosen: NDArray[np.intp], width: int, others: tuple[int, int, float]
    ) -> DraftBatch:
        """Trees of at most `width` nodes for the requests `chosen` (places in the step); the others get their roots.

        Args:
            others: see `Cost.beside`.
        """
        assert isinstance(self.lookahead, Cost)
        self.lookahead.beside(*others)
        tree = self._trees(step, chosen, step.tokens[step.offsets[1:] - 1], width)
        self.metrics.drafted.inc(int(tree.counts.sum()) - tree.batch_size)
        return tree

    # -- one round -----------------------------------------------------------------------------------------------------

    def _trees(self, step: DraftStep, chosen: NDArray[np.intp], roots: NDArray[np.int32], width: int) -> DraftBatch:
        made = self._last = self._round(step, chosen, roots, width)
        least = self._least_score(made) if self.tree else 1.0
        return caterpillar(roots, made.tokens, made.probabilities, made.drafted, width, least)

    def _round(self, step: DraftStep, chosen: NDArray[np.intp], roots: NDArray[np.int32], width: int) -> _Round:
        """Passes for the requests `chosen` until none of them goes on."""
        batch, deepest = len(step.request_ids), width - 1
        made = _Round(step.request_ids, batch, deepest, self.candidates)
        window = self.model.window(step.batch, width)
        if len(self.stages) > 1:
            self._choose(step.batch)
        sets = np.fromiter((self._set_of.get(i, 0) for i in step.request_ids), np.int64, batch)
        latest = roots.copy()
        active = chosen
        place = np.zeros(batch, np.int32)
        place[chosen] = np.arange(len(chosen))
        leading = self.model.rank == 0
        if leading:
            self.lookahead.begin([step.request_ids[i] for i in chosen.tolist()], deepest)
        for position in range(deepest):
            entropy = np.zeros(batch, np.float32)
            for number in np.unique(sets[active]):
                rows = active[sets[active] == number]
                started = time.perf_counter()
                self._pass(window, self.stages[number], rows, latest, position, made, entropy)
                seconds = time.perf_counter() - started
                made.seconds += seconds
                self.times.note_draft(len(rows), seconds)
            made.drafted[active] += 1
            go_on = np.zeros(len(active), np.bool_)
            if leading:
                top = made.probabilities[active, position, : self.lookahead.needs_top]
                needed = entropy[active] if self.lookahead.needs_entropy else None
                go_on = self.lookahead.go_on(position, place[active], top, needed)
            agreed = self.model.agree([*made.tokens[active, position, 0], *go_on])
            latest[active] = agreed[: len(active)]
            active = active[agreed[len(active) :].astype(np.bool_)]
            if position + 1 == deepest or not len(active):
                break
        return made

    def _least_score(self, made: _Round) -> float:
        """The chance of acceptance from which a sibling pays: what a query token more costs, in tokens. Policies that
        know no prices leave it to the confidence."""
        policy = self.lookahead
        if not isinstance(policy, Cost) or self.model.rank > 0:
            return 0.0
        batch = len(made.drafted)
        tokens = batch * (1 + int(made.drafted.max()))
        one, more = policy.prices.verify(batch, np.array([tokens, tokens + batch]))
        return float(policy.rate * (more - one) / batch)

    def _pass(
        self,
        window: DraftWindow,
        stages: Stages,
        rows: NDArray[np.int64],
        latest: NDArray[np.int32],
        position: int,
        made: _Round,
        entropy: NDArray[np.float32],
    ) -> None:
        """Draft token `position` of these requests: its candidates and their probabilities."""
        best = window.draft(stages, rows, latest[rows], position, self.candidates, self.lookahead.needs_entropy)
        made.tokens[rows, position] = best.tokens
        made.probabilities[rows, position] = best.probabilities
        if best.entropy is not None:
            entropy[rows] = best.entropy

    def _observe(self, step: DraftStep) -> None:
        """Tell the policy how much of the last round's chains was accepted: as far as the tokens that each request
        gained agree with its chain. A sibling that was accepted ends the chain before it."""
        last, self._last = self._last, None
        if last is None or self.model.rank > 0:
            return
        row_of = {request_id: row for row, request_id in enumerate(step.request_ids)}
        there = [(i, row_of[r]) for i, r in enumerate(last.request_ids) if r in row_of]
        if not there:
            return
        before, now = np.array(there).T
        chain = last.tokens[before, :, 0]
        place = step.offsets[now][:, None] + np.arange(chain.shape[1])
        # The last token gained is the bonus, which no draft token stands for.
        inside = (place < step.offsets[now + 1][:, None] - 1) & (np.arange(chain.shape[1]) < last.drafted[before, None])
        same = inside & (step.tokens[np.minimum(place, len(step.tokens) - 1)] == chain)
        accepted = np.cumprod(same, 1).sum(1).astype(np.int32)
        self.lookahead.observe([last.request_ids[i] for i in before], last.drafted[before], accepted)


class _Round:
    """What one round drafted.

    Attributes:
        tokens: int32 [B, D, K], the draft's best tokens at each position, best first.
        probabilities: float32 [B, D, K].
        drafted: int32 [B], positions drafted.
        seconds: spent in passes.
    """

    def __init__(self, request_ids: Sequence[str], batch: int, depth: int, candidates: int) -> None:
        self.request_ids = request_ids
        self.tokens = np.zeros((batch, depth, candidates), np.int32)
        self.probabilities = np.zeros((batch, depth, candidates), np.float32)
        self.drafted = np.zeros(batch, np.int32)
        self.seconds = 0.0
