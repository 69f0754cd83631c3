"""What an engine asks of a selection: requests begin once, sets change, searches keep to their share of the time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from freedraft.config import ConfigError
from freedraft.engines.many_sets import Sublayer, forward
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.selection.base import Selection, Static
from layerskip_plugin.selection.knapsack import Choice, Knapsack, Plan
from layerskip_plugin.selection.knn import Domains, Knn
from layerskip_plugin.selection.online_search import Swift
from layerskip_plugin.selection.serving import COMPILED, Selector
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

LAYERS = 8
CONFIG = SimpleNamespace(
    model_type="llama",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    vocab_size=24,
)


def skip(*sublayers: int) -> SkipSet:
    return SkipSet.of_sublayers(sublayers, LAYERS)


def test_requests_ask_for_a_set_by_name(caplog: pytest.LogCaptureFixture) -> None:
    selector = Selector(Static({"little": skip(2), "much": skip(2, 3)}))
    context = np.zeros(4, np.int32)
    with caplog.at_level(logging.WARNING, "freedraft.layerskip"):
        assert selector.unknown(list("abcd")) == [0, 1, 2, 3]
        selector.begin(list("abcd"), ["much", None, "no such", "much"])
        selector.begin(["odd"], [["much"]])  # type: ignore[list-item]
    assert "no skip set 'no such', only little, much" in caplog.text
    assert selector.choose(list("dcba"), context) == [skip(2, 3), skip(2), skip(2), skip(2, 3)]
    assert selector.unknown(list("abcde")) == [4] and selector.unknown(list("dcba")) == []
    selector.finish(["a", "b", "odd", "z"])
    assert len(selector) == 2 and len(selector.selection.asked) == 1


def test_one_set_for_all_keeps_nothing() -> None:
    selector = Selector(Static({"": SkipSet.empty(LAYERS)}))
    assert selector.unknown(["a"]) == [] and selector.choose(["a"], np.zeros(1, np.int32)) == [SkipSet.empty(LAYERS)]
    assert not len(selector) and selector.selection.max_lengths(np.zeros(2, np.int32)) is None


def test_set_and_length_are_those_of_the_context() -> None:
    plan = Plan((10, 100), (Choice(skip(2), 2, 1.0), Choice(skip(2, 3), 4, 1.0)), "here")
    selector = Selector(Knapsack(plan))
    selector.begin(["a", "b"])
    assert selector.choose(["a", "b"], np.array([20, 200], np.int32)) == [skip(2), skip(2, 3)]
    assert selector.choose(["a", "b"], np.array([40, 200], np.int32)) == [skip(2, 3)] * 2
    assert selector.selection.max_lengths(np.array([20, 40], np.int32)).tolist() == [2, 4]


def test_domains_that_share_a_set_share_its_module() -> None:
    sets = (skip(2), skip(4), skip(2), skip(4))
    anchors = np.eye(3, 5, dtype=np.float32)
    domains = Domains(("a", "b", "c"), sets, np.zeros(5, np.float32), anchors, np.arange(3, dtype=np.int32), 0.5)
    policy = Knn(domains)
    assert policy.sets() == {"all domains": skip(4), "a": skip(2)}
    policy.begin(["a", "b", "c", "far"], hidden=np.concatenate([anchors, -np.ones((1, 5), np.float32)]))
    assert policy.choose(["a", "b", "c", "far"], np.zeros(4, np.int32)) == [skip(2), skip(4)] * 2
    assert policy.needs_hidden and Selector(policy).compiled == COMPILED


class Clock:
    """Time that passes by itself, and while sets are scored."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def searching(share: float, cost: float) -> tuple[Selector, Clock, list[float]]:
    clock, rng, spent = Clock(), np.random.default_rng(0), []
    importance = np.linspace(0.0, 0.3, 2 * LAYERS)

    def evaluate(skips: Sequence[SkipSet]) -> np.ndarray:
        clock.now += cost * len(skips)
        spent.append(cost * len(skips))
        true = [np.prod(1 - importance[list(s.sublayers)]) for s in skips]
        return np.array(true) + 0.01 * rng.standard_normal(len(skips))

    selector = Selector(Swift(LAYERS, evaluate, clock=clock, patience=10**6, beta=10**6), share)
    selector.budget.clock = clock
    selector.budget.updated = clock()
    return selector, clock, spent


