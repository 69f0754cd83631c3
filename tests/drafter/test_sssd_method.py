"""SSSD as an engine sees it: tokens that it missed, chains or trees, policies, and what stops the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freedraft.cost.controller import Auto
from freedraft.cost.policies import Fixed, Knee
from freedraft.step import EngineContext
from sssd_plugin.method import SssdMethod
from sssd_plugin.options import SssdOptions
from tests.support.steps import make_step

VOCAB = 500
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
CONFIG = SimpleNamespace(to_dict=lambda: SHAPE)
PROMPT = [*range(100, 130), 1, 2, 3, *range(100, 110)]


def method(widths: tuple[int, ...] | None = None, **options: Any) -> SssdMethod:
    context = EngineContext(hf_config=CONFIG, vocab_size=VOCAB, max_draft_tokens=7, widths=widths)
    return SssdMethod(SssdOptions(**{"policy": "fixed", **options}), context)


def drafted(sssd: SssdMethod, text: list[int], gained: int = 1) -> list[int]:
    draft = sssd.draft(make_step(["a"], [text[-gained:]], texts=[text]))
    draft.check()
    return draft.chain(0)


def test_tokens_that_it_missed_are_read_from_the_engine() -> None:
    """A step that it was not asked about, a request that it never met, one that was rolled back."""
    sssd, text = method(), [*PROMPT, 110]
    sssd.begin("a", np.array(PROMPT, np.int32), None, {})
    assert drafted(sssd, text) == [*range(111, 118)]
    text += [111, 112, 113]
    assert drafted(sssd, text) == [*range(114, 121)], "two of these three tokens came in steps that it did not see"
    assert sssd.drafter.tokens("a").tolist() == text
    text = [*text[:-2], 120]
    assert drafted(sssd, text) == [*range(121, 128)], "rolled back"
    assert sssd.drafter.tokens("a").tolist() == text
    fresh = method()
    assert drafted(fresh, text) == [*range(121, 128)]


@pytest.mark.parametrize(("widths", "shape"), [(None, "chain"), ((1, 2, 4, 8), "tree")])
def test_chains_where_lengths_may_differ_and_trees_where_they_may_not(
    widths: tuple[int, ...] | None, shape: str
) -> None:
    sssd = method(widths)
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2]
    step = make_step(["a"], [text], texts=[text], widths=widths)
    draft = sssd.draft(step)
    draft.check()
    branches = len(set(draft.parents[0, 1 : draft.counts[0]].tolist())) < draft.counts[0] - 1
    assert branches == (shape == "tree")


POLICIES = [({"policy": "auto"}, Auto), ({"policy": "knee"}, Knee), ({"policy": "fixed"}, Fixed)]


@pytest.mark.parametrize(
    ("options", "kind"), [*POLICIES, ({"policy": None}, Auto), ({"policy": None, "knee": 7}, Knee)]
)
def test_policies(options: dict[str, Any], kind: type) -> None:
    sssd = method(**options)
    assert type(sssd.controller) is kind
    assert sssd.min_score == (0.0 if kind is Auto else sssd.controller.profile.token_cost)
    assert method(**options, min_score=0.3).min_score == 0.3
    assert method((1, 8), **options).min_score == 0.0


@pytest.mark.parametrize(
    ("recycle", "scoring", "gives_logits", "recycles", "says"),
    [
        ("auto", "learned", True, True, ""),
        ("on", "learned", True, True, ""),
        ("off", "learned", True, False, ""),
        ("auto", "learned", False, False, ""),
        ("on", "learned", False, False, "option 'recycle' is on, but this engine gives no logits"),
        ("on", "paper", True, False, "option 'recycle' is on, but scoring 'paper' takes no logits"),
    ],
)
def test_logits_are_recycled_where_they_come(
    recycle: Any, scoring: Any, gives_logits: bool, recycles: bool, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = EngineContext(hf_config=CONFIG, vocab_size=VOCAB, gives_logits=gives_logits)
    sssd = SssdMethod(SssdOptions(recycle=recycle, scoring=scoring), context)
    assert sssd.needs_logits == recycles == (len(sssd.drafter._entries) > 0)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(says) and all(says in line for line in warned)
