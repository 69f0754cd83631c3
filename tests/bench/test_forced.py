"""What bench/lib/forcing.py computes of answers, steps and logits, without an engine."""

from __future__ import annotations

import pytest
import torch

from bench.lib import forcing
from bench.lib.forcing import Answer, Forcing

TEXTS = [([5, 6], [7, 8, 9]), ([1, 2, 3], [4, 5])]


@pytest.fixture
def started(tmp_path):
    forcing.save_texts(tmp_path, TEXTS)
    return Forcing(tmp_path), tmp_path


def test_the_recorded_token_is_forced_by_request_and_position(started):
    forcing_, folder = started
    forcing_.begin(3, "1-17")
    forcing_.begin(4, "_warmup_0_")  # an engine's own
    logits = torch.randn(4, 10)
    texts = torch.cat([forcing_.which[torch.tensor([3, 3])], torch.tensor([0, 0])])
    forcing_.force(logits, texts, torch.tensor([2, 3, 1, 2]), None, (2, 1))
    assert logits.argmax(1).tolist() == [4, 5, 7, 8]
    ((_, *step),) = forcing.logged(folder, "step")
    assert step == [2, 1, 4] and forcing.logged(folder, "step") == []
    forcing_.on, free = False, torch.zeros(1, 10)
    forcing_.force(free, texts[:1], torch.tensor([2]), None, (1, 1))
    assert not free.any()


def test_log_probabilities_are_those_of_the_accepted_path(started):
    """Of a tree, rows with another input token than the text's are left out; a position with two such rows is unknown,
    and what a later step says of a position holds."""
    forcing_, folder = started
    forcing_.scores = True
    at, inputs = torch.tensor([1, 2, 2, 3, 3]), torch.tensor([6, 7, 1, 8, 8])
    logits = torch.randn(5, 10)
    expected = torch.log_softmax(logits, 1)
    forcing_.force(logits, torch.zeros(5, dtype=torch.int64), at, inputs, (1, 1))
    found = forcing.last_scores(forcing.logged(folder, "scores"))
    assert found == pytest.approx({(0, 1): float(expected[0, 7]), (0, 2): float(expected[1, 8])})
    assert forcing.last_scores([[(0, 1, -2.0), (0, 2, -1.0)], [(0, 2, -3.0)]]) == {(0, 1): -2.0, (0, 2): -3.0}


def test_figures():
    """One request at a time, three answers of five tokens in three passes each, drafts of two."""
    came = [(1.0, 1), (1.1, 3), (1.2, 4), (1.3, 5)]
    answers = [Answer(n, float(n), [0] * 5, [(at + n, tokens) for at, tokens in came]) for n in range(3)]
    steps = [[at + n, 1, at > 1.0, 3 if at > 1.0 else 1] for n in range(3) for at, _ in came]
    found = forcing.figures(answers, 1, steps)
    assert found["tokens_per_step"] == 4 / 3 and found["accepted"] == 3 / 18 and found["steps"] == 6
    assert found["step_ms"] == pytest.approx(100) and found["tpot_ms"] == pytest.approx(75)
    assert found["tokens_per_s"] == pytest.approx(5.0)  # four of the first answer behind 1.0, and one at 2.0
    answers[0].passes = 4
    assert forcing.figures(answers, 1, steps)["tokens_per_step"] == 12 / 10
