"""`LayerSkipMethod`: the target drafts for itself, with some of its sublayers skipped, in any engine."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.config import ConfigError
from freedraft.cost.controller import Controller
from freedraft.cost.policies import Schedule, draft_lengths, make_controller
from freedraft.cost.probes import ProbeSchedule
from freedraft.draft import DraftBatch
from freedraft.draft_model import DraftModel, PassOutputs
from freedraft.method import Method, MethodSpec
from freedraft.step import EngineContext, Step
from layerskip_plugin.candidate_tree import MAX_CANDIDATES, candidate_tree, cut_to_width
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.lookahead.records import JUDGED, Recorder
from layerskip_plugin.options import LayerSkipOptions, check
from layerskip_plugin.rounds import Candidate, Round
from layerskip_plugin.selection.online_search import OnlineSearch
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

logger = logging.getLogger("freedraft.layerskip")

NAME = "layerskip"
# Request field with the name of its skip set: in vLLM's `extra_args` (OpenAI server: "vllm_xargs"), in SGLang's
# `custom_params`.
REQUESTED = "skip_set"
# Steps with drafts between two without: the first interval, and the longest, if drafting doubles the speed. The longest
# is shorter for smaller gains: steps without drafts then cost less and matter more.
FIRST_BASELINE, RAREST_BASELINE = 4, 256


def schedule(options: LayerSkipOptions, context: EngineContext) -> Schedule | None:
    return draft_lengths(context, "auto" if options.lookahead == "cost" else "fixed")


SPEC = MethodSpec(
    NAME, "layerskip_plugin.method:LayerSkipMethod", LayerSkipOptions, check, runs_model=True, schedule=schedule
)


class LayerSkipMethod(Method):
    """Draft chains, or trees, from passes of the target over its own KV cache, without the sublayers of a skip set.

    Each pass drafts one more token for the requests that the lookahead policy continues. All passes of a round have one
    recipe (skip set and window) for all requests; verification is exact for any recipe. Prefill and verification always
    run the whole model.

    Raises:
        ConfigError: steps of this model cannot be priced.
    """

    on_host = False

    def __init__(self, options: LayerSkipOptions, context: EngineContext, controller: Controller | None = None) -> None:
        controller = controller or make_controller(context, drafter_decides=True)
        super().__init__(options, context, controller, NAME)
        self.measured = controller.measured
        if self.measured is None and context.lengths is None:
            raise ConfigError(f"'{NAME}' cannot price this model's steps (see the warning above): use method 'sssd'")
        self.selection = options.make_selection(context.hf_config, context.hardware)
        self.needs_prompt_states = self.selection.needs_prompt_states
        self.window = options.draft_window(context)
        self.use(self.selection.sets.values())
        self.recipe: SkipSet | None = None  # of the present step; None: nothing is drafted
        self.lookahead = options.make_lookahead(context, list(self.recipes.values()), self.measured)
        self.recorder: Recorder | None = None
        if options.record is not None:
            self.recorder = Recorder(options.record, model_fingerprint(context.hf_config), self._prices)
        self.draft_passes: dict[SkipSet, Any] = {}
        self._model: DraftModel | None = None
        self._running: set[str] = set()
        self._last: Round | None = None
        self._batch = 1
        self._baseline = ProbeSchedule(FIRST_BASELINE, RAREST_BASELINE)
        pays = "when that is faster" if options.lookahead == "cost" else "always, even when that is slower"
        logger.info("freedraft: layerskip drafts %s", pays)

    def prepare(self, model: DraftModel) -> None:
        """Build the draft passes of every skip set, before the first request."""
        self._model = model
        self.trees = self.options.shape != "chain" and model.trees
        judged = self.recorder is not None or self.lookahead.outputs == JUDGED
        self.outputs = JUDGED if judged else PassOutputs(MAX_CANDIDATES if self.trees else 1)
        self.lookahead.reads_ahead = model.waits
        shape = "trees" if self.trees else "chains"
        read = "all" if self.window is None else f"{self.window.tokens} tokens"
        for number, (name, skip_set) in enumerate(self.selection.sets.items()):
            started = time.perf_counter()
            skip_set.require(model.n_layers)
            self.build(self.recipes[skip_set], optimize=number < self.optimized_passes)
            logger.info(
                "freedraft: skip set '%s' skips %d of %d sublayers (built in %.0f s); lookahead '%s', %s, drafts "
                "read %s of the KV cache", name, len(skip_set), 2 * skip_set.n_layers, time.perf_counter() - started,
                self.options.lookahead, shape, read,
            )  # fmt: skip
        if isinstance(self.selection, OnlineSearch):
            self.selection.prepare(model.scorer(self.selection.window), self.measured)

    @property
    def optimized_passes(self) -> int:
        return min(len(self.selection.sets), self.selection.optimized)

    def use(self, skip_sets: Iterable[SkipSet]) -> None:
        self.recipes = {skip_set: replace(skip_set, window=self.window) for skip_set in skip_sets}

    def build(self, recipe: SkipSet, *, optimize: bool) -> None:
        assert self._model is not None
        self.draft_passes[recipe] = self._model.build(recipe, self.outputs, optimize=optimize)

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        self._running.add(request_id)
        self.selection.begin(request_id, extra.get(REQUESTED))

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        self.selection.set_prompt_state(request_id, state)

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        self._running.discard(request_id)
        self.selection.finish(request_id)
        if self.recorder is not None:
            self.recorder.finish(request_id, idle=not self._running)

    def close(self) -> None:
        super().close()
        if self.recorder is not None:
            self.recorder.close()

    def _prices(self) -> tuple[float, float] | None:
        """`Verifications.prices` at the newest step's batch size; None before steps and passes were timed."""
        batch = self._batch
        if self.measured is None or not self.measured.baseline_known(batch, self.context.widths):
            return None
        one, two = self.measured.step_seconds(batch, np.array([batch, 2 * batch]))
        return float(self.measured.pass_seconds(self._first, batch)) / one, max(float(two / one) - 1.0, 0.0)

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        if self.capacities(step).any():
            self._begin_round()
        limits = np.minimum(self.capacities(step), max_draft_len)
        rows = np.flatnonzero(limits > 0)
        if not len(rows):
            return DraftBatch.roots(step.roots)
        round_ = self._last = self._run(step, rows, limits[rows])
        tree = candidate_tree(round_, step.roots, int(limits.max()) + 1, siblings=self.trees)
        if self.trees and (cost := self._cost) is not None:
            # All requests are verified at the width of the largest.
            widths = np.asarray(cost.widths)
            seconds = cost.measured.step_seconds(tree.batch_size, tree.batch_size * widths)
            cut_to_width(tree, round_.drafted, widths, cost.rate * seconds)
        tree.kinds[:, 1:] = self.lookahead.kind
        return tree

    def update(self, step: Step) -> None:
        """Learn from the last round, continue a search, and choose the recipe of this step."""
        last, self._last = self._last, None
        if last is not None and (outcome := last.outcome(step)) is not None:
            self.lookahead.learn_outcome(outcome)
            if self.recorder is not None and outcome.recipe == self._first:
                self.recorder.record(outcome)
        if isinstance(self.selection, OnlineSearch) and (found := self.selection.search(step, self._first)) is not None:
            self.use([found])
            self.lookahead.use([self._first])
            self.draft_passes.clear()
            self.build(self._first, optimize=False)
        self._batch, contexts = max(step.batch_size, 1), step.contexts
        chosen = self.selection.choose(step.request_ids, contexts)
        lengths = self.selection.max_lengths(contexts)
        if lengths is not None:  # only requests that may draft vote
            rows = np.flatnonzero(lengths)
            chosen, contexts = [chosen[i] for i in rows], contexts[rows]
        candidates = self._candidates(chosen, contexts)
        mean = float(step.contexts.mean()) if step.batch_size else 1.0
        self.recipe = self.lookahead.choose(candidates, self._batch, mean)

    def _candidates(self, chosen: Sequence[SkipSet], contexts: NDArray[np.int32]) -> list[Candidate]:
        found = []
        for skip_set, recipe in self.recipes.items():
            voters = np.fromiter((each == skip_set for each in chosen), np.bool_, len(chosen))
            saves = self._saves(recipe, contexts)
            found.append(Candidate(recipe, int((saves & voters).sum()), int(saves.sum())))
        return [candidate for candidate in found if candidate.votes]

    def _saves(self, recipe: SkipSet, contexts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool [B]: whether requests of these lengths draft with a recipe. Without skipped layers, a window that holds
        the whole request would save nothing."""
        if recipe.window is None or len(recipe):
            return np.ones(len(contexts), np.bool_)
        return contexts > recipe.window.whole_up_to(self.context.page_size or 1)

    def capacities(self, step: Step) -> NDArray[np.int32]:
        """int32 [B]: draft tokens allowed per request by the present recipe; at most `step.capacities`."""
        if self.recipe is None:
            return np.zeros(step.batch_size, np.int32)
        assert self._model is not None
        capacities = np.where(self._saves(self.recipe, step.contexts), self._model.capacities(step), 0).astype(np.int32)
        lengths = self.selection.max_lengths(step.contexts)
        return capacities if lengths is None else np.minimum(capacities, lengths)

    @property
    def _first(self) -> SkipSet:
        return next(iter(self.recipes.values()))

    @property
    def _cost(self) -> Cost | None:
        return self.lookahead if isinstance(self.lookahead, Cost) else None

    def _begin_round(self) -> None:
        """Decide the recipe of this step by `Cost`, which has to time steps without drafts, too: one that is expected
        to pay, one to try, or None."""
        if (cost := self._cost) is None:
            return
        if cost.scheduled:  # the engine has decided to draft, and times steps without drafts
            self.recipe = cost.recipe_of_round(pays=True)
            return
        longest = np.clip(cost.margin * RAREST_BASELINE, FIRST_BASELINE, RAREST_BASELINE)
        known = cost.measured.baseline_known(self._batch, self.context.widths)
        plain = not known or self._baseline.due(self._batch, longest=float(longest))
        self.recipe = None if plain else cost.recipe_of_round()

    def _run(self, step: Step, rows: NDArray[np.intp], limits: NDArray[np.int32]) -> Round:
        """Draft for the requests at `rows` of the step (intp [R]), at most `limits` tokens each (int32 [R])."""
        model, lookahead, recipe = self._model, self.lookahead, self.recipe
        assert model is not None and recipe is not None
        clock = time.perf_counter if self.measured is None else self.measured.clock
        since = clock()
        batch, depth = step.batch_size, int(limits.max(initial=0))
        result = Round(step.request_ids, recipe, depth, self.outputs.top)
        allowed, place, latest = np.zeros(batch, np.int32), np.zeros(batch, np.int32), step.roots.copy()
        allowed[rows], place[rows] = limits, np.arange(len(rows))
        lookahead.begin(len(rows), recipe, depth, batch - len(rows))
        if recipe not in self.draft_passes:  # found by a search, but not built
            self.build(recipe, optimize=False)
        draft_round = model.start(step, self.draft_passes[recipe], rows, depth)
        active = rows[limits > 0]
        for position in range(depth):
            if not len(active):
                break
            if lookahead.read == position:
                count = 1
                if model.waits:  # up to the slots of all requests
                    count = min(max(lookahead.expected_len() - position, 1), int(allowed[active].min()) - position)
                drafted = draft_round.read(draft_round.launch(active, latest[active], position, count))
                result.take(drafted, active, position)
                now, lookahead.read = clock(), position + count
                if self.measured is not None:  # including set-up and decisions of the round
                    self.measured.times.update_pass(recipe, len(active), self.measured.context, (now - since) / count)
                since = now
            result.drafted[active] += 1
            latest[active] = result.tokens[active, position, 0]
            top, entropy = result.probabilities[active, position], result.entropy[active, position]
            more = lookahead.should_continue(position, place[active], top, entropy)
            active = active[more & (allowed[active] > position + 1)]
        lookahead.end(int(result.drafted.max(initial=0)))
        return result
