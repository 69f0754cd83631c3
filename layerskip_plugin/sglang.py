"""Layer skip in SGLang: the target drafts for itself, with some of its sublayers left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from freedraft.composition import Outlook
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from freedraft.config import ConfigError
from freedraft.draft import DraftBatch
from freedraft.engines.sglang.registration import install
from freedraft.engines.sglang.source import DraftStep, SourceContext
from freedraft.metrics import Metrics, check_port, serve
from layerskip_plugin.candidate_tree import MAX_CANDIDATES as MOST
from layerskip_plugin.candidate_tree import candidate_tree as caterpillar
from layerskip_plugin.lookahead import Cost, Lookahead, Prices, make_lookahead
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.selection.hardware import hardware
from layerskip_plugin.selection.serving import Selector
from layerskip_plugin.selection.swift import WINDOW
from layerskip_plugin.served_times import PlainTurns, ServedTimes
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

if TYPE_CHECKING:
    from freedraft.engines.sglang.partial_model import DraftWindow, PartialModel, Stages
    from freedraft.engines.sglang.set_scores import SetScores

logger = logging.getLogger("freedraft.layerskip")

NAME = "layerskip"
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
    # Of what hardware a file is, the scheduler's process checks, which has the device.
    options.make_selector(config, lambda skips: np.zeros(len(skips)))
    _lookahead(options, model_fingerprint(config), ServedTimes(1.0))


def make_source(context: SourceContext, options: Options | None = None) -> LayerSkipSource:
    from freedraft.engines.sglang.partial_model import PartialModel

    options = options or Options.read()
    runner = context.target_worker.model_runner
    config = _config(runner.server_args)
    try:
        model = PartialModel(runner)
    except ConfigError as error:
        raise ConfigError(f"--speculative-algorithm {NAME} {error}") from None
    scores = None
    if options.selection == "swift":
        from freedraft.engines.sglang.set_scores import SetScores

        scores = SetScores(model, WINDOW)

    def evaluate(skips: Sequence[SkipSet]) -> NDArray[np.float64]:
        assert scores is not None
        return scores([skip.bits for skip in skips])

    selector = options.make_selector(config, evaluate, hardware(str(runner.device)))
    sets = selector.sets
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
    return LayerSkipSource(context, model, selector, lookahead, times, tree=options.tree, scores=scores)


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
        selector: Selector,
        lookahead: Lookahead,
        times: ServedTimes,
        *,
        tree: bool = True,
        scores: SetScores | None = None,
    ) -> None:
        """
        Args:
            selector: says which skip set each request drafts with.
            lookahead: of rank 0; not asked on the others.
            times: filled with what this source measures.
            tree: verify the draft's other candidates too (SWIFT's dynamic verification), not the chain alone.
            scores: what a selection that searches scores its sets with.

        Raises:
            ValueError: a skip set has another number of layers.
        """
        self.selector, self.scores = selector, scores
        self.needs_states = selector.needs_hidden
        self._states: dict[str, Any] = {}
        # Where sets are searched, the newest tokens that each request has generated.
        self._newest: dict[str, list[int]] = {}
        self.model = model
        self.max_nodes, self.widths = context.max_nodes, context.widths
        self.lookahead = lookahead
        self.times = times
        self.tree = tree
        self.candidates = max(lookahead.needs_top, min(MOST, context.vocab_size) if tree else 1)
        self.stages: list[Stages] = [
            self.model.stages(s.attention, s.mlp) for s in (s.require(model.n_layers) for s in selector.sets.values())
        ]
        self._last: _Round | None = None
        self._measuring: tuple[float, int, int] | None = None
        self._turns = PlainTurns()
        self._turn = 0
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
        self._newest.pop(request_id, None)

    def take_state(self, request_id: str, state: Any) -> None:
        """float [H] on the device: the last hidden state behind a prompt, as far as it has been read."""
        self._states[request_id] = state

    def capture_graphs(self) -> None:
        """Called once, after SGLang has captured its own CUDA graphs."""
        self.model.capture(self.stages[: self.selector.compiled])

    def _choices(self, step: DraftStep) -> NDArray[np.intp]:
        """intp [B]: which of `stages` each request has."""
        return self.selector.choose(step.request_ids, _context(step))

    def _meet(self, step: DraftStep) -> None:
        """Tell the selection of requests that it does not know."""
        new = self.selector.unknown(step.request_ids)
        if not new:
            return
        requests = [step.batch.reqs[i] for i in new]
        wanted = [(getattr(r.sampling_params, "custom_params", None) or {}).get(CHOICE) or None for r in requests]
        for request, name in zip(requests, wanted, strict=True):
            state = self._states.pop(request.rid, None)
            hidden = None if state is None else state[None].float().cpu().numpy()
            self.selector.begin([request.rid], [name], hidden)

    def _search(self, step: DraftStep) -> None:
        """Let a selection that searches go on; what it finds drafts from the next step on, without CUDA graphs."""
        if self.scores is None:
            return
        window, newest = self.scores.window, self._newest
        for row, request_id in enumerate(step.request_ids):
            held = newest.setdefault(request_id, [])
            held += step.tokens[step.offsets[row] : step.offsets[row + 1]].tolist()
            del held[: -window - 1]

        def ready() -> bool:
            able = [row for row, request_id in enumerate(step.request_ids) if len(newest[request_id]) > window]
            if not able:
                return False
            row = able[self._turn % len(able)]
            self._turn += 1
            self.scores.look_at(step.batch, row, newest[step.request_ids[row]])  # type: ignore[union-attr]
            return True

        found = self.selector.search(ready)
        if found is not None:
            self.stages[0] = self.model.stages(found.attention, found.mlp)

    def draft(self, step: DraftStep, width: int) -> DraftBatch:
        started = time.perf_counter()
        batch = len(step.request_ids)
        if step.undisturbed and self._measuring is not None and self._measuring[1] == batch:
            since, _, tokens = self._measuring
            self.times.note_step(batch, tokens, started - since)
        self._meet(step)
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
        self._search(step)
        self._measuring = time.perf_counter(), batch, batch * next(w for w in self.widths if w >= most)
        return tree

    def observe(self, accepted: Sequence[int]) -> None:
        """For the metrics only: the policy learns from the tokens themselves, which say which drafts were accepted."""
        self.metrics.accepted.inc(sum(accepted))

    def finish(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self.selector.finish(ids)
        for request_id in ids:
            self._states.pop(request_id, None)
            self._newest.pop(request_id, None)
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
        """Learn what became of the last round, and of requests that are new, at every step."""
        self._meet(step)
        self._observe(step)
        self._search(step)

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
        sets = self._choices(step)
        lengths = self.selector.lengths(_context(step))
        latest = roots.copy()
        active = chosen if lengths is None else chosen[lengths[chosen] > 0]
        place = np.zeros(batch, np.int32)
        place[chosen] = np.arange(len(chosen))
        leading = self.model.rank == 0
        if leading:
            self.lookahead.begin([step.request_ids[i] for i in chosen.tolist()], deepest)
        for position in range(deepest if len(active) else 0):
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
                if lengths is not None:
                    go_on &= lengths[active] > position + 1
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
        judged = [last.request_ids[i] for i in before]
        self.selector.observe(judged, last.drafted[before], accepted)
        self.lookahead.observe(judged, last.drafted[before], accepted)


def _context(step: DraftStep) -> NDArray[np.int32]:
    """int32 [B]: tokens of each request; the newest one is not in the KV cache yet."""
    return step.batch.seq_lens_cpu.numpy().astype(np.int32) + 1


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
