"""bench/heads_replay.py: heads are right as often as it assumes, and speed is that of its step times. The merge is
compared with the product's in tests/kernels/test_kernel_tokens.py."""

import random
from itertools import takewhile

import numpy as np
import pytest

from bench import heads_replay
from bench.heads_replay import (
    HEADS,
    MACHINES,
    NGRAMS,
    Text,
    by_length,
    by_score,
    chosen,
    head_alone,
    head_tokens,
    recorded,
    tail,
)
from bench.lib.rivals import Cell
from bench.replay import learning, make

VOCABULARY, ANSWERS = 60, 40


@pytest.fixture(scope="module")
def text() -> Text:
    """Answers of which half are those before with other tokens here and there, as agents' are."""
    choose, rows, answer = random.Random(0), [], list[int]()
    for number in range(ANSWERS):
        if number % 2 == 0:
            answer = [choose.randrange(VOCABULARY) for _ in range(60)]
        answer = [token if choose.random() < 0.95 else choose.randrange(VOCABULARY) for token in answer]
        rows.append((np.arange(4, dtype=np.int32), np.array(answer, np.int32)))
    live, learn = learning(VOCABULARY)
    found = recorded(rows, make(Cell("sssd", "chain", 1 + NGRAMS), [], VOCABULARY, None, live), learn)
    live.close()
    return found


def test_n_grams_are_right_where_the_text_goes_on_so(text: Text) -> None:
    right = text.right(text.ngrams)
    for at in random.Random(0).sample(range(len(text.tokens)), 200):
        truth = text.tokens[at : at + text.left[at]].tolist()
        draft = text.chains.chain(at)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(draft, truth, strict=False))
        assert right[at] == len([*same])
    assert text.tokens_per_step(right) > 1.5
    assert text.tokens_per_step(0 * right) == 1.0


@pytest.mark.parametrize("correlated", [False, True])
def test_a_head_is_right_as_often_as_it_says(text: Text, correlated: bool) -> None:
    survival, _ = HEADS["mtp"]
    head = head_tokens(text, survival, correlated=correlated)
    right, there = text.right(head), np.array([(text.left > j).sum() for j in range(3)])
    shares = np.array([(right > j).sum() for j in range(3)]) / there
    np.testing.assert_allclose(shares, survival, atol=0.03)
    known = text.right(text.ngrams) > 0
    better = (right[known] > 0).mean() - (right[~known] > 0).mean()
    assert better > 0.1 if correlated else abs(better) < 0.05


def test_tail_never_accepts_less_than_the_head_and_agree_is_below_the_oracle(text: Text) -> None:
    head = head_tokens(text, HEADS["mtp"][0], correlated=False)
    right, tails = text.right(head), text.right(tail(head, text.ngrams))
    assert (tails >= right).all() and (tails > right).any()
    best = np.maximum(right, text.right(text.ngrams))
    assert (tails <= best).all()
    for agree in (False, True):
        assert (
            text.tokens_per_step(right)
            < text.tokens_per_step(chosen(text, head, agree=agree))
            < text.tokens_per_step(best)
        )


def test_speed_is_that_of_the_known_step_times(monkeypatch: pytest.MonkeyPatch, text: Text) -> None:
    """Of a head whose n-grams cost nothing, and of one whose n-grams cost so much that none should be taken."""
    monkeypatch.setattr(heads_replay, "LEAST_STEPS", 300)
    monkeypatch.setattr(heads_replay, "LEAST_TOKENS", 2 * len(text.tokens))
    head = head_tokens(text, HEADS["mtp"][0], correlated=True)
    right, tails = text.right(head), text.right(tail(head, text.ngrams))
    free, dear = (MACHINES["8B"]._replace(seconds=lambda b, n, ms=ms: 0.005 + ms * n) for ms in (1e-9, 1e-2))
    for machine, least, most in (
        (free, 1.05, text.tokens_per_step(tails) / text.tokens_per_step(right)),
        (dear, 0.9, 1.01),
    ):
        stock = head_alone(text, 8, machine, right, 3, 3)["rate"]
        per_step = 8 / float(machine.seconds(8, 32) + 3 * machine.one_pass[8])
        assert stock == pytest.approx(text.tokens_per_step(right) * per_step, rel=0.05)
        found = by_length(text, 8, machine, tails, 3, 3)
        assert least < found["rate"] / stock <= 1.01 * most
    rows = by_score(text, 8, free, head, tails, 3)
    assert rows["rate"] > by_score(text, 8, free, head, None, 3)["rate"]
