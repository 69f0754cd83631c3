"""Tokens of requests by slot, against lists that are kept one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freedraft.engines.vllm.v2.requests import Requests

SLOTS, LENGTH, NEWEST = 4, 60, 4


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_traffic(random: Any) -> None:
    from vllm import SamplingParams

    requests, parameters = Requests(SLOTS, LENGTH, NEWEST), SamplingParams(ignore_eos=True)
    running: dict[str, tuple[int, int, list[int]]] = {}  # slot, prompt's length, tokens
    preempted: dict[str, tuple[int, list[int]]] = {}
    for number in range(40):
        free = sorted(set(range(SLOTS)) - {slot for slot, _, _ in running.values()})
        action = random.choice(["begin", "step", "step", "preempt", "finish"])
        if action == "begin" and free:
            name, slot = f"r{number}", random.choice(free)
            prompt = [random.randrange(99) for _ in range(random.randint(1, 9))]
            tokens, size = list(prompt), len(prompt)
            if preempted and random.random() < 0.5:
                name, (size, tokens) = preempted.popitem()
            parameters = SamplingParams(ignore_eos=True, max_tokens=LENGTH)
            assert requests.add(name, slot, tokens, size, parameters).tolist() == tokens
            running[name] = slot, size, list(tokens)
        elif action == "step" and running:
            names = random.sample(sorted(running), random.randint(1, len(running)))
            rows = np.full((len(names), NEWEST + 2), 7, np.int32)
            expected = []
            for i, name in enumerate(names):
                slot, _, tokens = running[name]
                lost = random.random() < 0.1  # of a step that nobody told us of
                gained = [random.randrange(99) for _ in range(random.randint(0, min(NEWEST, LENGTH - 2 - len(tokens))))]
                rows[i, :2] = len(gained), len(tokens) + len(gained) + lost
                rows[i, 2 + NEWEST - len(gained) :] = gained
                if gained and not lost:
                    tokens += gained
                    expected.append(i)
            slots = np.array([running[name][0] for name in names], np.int32)
            assert requests.append(slots, rows[:, 0], rows[:, 1], rows[:, 2:]).tolist() == expected
        elif action == "preempt" and running:
            name = random.choice(sorted(running))
            _, size, tokens = running.pop(name)
            requests.preempt(name)
            preempted[name] = size, tokens
        elif action == "finish" and running | preempted:
            name = random.choice(sorted(running | preempted))
            size, tokens = running.pop(name)[1:] if name in running else preempted.pop(name)
            output = requests.finish(name)
            assert output is not None and output.tolist() == tokens[size:]
        for slot, _, tokens in running.values():
            assert requests.tokens[slot, : requests.lengths[slot]].tolist() == tokens
        assert set(requests.slots) == running.keys() | preempted.keys()
    assert requests.finish("unknown") is None


def test_a_request_ends_where_its_parameters_or_the_model_say() -> None:
    from vllm import SamplingParams

    requests = Requests(SLOTS, LENGTH, NEWEST)
    for slot, (max_tokens, most) in enumerate(((3, 5), (LENGTH, LENGTH))):
        requests.add(str(slot), slot, [1, 2, 3], 2, SamplingParams(max_tokens=max_tokens))  # one of them written before
        assert requests.most[slot] == most


def test_a_trees_width_is_not_cut_before_the_last_token() -> None:
    """Chains end before the last token, trees are as wide as they may be until then, and no node has a position that
    the model lacks."""
    from vllm import SamplingParams

    requests, tree = Requests(SLOTS, LENGTH, NEWEST), np.ones(1, np.bool_)
    for max_tokens in (1, 2, 3, LENGTH):
        for known in range(1, min(max_tokens, LENGTH - 1) + 1):
            requests.add("a", 0, list(range(known)), 0, SamplingParams(max_tokens=max_tokens))
            at = np.zeros(1, np.int32), np.array([known], np.int32), NEWEST
            to_come, places = min(max_tokens, LENGTH) - known, LENGTH - known
            for chain in (None, ~tree):
                assert requests.room(*at, chain).tolist() == [min(NEWEST, max(to_come - 1, 0))]
            assert requests.room(*at, tree).tolist() == [min(NEWEST, places - 1) if to_come > 1 else 0]
            requests.finish("a")
