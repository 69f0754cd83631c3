"""The hybrid method over two made-up drafters: who drafts for whom, and what each hears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freedraft.config import ConfigError
from freedraft.cost.acceptance import PASS_KINDS
from freedraft.cost.policies import make_controller
from freedraft.draft import DraftBatch
from freedraft.hybrid import method as hybrid_method
from freedraft.hybrid.method import HybridMethod
from freedraft.hybrid.options import HybridOptions
from freedraft.method import Method
from freedraft.step import EngineContext, Step
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.rounds import DraftPassEstimate
from sssd_plugin.options import SssdOptions
from tests.support.steps import chains, make_step

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
CONFIG = SimpleNamespace(to_dict=lambda: SHAPE)


def drafted(step: Step, rows: np.ndarray, lengths: Any, first: int, score: float, kind: int) -> DraftBatch:
    """Chains of tokens that count up from `first` for some requests, roots for the others."""
    by_row = dict(zip(rows.tolist(), lengths, strict=True))
    draft = chains([[score] * int(by_row.get(b, 0)) for b in range(step.batch_size)], kind)
    draft.tokens[:] += first - 1
    draft.tokens[:, 0] = step.roots
    return draft


class Host(Method):
    """Has three sure tokens for requests whose name begins with "copy", nothing for others."""

    add_corpus = remove_corpus = corpora = None

    def __init__(self, options: Any, context: EngineContext) -> None:
        super().__init__(options, context, make_controller(context), "host")
        self.ended: list[str] = []
        self.verified: list[int] = []

    def update(self, step: Step) -> None:
        self.verified = step.drafted.tolist()

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        rows = np.array([i for i, name in enumerate(step.request_ids) if name.startswith("copy")], np.intp)
        return drafted(step, rows, [min(3, max_draft_len)] * len(rows), 10, 0.97, 1)

    def finish(self, request_id: str, output: Any) -> None:
        self.ended.append(request_id)


class Model(Method):
    """Two tokens for whom it is asked, at a share `seconds` of a step each; every tenth round is a trial."""

    def __init__(self, options: Any, context: EngineContext, controller: Any) -> None:
        super().__init__(options, context, controller, "model")
        self.asked: list[list[str]] = []
        self.paid: list[bool] = []
        self.seconds = 0.1

    def capacities(self, step: Step) -> np.ndarray:
        return np.minimum(step.capacities, 2)

    def estimate(self, requests: int, max_draft_len: int) -> DraftPassEstimate:
        m = np.arange(1, max_draft_len + 1)
        seconds = m * self.seconds * float(self.controller.measured.step_seconds(1, 1))
        return DraftPassEstimate(requests * np.cumsum(0.9**m), requests * m, seconds)

    def begin_round(self, *, pays: bool) -> bool:
        self.paid.append(pays)
        return pays or len(self.paid) % 10 == 0

    def propose_for(self, step: Step, rows: Any, limits: Any, rest: Any) -> DraftBatch:
        self.asked.append([step.request_ids[i] for i in rows.tolist()])
        self.rest = rest
        return drafted(step, rows, np.minimum(2, limits), 50, 0.9, PASS_KINDS)


@pytest.fixture(autouse=True)
def drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_method, "SssdMethod", Host)
    monkeypatch.setattr(hybrid_method, "LayerSkipMethod", Model)


def method(**context: Any) -> HybridMethod:
    return HybridMethod(HybridOptions(), EngineContext(hf_config=CONFIG, max_draft_tokens=8, **context))


def drive(hybrid: HybridMethod, names: list[str], steps: int, accept: str = "host") -> None:
    """Steps in which what one of the two drafts is accepted; the controller is told times, not measured ones."""
    times, batch = hybrid.controller.measured.times, len(names)
    gained, drafted = [[5]] * batch, [0] * batch
    for _ in range(steps):
        for _ in range(2):
            times.update(batch, batch, 300.0, 0.030)
            times.update(batch, 6 * batch, 300.0, 0.032)
        draft = hybrid.draft(make_step(names, gained, drafted=drafted))
        draft.check()
        drafted = (draft.counts - 1).tolist()
        gained = []
        for b, count in enumerate(draft.counts.tolist()):
            chain = draft.tokens[b, 1:count].tolist()
            right = bool(chain) and (chain[0] == 10) == (accept == "host")
            gained.append([*chain, 99] if right or accept == "both" else [98])


def test_draft_passes_go_to_whom_n_grams_say_nothing() -> None:
    hybrid = method()
    drive(hybrid, ["copy-1", "new-1"], 1)
    assert hybrid.unmatched.tolist() == [False, True]
    drive(hybrid, ["copy-1", "new-1", "copy-2", "new-2"], 40, accept="both")
    assert sorted(hybrid.passes.asked[-1]) == ["new-1", "new-2"]
    assert hybrid.passes.rest.requests == 2 and hybrid.passes.rest.query_tokens >= 6
    assert hybrid.ngrams.verified == [3, 0, 3, 0], "of its own drafts"


@pytest.mark.parametrize("widths", [None, (1, 2, 4, 8)])
@pytest.mark.parametrize(("seconds", "pays"), [(0.1, True), (1.2, False), (5.0, False)])
def test_passes_pay_for_their_time_or_are_trials(seconds: float, pays: bool, widths: tuple[int, ...] | None) -> None:
    hybrid = method(widths=widths)
    hybrid.passes.seconds = seconds
    drive(hybrid, ["new-1", "new-2"], 30, accept="both")
    assert hybrid.passes.paid[-10:] == [pays] * 10
    assert len(hybrid.passes.asked) == (len(hybrid.passes.paid) if pays else 3)


@pytest.mark.filterwarnings("error")
def test_a_step_without_requests_is_not_priced() -> None:
    """vLLM's V1 has one where all rows are in prefill."""
    assert method().draft(make_step([], [])).batch_size == 0


def test_both_hear_of_the_end_and_options_go_to_their_owners() -> None:
    hybrid = method()
    hybrid.begin("a", np.zeros(2, np.int32), None, {})
    hybrid.finish("a", None)
    assert hybrid.ngrams.ended == ["a"]
    ngrams, passes = HybridOptions(live="memory", metrics_port=7, shape="chain", sinks=4).parts()
    assert ngrams == SssdOptions(live="memory", metrics_port=7, shape="chain")
    assert passes == LayerSkipOptions(metrics_port=7, shape="chain", sinks=4)


def test_one_that_fails_at_the_end_does_not_keep_it_from_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid, ended = method(), list[str]()
    monkeypatch.setattr(hybrid.ngrams, "finish", None)
    monkeypatch.setattr(hybrid.passes, "finish", lambda request_id, output: ended.append(request_id))
    with pytest.raises(TypeError):
        hybrid.finish("a", None)
    assert ended == ["a"]


def test_a_model_that_cannot_be_priced_is_refused() -> None:
    unreadable = SimpleNamespace(to_dict=dict)
    with pytest.raises(ConfigError, match="cannot price"):
        HybridMethod(HybridOptions(), EngineContext(hf_config=unreadable, max_draft_tokens=8))
