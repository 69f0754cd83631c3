"""Windowed drafts: which windows there may be, and which one is chosen, by what passes take and what is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lookahead_tools import Driver, KnownCosts, Line
from test_layerskip_method import CONFIG, VOCAB, Model
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from freedraft.config import ConfigError
from freedraft.draft_pass import Window
from freedraft.step import EngineContext
from layerskip_plugin.lookahead import Cost
from layerskip_plugin.lookahead.base import NONE
from layerskip_plugin.lookahead.trials import FIRST_TRIALS
from layerskip_plugin.method import LayerSkipMethod
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.skip_set import SkipSet
from tests.support.steps import make_step


def windows(given: dict[str, Any], config: Any = None, **context: Any) -> tuple[Window | None, ...]:
    return LayerSkipOptions.parse(given).windows(EngineContext(hf_config=config or LlamaConfig(), **context))


def test_windows_that_may_be() -> None:
    assert windows({}) == (None,)
    assert windows({"window": 512}, page_size=128) == (Window(16, 496),)
    assert windows({"window": "600", "sinks": 0}) == (Window(0, 600),)
    assert windows({"window": "auto"}) == (Window(16, 496), Window(16, 2032), Window(16, 8176), None)
    # What is no shorter than what the model itself looks back to saves nothing.
    mistral = MistralConfig(sliding_window=4096)
    assert windows({"window": "auto"}, mistral) == (Window(16, 496), Window(16, 2032), None)
    assert windows({"window": 8192}, Qwen2Config(use_sliding_window=False, sliding_window=4096))


@pytest.mark.parametrize(
    ("given", "context", "words"),
    [
        ({"window": 100}, {"page_size": 128}, "'window' is 100 tokens, less than a page of the KV cache: set 128"),
        ({"window": 64, "sinks": 64}, {}, "'sinks' is 64 and leaves nothing of a window of 64 tokens"),
        ({"window": "auto", "sinks": 512}, {}, "'sinks' is 512 and leaves nothing of a window of 512 tokens"),
        ({"window": "auto", "lookahead": "fixed"}, {}, "'window' auto needs lookahead cost, not fixed"),
        ({"window": "auto"}, {"lengths": (0, 3)}, r"'window' auto needs .*V2.*: .*give a number of tokens, or"),
        ({"window": 4096}, {"config": MistralConfig(sliding_window=4096)}, "looks back 4096 at most"),
        ({"window": 512}, {"config": LlamaConfig(dual_chunk_attention_config={})}, "dual chunk"),
    ],
)
def test_windows_that_are_refused(given: dict[str, Any], context: dict[str, Any], words: str) -> None:
    if "dual" in words:
        context["config"].dual_chunk_attention_config = {"chunk_size": 1}
    with pytest.raises(ValueError, match=words) as error:
        windows(given, **context)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"window": 0}, {"window": "wide"}, {"sinks": -1}])
def test_options_that_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))) as error:
        LayerSkipOptions.parse(given)
    assert "\n" not in str(error.value)


WHOLE = SkipSet.empty(4)
SMALL, LARGE = (replace(WHOLE, window=Window(16, size - 16)) for size in (512, 2048))
RECIPES = [SMALL, LARGE, WHOLE]
STEP = {1: 1.0, 40: 1.2}


def policy(small: float, large: float) -> Cost:
    """Three windows of no skip set: passes of these prices, the last one that of a step."""
    costs = KnownCosts({SMALL: {1: small}, LARGE: {1: large}, WHOLE: {1: 1.0}}, STEP)
    return Cost(costs, RECIPES, windows=3)


def serve(policy: Cost, alpha: dict[int, float], steps: int, context: int = 8000, seed: int = 0) -> list[int]:
    """Recipes that drafted, by step; tokens of each are accepted with its chance."""
    rng, driver, used = np.random.default_rng(seed), Driver(policy), []
    for _ in range(steps):
        places = policy.recipes_for(np.zeros(2, np.intp), np.full(2, context, np.int32))
        places = policy.should_draft(places, contexts=np.full(2, context, np.int32))
        used.append(int(places[0]))
        if places[0] == NONE:
            continue
        chance = alpha[used[-1]]
        drafted = driver.draft(["a", "b"], 6, lambda position, rows: np.full(len(rows), 0.8, np.float32), sets=places)
        luck = np.cumprod(rng.random((2, 6)) < chance, 1).sum(1)
        driver.judge(["a", "b"], drafted, np.minimum(luck, drafted).astype(np.int32))
    return used


@pytest.mark.parametrize(
    ("prices", "alpha", "best"),
    [
        ((0.2, 0.3), (0.6, 0.97), 1),
        ((0.2, 0.6), (0.9, 0.97), 0),
    ],
)
def test_the_window_that_pays_best(prices: tuple[float, float], alpha: tuple[float, float], best: int) -> None:
    used = serve(policy(*prices), {0: alpha[0], 1: alpha[1]}, 600)[200:]
    assert used.count(best) > 0.9 * len(used)
    assert 2 not in used, "the whole cache without anything skipped is the model itself"


def test_another_window_is_tried_now_and_then() -> None:
    """The text changes: what was the worse window is found again."""
    one = policy(0.2, 0.3)
    assert serve(one, {0: 0.97, 1: 0.5}, 600)[-50:].count(0) > 40
    assert serve(one, {0: 0.5, 1: 0.97}, 1500, seed=1)[-50:].count(1) > 40


@pytest.mark.parametrize("prices", [(0.2, 0.3), (0.95, 0.97)])
def test_no_window_is_tried_that_holds_the_whole_request(prices: tuple[float, float]) -> None:
    used = serve(policy(*prices), {0: 0.9, 1: 0.9}, 3000, context=700)
    assert set(used) <= {0, NONE} and 0 in used


def test_nothing_is_drafted_where_no_window_pays() -> None:
    used = serve(policy(0.95, 0.97), {0: 0.9, 1: 0.9}, 3000)[500:]
    assert sum(place != NONE for place in used) < 0.01 * len(used)
    assert {0, 1} <= set(used), "of the rare probes each window has its turn"


def test_a_request_that_is_shorter_than_every_window() -> None:
    """There is nothing to save for it; beside a longer one it is a request that takes no part."""
    one = policy(0.2, 0.3)
    contexts = np.array([100, 9000, 600], np.int32)
    places = one.recipes_for(np.zeros(3, np.intp), contexts)
    assert places.tolist() == [NONE, 0, 0]
    assert one.should_draft(places).tolist() == [NONE, 0, 0]
    assert serve(one, {}, 300, context=400) == [NONE] * 300
    # With sublayers to skip, it drafts over all of its cache.
    some = SkipSet(4, frozenset({1}), frozenset())
    recipes = [replace(some, window=SMALL.window), some]
    costs = KnownCosts({recipes[0]: {1: 0.2}, recipes[1]: {1: 0.4}}, STEP)
    mixed = Cost(costs, recipes, windows=2)
    assert mixed.recipes_for(np.zeros(3, np.intp), contexts).tolist() == [1, 0, 0]
    fixed = Cost(costs, recipes[:1], windows=1)
    assert fixed.recipes_for(np.zeros(3, np.intp), contexts).tolist() == [0, 0, 0]


def test_windows_of_several_skip_sets() -> None:
    one, other = (SkipSet(4, frozenset({i}), frozenset()) for i in (1, 2))
    recipes = [replace(s, window=w) for s in (one, other) for w in (SMALL.window, None)]
    costs = KnownCosts({r: {1: 0.1 + 0.2 * i} for i, r in enumerate(recipes)}, STEP)
    policy = Cost(costs, recipes, windows=2)
    assert policy.recipes_for(np.array([0, 1, 1]), np.array([9000, 9000, 100], np.int32)).tolist() == [0, 2, 3]


@pytest.mark.parametrize("lengths", [None, (0, 5)])
def test_the_method_drafts_through_its_window(lengths: tuple[int, ...] | None) -> None:
    """Of two requests the one that is longer than the window is drafted for, in passes that read it; also where the
    engine decides how much."""
    context = EngineContext(hf_config=CONFIG, vocab_size=VOCAB, max_draft_tokens=5, lengths=lengths)
    method = LayerSkipMethod(LayerSkipOptions(window=8, sinks=2), context)
    (recipe,) = method.recipes
    assert recipe.window == Window(2, 6) and not recipe
    known = KnownCosts({recipe: {1: 0.2}}, STEP)
    if lengths is None:
        method.auto.step_seconds, method.auto.pass_seconds = known.step_seconds, known.pass_seconds
    built = []

    class Windowed(Model):
        def build(self, recipe, **options):
            built.append(recipe.window)
            return super().build(recipe, **options)

    model = Windowed()
    method.prepare(model)
    assert built == [Window(2, 6)]
    texts = {"short": [1], "long": list(range(20))}
    for name, text in texts.items():
        method.begin(name, np.array(text, np.int32), None, {})
    for number in range(8):
        step = make_step(
            list(texts),
            [[text[-1]] for text in texts.values()],
            capacities=5,
            previous=(2, 2) if number else None,
            texts=list(texts.values()),
        )
        draft = method.draft(step)
    assert draft.counts[0] == 1 and draft.counts[1] > 1
    assert {row for _, _, rows, _ in model.passes for row in rows} == {1}


def test_a_window_that_surprises_is_tried_again() -> None:
    """Not the one that looked best before."""
    one = policy(0.30, 0.35)
    driver, place, contexts, used = Driver(one), np.zeros(1, np.intp), np.full(1, 6000, np.int32), []
    for step in range(2500):
        drafting = int(one.should_draft(one.recipes_for(place, contexts), contexts=contexts)[0])
        used.append(drafting)
        if drafting != NONE:
            drafted = driver.draft(["r"], 4, lambda position, rows: np.full(len(rows), 0.8, np.float32), [drafting])
            good = drafting == 1 and step > 1000
            driver.judge(["r"], drafted, drafted if good else np.zeros(1, np.int32))
    first = used.index(1, 1001)
    assert used[first : first + 8] == [1] * 8


def test_pages_that_are_not_left_out_save_nothing() -> None:
    """Of a window of 512 tokens with 16 sinks in pages of 128, 751 tokens read everything."""
    costs = KnownCosts({SMALL: {1: 0.2}, LARGE: {1: 0.3}, WHOLE: {1: 1.0}}, STEP)
    one = Cost(costs, RECIPES, windows=3, page_size=128)
    contexts = np.array([600, 751, 752, 6000], np.int32)
    assert one.recipes_for(np.zeros(4, np.intp), contexts).tolist() == [NONE, NONE, 0, 0]


def test_windows_are_tried_at_once_at_a_context_that_is_new() -> None:
    """The roofline promises nothing, the passes are fast: that is found out in a few steps, not by a rare probe."""
    costs = KnownCosts({SMALL: {1: 0.9}, LARGE: {1: 0.95}, WHOLE: {1: 1.0}}, STEP)
    one = Cost(costs, RECIPES, windows=3)
    driver, place, used = Driver(one), np.zeros(1, np.intp), []
    for _ in range(40):
        context = np.full(1, 6000, np.int32)
        drafting = int(one.should_draft(one.recipes_for(place, context), contexts=context)[0])
        used.append(drafting)
        if drafting != NONE:
            costs.draft[RECIPES[drafting]] = Line({1: 0.3})  # now it was timed
            drafted = driver.draft(["r"], 4, lambda position, rows: np.full(len(rows), 0.8, np.float32), [drafting])
            driver.judge(["r"], drafted, drafted)
    assert used[:4].count(NONE) <= 1 and NONE not in used[-20:]


@pytest.mark.parametrize(("context", "windows"), [(1000, 1), (6000, 2)])
def test_first_trials_are_of_windows_that_are_shorter_than_the_request(context: int, windows: int) -> None:
    used = serve(policy(0.95, 0.97), {0: 0.1, 1: 0.1}, 100, context=context)
    assert len([place for place in used if place != NONE]) == FIRST_TRIALS * windows
