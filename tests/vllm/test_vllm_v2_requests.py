"""What model runner V2 has on the host: tokens of requests, against lists that are kept one token at a time, and drafts
of any trees on their way to the device, against plain Python."""

import copy

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freedraft.engines.vllm.v2.drafting import HostDrafting
from freedraft.engines.vllm.v2.lengths import LENGTHS, receive_lengths
from freedraft.engines.vllm.v2.requests import GainedTokens, Requests, Taken, write_drafts
from freedraft.guarded_method import FIRST_PAUSE, GuardedMethod
from freedraft.step import EngineContext, room
from tests.support import repeat_drafter
from tests.support.random_trees import path_to, random_batch
from tests.support.simulated import V2, Text
from tests.support.steps import make_step

SLOTS, LENGTH, NEWEST = 4, 60, 4


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_traffic(random):
    """Requests also lose their slots while a step runs that they take part in."""
    from vllm import SamplingParams

    requests, parameters = Requests(SLOTS, LENGTH, NEWEST), SamplingParams(ignore_eos=True, max_tokens=LENGTH)
    running: dict[str, tuple[int, int, list[int]]] = {}  # slot, prompt's length, tokens
    preempted: dict[str, tuple[int, list[int]]] = {}
    ended: dict[str, tuple[tuple[int, int], list[int]]] = {}  # its last slot and generation, output
    launched: list[tuple[str, int, int, int, bool, list[int]]] = []  # a step that runs: id, slot, generation, length

    def arrive():
        gained = np.full((len(launched), NEWEST + 3), 7, np.int32)
        expected = []
        for i, (name, slot, generation, length, lost, new) in enumerate(launched):
            gained[i, :3] = len(new), NEWEST, length + len(new) + lost
            gained[i, 3 + NEWEST - len(new) :] = new
            if lost or not new:
                continue
            if name in ended and ended[name][0] == (slot, generation):
                ended[name][1].extend(new)
            elif name in running and requests.generations[slot] == generation:
                running[name][2].extend(new)
                expected.append(i)
        step = GainedTokens(SLOTS, NEWEST - 1, torch.device("cpu"))
        step.slots = np.array([slot for _, slot, *_ in launched], np.int32)
        step.generations = np.array([generation for _, _, generation, *_ in launched], np.int64)
        step.wait()[:] = gained
        may_draft, most = requests.set_verified(step, 3, None), requests.limits[step.slots]
        taken = requests.append(step, 3)
        assert taken.rows.tolist() == expected
        found = room(most[expected], gained[expected, 2], 3)
        assert taken.capacities.tolist() == found.tolist() and (may_draft or not found.any())
        for name, (_, output) in ended.items():
            assert requests.take_ended(name).tolist() == output
        ended.clear()
        launched.clear()

    for number in range(60):
        free = sorted(set(range(SLOTS)) - {slot for slot, _, _ in running.values()})
        action = random.choice(["begin", "begin", "launch", "launch", "arrive", "preempt", "finish"])
        if action == "begin" and free:
            name, slot = f"r{number}", random.choice(free)
            prompt = [random.randrange(99) for _ in range(random.randint(1, 9))]
            tokens, size = list(prompt), len(prompt)
            if preempted and random.random() < 0.5:
                name, (size, tokens) = preempted.popitem()
            assert requests.add(name, slot, tokens, size, parameters).tolist() == tokens
            running[name] = slot, size, list(tokens)
        elif action == "launch" and running and not launched:
            for name in random.sample(sorted(running), random.randint(1, len(running))):
                slot, _, tokens = running[name]
                count = random.randint(0, min(NEWEST, LENGTH - 2 - len(tokens)))
                lost = random.random() < 0.1  # of a step that nobody told us of
                new = [random.randrange(99) for _ in range(count)]
                launched.append((name, slot, int(requests.generations[slot]), len(tokens), lost, new))
        elif action == "arrive" and launched:
            arrive()
        elif action == "preempt" and running:
            name = random.choice(sorted(running))
            _, size, tokens = running.pop(name)
            requests.preempt(name)
            preempted[name] = size, tokens
            launched[:] = [row for row in launched if row[0] != name] if random.random() < 0.5 else launched
        elif action == "finish" and running | preempted:
            name = random.choice(sorted(running | preempted))
            if name in preempted:
                launched[:] = [row for row in launched if row[0] != name]
            slot = running[name][0] if name in running else 0
            left = slot, int(requests.generations[slot]) if name in running else -1
            size, tokens = running.pop(name)[1:] if name in running else preempted.pop(name)
            requests.finish(name)
            ended[name] = left, tokens[size:]
            if not launched:
                assert requests.take_ended(name).tolist() == ended.pop(name)[1]
        for slot, _, tokens in running.values():
            assert requests.tokens[slot, : requests.lengths[slot]].tolist() == tokens
        assert requests.slots.keys() == running.keys() and requests.ended.keys() == ended.keys()
        assert requests._preempted.keys() == preempted.keys()
    requests.finish("unknown")
    assert "unknown" not in requests.ended


