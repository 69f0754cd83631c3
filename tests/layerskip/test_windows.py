"""Windowed drafts: which windows there may be, and which one is chosen, by what passes take and what is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lookahead_tools import Driver, KnownCosts, Line, share
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from freedraft.recipe import Window
from freedraft.step import EngineContext
from layerskip_plugin.lookahead import Cost
from layerskip_plugin.lookahead.trials import FIRST_TRIALS
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.rounds import Candidate, Recipes
from layerskip_plugin.skip_set import SkipSet


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
        ({"window": 512}, {"config": LlamaConfig(dual_chunk_attention_config={"chunk_size": 1})}, "dual chunk"),
        ({"window": 0}, {}, "window"),
        ({"window": "wide"}, {}, "window"),
        ({"sinks": -1}, {}, "sinks"),
    ],
)
def test_windows_that_are_refused(given: dict[str, Any], context: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        windows(given, **context)
    assert "\n" not in str(error.value)


WHOLE = SkipSet.empty(4)
SMALL, LARGE = (replace(WHOLE, window=Window(16, size - 16)) for size in (512, 2048))
STEP = {1: 1.0, 40: 1.2}


BOTH = [Candidate(SMALL, 1, 1), Candidate(LARGE, 1, 1)]


def driver_of(small: float, large: float) -> Driver:
    """Of passes of these prices."""
    return Driver(Cost(KnownCosts({SMALL: {1: small}, LARGE: {1: large}}, STEP), [SMALL, LARGE]))


def serve(
    small: float, large: float, *phases: tuple[int, float, float], context: int = 8000
) -> tuple[list[SkipSet | None], ...]:
    """Recipes that drafted for two requests, by step, where passes of the windows have these prices: of each phase of
    (steps, chance that a token of the small and of the large window is accepted)."""
    driver = driver_of(small, large)
    recipes = Recipes([WHOLE], [SMALL.window, LARGE.window, None], 1)
    candidates = recipes.candidates([WHOLE] * 2, np.full(2, context, np.int32))
    return tuple(
        driver.serve(steps, {SMALL: one, LARGE: other}, 6, 0.8, candidates, context) for steps, one, other in phases
    )


@pytest.mark.parametrize(
    ("prices", "alpha", "best"), [((0.2, 0.3), (0.6, 0.97), LARGE), ((0.2, 0.6), (0.9, 0.97), SMALL)]
)
def test_the_window_that_pays_best(prices: tuple[float, float], alpha: tuple[float, float], best: SkipSet) -> None:
    _, used = serve(*prices, (200, *alpha), (400, *alpha))
    assert used.count(best) > 0.9 * len(used)


def test_another_window_is_tried_now_and_then() -> None:
    """The text changes: what was the worse window is found again."""
    first, second = serve(0.2, 0.3, (600, 0.97, 0.5), (1500, 0.5, 0.97))
    assert first[-50:].count(SMALL) > 40 and second[-50:].count(LARGE) > 40


@pytest.mark.parametrize("prices", [(0.2, 0.3), (0.95, 0.97)])
def test_no_window_is_tried_that_holds_the_whole_request(prices: tuple[float, float]) -> None:
    (used,) = serve(*prices, (3000, 0.9, 0.9), context=700)
    assert set(used) <= {SMALL, None} and SMALL in used
    assert serve(*prices, (300, 0.9, 0.9), context=400) == ([None] * 300,)


@pytest.mark.parametrize(("context", "windows"), [(1000, 1), (6000, 2)])
def test_nothing_is_drafted_where_no_window_pays(context: int, windows: int) -> None:
    """But for first trials, and rare probes in which each window has its turn."""
    first, later, last = serve(0.95, 0.97, (100, 0.1, 0.1), (400, 0.9, 0.9), (2500, 0.9, 0.9), context=context)
    assert share(first) * 100 == FIRST_TRIALS * windows
    assert share(last) < 0.01 and len({*first, *later, *last} - {None}) == windows


def counted(recipes: Recipes, chosen: list[SkipSet], *contexts: int) -> list[tuple[SkipSet, int, int]]:
    return [tuple(each) for each in recipes.candidates(chosen, np.array(contexts, np.int32))]


def test_a_request_that_is_shorter_than_every_window() -> None:
    """There is nothing to save for it; beside a longer one it is a request that takes no part."""
    windows = [SMALL.window, LARGE.window, None]
    one = Recipes([WHOLE], windows, 1)
    assert one.all == [SMALL, LARGE], "the whole cache without anything skipped is the model itself"
    assert counted(one, [WHOLE] * 3, 100, 9000, 600) == [(SMALL, 2, 2), (LARGE, 1, 1)]
    assert one.applies(SMALL, np.array([100, 9000, 600])).tolist() == [False, True, True]
    # With sublayers to skip, it is drafted for, too.
    some = SkipSet(4, frozenset({1}), frozenset())
    recipes = [replace(some, window=window) for window in windows]
    assert counted(Recipes([some], windows, 1), [some] * 3, 100, 9000, 600) == [(each, 3, 3) for each in recipes]
    assert counted(Recipes([some], windows, 1), [some], 100) == [(recipes[-1], 1, 1)]
    assert counted(Recipes([some], [SMALL.window], 1), [some], 100) == [(recipes[0], 1, 1)]


def test_requests_vote_for_their_skip_sets() -> None:
    one, other = (SkipSet(4, frozenset({i}), frozenset()) for i in (1, 2))
    recipes = Recipes([one, other], [SMALL.window, None], 1)
    small, whole, _, other_whole = recipes.all
    assert counted(recipes, [one, one], 9000, 100) == [(small, 2, 2), (whole, 2, 2)]
    assert counted(recipes, [other, one, one], 90, 100, 100) == [(whole, 2, 3), (other_whole, 1, 3)]


def test_a_window_that_surprises_is_tried_again() -> None:
    """Not the one that looked best before."""
    driver = driver_of(0.30, 0.35)
    driver.serve(1000, 0.0, 4, 0.8, BOTH, 6000.0)
    used = driver.serve(1500, {SMALL: 0.0, LARGE: 1.0}, 4, 0.8, BOTH, 6000.0)
    first = used.index(LARGE)
    assert used[first : first + 8] == [LARGE] * 8


def test_windows_are_tried_at_once_at_a_context_that_is_new() -> None:
    """The roofline promises nothing, the passes are fast: that is found out in a few steps, not by a rare probe."""
    driver = driver_of(0.9, 0.95)

    def timed(recipe: SkipSet, drafted: np.ndarray) -> np.ndarray:
        driver.policy.costs.draft[recipe] = Line({1: 0.3})
        return drafted

    used = driver.serve(40, timed, 4, 0.8, BOTH, 6000.0)
    assert used[:4].count(None) <= 1 and None not in used[-20:]


def test_pages_that_are_not_left_out_save_nothing() -> None:
    """Of a window of 512 tokens with 16 sinks in pages of 128, 751 tokens read everything."""
    recipes = Recipes([WHOLE], [SMALL.window], 128)
    assert recipes.applies(SMALL, np.array([600, 751, 752, 6000])).tolist() == [False, False, True, True]
    assert counted(recipes, [WHOLE], 751) == [] and counted(recipes, [WHOLE] * 2, 751, 752) == [(SMALL, 1, 1)]