@pytest.mark.parametrize(("share", "cost"), [(0.01, 0.002), (0.01, 0.05), (0.2, 0.01)])
def test_a_search_takes_its_share_of_serving_time(share: float, cost: float) -> None:
    selector, clock, spent = searching(share, cost)
    assert selector.compiled == 0
    found = []
    for _ in range(20000):
        clock.now += 0.03
        new = selector.search(lambda: True)
        if new is not None:
            found.append(new)
    assert 0.7 * share * clock.now < sum(spent) < 1.02 * share * clock.now
    assert found and found[-1] == selector.sets["swift"]
    # Mostly in batches of many sets, since each scores the incumbent once more.
    assert np.median(spent) > 4 * cost


def test_a_search_waits_for_text() -> None:
    selector, clock, spent = searching(0.5, 0.01)
    for _ in range(100):
        clock.now += 1.0
        assert selector.search(lambda: False) is None
    assert not spent
    static: Selection = Static({"": skip(2)})
    refuse: Callable[[], bool] = lambda: pytest.fail("nothing to search")  # noqa: E731
    assert Selector(static).search(refuse) is None


def test_many_sets_in_one_pass_are_those_sets_one_by_one() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(6, 6) / 3 for _ in range(2 * LAYERS)]
    width = 4

    def run(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        if index % 2:
            return lambda x: torch.tanh(x @ weights[index])
        # Mixes the rows of each set, as attention does over a text.
        return lambda x: torch.tanh((x.view(-1, width, 6) @ weights[index]).cumsum(1)).flatten(0, 1)

    sublayers = [Sublayer(torch.nn.functional.normalize, run(i), i % 2 == 0) for i in range(2 * LAYERS)]
    bits = np.random.default_rng(0).random((5, 2 * LAYERS)) < 0.4
    bits[0], bits[1], bits[:, 7] = False, True, True
    start = torch.randn(5, width, 6)
    together = forward(start, sublayers, bits)
    for one, row, stream in zip(together, bits, start, strict=True):
        for index, (norm, sublayer, _) in enumerate(sublayers):
            if not row[index]:
                stream = stream + sublayer(norm(stream))
        assert torch.allclose(one, stream, atol=1e-5)


def test_options_of_each_selection(tmp_path: Path) -> None:
    model = model_fingerprint(CONFIG)
    some = SkipSet.of_sublayers([2], LAYERS, model)
    some.save(tmp_path / "set.json")
    Plan((10,), (Choice(some, 3, 1.0),), "here").save(tmp_path / "plan.json", {})
    plan, one = str(tmp_path / "plan.json"), str(tmp_path / "set.json")

    def selector(**options: object) -> Selector:
        return LayerSkipOptions.parse(options).make_selector(CONFIG, lambda skips: np.zeros(len(skips)), "here")

    assert selector(skip_set=one).sets == {"set": some}
    assert selector(selection="knapsack", selection_file=plan).sets == {"context 10": some}
    Plan((10,), (Choice(some, 0, 1.0, trial_length=3),), "here").save(tmp_path / "plain.json", {})
    for lookahead, length in (("cost", 3), ("fixed", 0)):
        plain = selector(selection="knapsack", selection_file=tmp_path / "plain.json", lookahead=lookahead)
        assert plain.selection.max_lengths(np.array([10], np.int32)).tolist() == [length]
    assert not selector(selection="knapsack").sets["knapspec"], "searched, where there is no plan"
    swift = selector(selection="swift", search_share=0.05)
    assert swift.budget.share == 0.05 and not {0, 1, 14, 15} & set(swift.sets["swift"].sublayers)
    for options, says in (
        ({"selection": "knn"}, "needs the option 'selection_file'.*calibrate knn"),
        ({"selection": "swift", "selection_file": plan}, "does not go with selection swift"),
        ({"selection": "knapsack", "selection_file": plan, "skip_set": one}, "does not go with selection knapsack"),
        ({"selection": "knapsack", "skip_set": one}, "does not go with selection knapsack"),
        ({"selection": "knn", "selection_file": plan}, "format"),
    ):
        with pytest.raises(ValueError, match=says):
            selector(**options)
    with pytest.raises(ConfigError, match=r"'selection_file' is not a file.*freedraft calibrate"):
        LayerSkipOptions.parse({"selection_file": "/no/such/file"})