WIDEST, PLACES, ROWS = 64, 9, 7


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_trees_and_chains_of_one_batch(seed):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, ROWS))
    draft = random_batch(rng, requests, int(rng.integers(1, WIDEST + 2)), 10**6)
    rows, places = rng.permutation(ROWS)[:requests], rng.permutation(PLACES)[:ROWS].astype(np.int32)
    slots = places[rows]
    trees = rng.random() < 0.8  # else there is no room for masks, and all drafts are chains
    allowed = (rng.random(PLACES) < 0.6) & trees
    branches, proposed = allowed[slots], np.full((PLACES, 1 + trees, WIDEST), 3, np.int64)
    held, step = Requests(PLACES, 99, WIDEST, trees=allowed), GainedTokens(ROWS, WIDEST, torch.device("cpu"))
    step.slots = places
    step.wait()[:, -1] = -5
    none = np.zeros(requests, np.int64)
    taken, parents = Taken(none, none, rows.astype(np.int32), *3 * [none.astype(np.int32)]), held.parents
    limited = copy.deepcopy(draft)
    limited.limit(np.full(requests, WIDEST, np.int32), branches)
    limited.check()
    counts = write_drafts(limited, taken, step, held, proposed, 8)
    assert held.drafted[slots].tolist() == counts.tolist() and (held.drafted_behind[slots] == 8).all()
    assert (held.roots[slots] == -5).all()
    for b in range(requests):
        nodes = list(range(1, int(draft.counts[b])))
        if not branches[b]:
            chain = [0]
            for node in nodes:
                if draft.parents[b, node] == chain[-1]:
                    chain.append(node)
            nodes = chain[1:]
        count = len(nodes)
        assert counts[b] == count
        tokens, masks = proposed[slots[b], 0], proposed[slots[b], -1]
        assert tokens.tolist() == [*draft.tokens[b, nodes], *[-5] * (WIDEST - count)]
        place = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        followed = [place[int(draft.parents[b, node])] for node in nodes]
        assert parents[slots[b], : count + 1].tolist() == ([-1, *followed] if len(rows) else [])
        if not branches[b]:
            assert not trees or not masks.any()
            continue
        for i, node in enumerate(nodes):
            path = path_to(draft, b, node)[1:]
            assert masks[i].astype(np.uint64) == sum(1 << (place[above] - 1) for above in path)
        assert not masks[count:].any()
    others = np.setdiff1d(places, slots)
    assert (proposed[others, 0] == -5).all() and not proposed[others, 1:].any()
    assert (np.delete(proposed, places, 0) == 3).all(), "of requests that did not take part"
    assert not write_drafts(None, taken, step, held, proposed, 9).any() and (proposed[places, 0] == -5).all()


def test_in_a_pause_no_drafts_are_scheduled():
    """Each step would verify placeholders, for up to thousands of steps."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    ours, served = HostDrafting.__new__(HostDrafting), V2(lambda batch, tokens: 0.01)
    ours._head = 0
    ours.guarded = GuardedMethod(repeat_drafter.SPEC, repeat_drafter.RepeatOptions(), EngineContext())
    ours.lengths, ours.gained = served.controller, GainedTokens(SLOTS, NEWEST, torch.device("cpu"))
    ours.requests, scheduler = Requests(SLOTS, LENGTH, NEWEST), Scheduler.__new__(Scheduler)
    scheduler.dynamic_sd_lookup = [8] * 33

    def scheduled():
        output = ModelRunnerOutput(["a"], {"a": 0})
        setattr(output, LENGTHS, ours.decide(1))
        receive_lengths(scheduler, None, output)
        return scheduler.dynamic_sd_lookup

    served.run(1, Text(0.9, 0.9), 200)
    assert scheduled()[1] > 0
    with ours.guarded:
        raise RuntimeError("on purpose")
    assert scheduled() == [8, *[0] * 32]
    for _ in range(FIRST_PAUSE):
        ours.guarded.step(make_step(["a"], [[1]], capacities=0), "cost")
    assert scheduled()[1] > 0
