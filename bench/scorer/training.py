"""Training of the learned scorer: replayed answers give examples, to which PyTorch fits a small network.

An example is a node on the true path of a draft: the inputs of its candidates, and which of them came next, if any.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lib import trace
from bench.lib.trace import Row, Sessions
from bench.scorer.long_contexts import EDITS, edit, long_rows
from bench.scorer.record import Recording
from bench.scorer.weights import initial_weights
from freedraft.compiled import compiled
from freedraft.draft import DraftBatch
from sssd_plugin.datastore.index.runs import View
from sssd_plugin.datastore.index.sub_index import SOURCE
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.method import LEADING, to_learn
from sssd_plugin.recycled_logits import TOP, Recycled, entries, put
from sssd_plugin.request_index import RequestIndex, ingest, request_at
from sssd_plugin.scoring.candidates import SHORTLIST, Scratch, scratch, size_of_scratch
from sssd_plugin.scoring.inputs import INPUTS, NODE_INPUTS, ROW, ROWS
from sssd_plugin.scoring.learned import FEW_CANDIDATES, Sources, draft_tree, effort_of, expand, look_back, start
from sssd_plugin.scoring.matches import MAX_MATCH
from sssd_plugin.scoring.places import NOWHERE, find_in_request, find_in_store, next_token
from sssd_plugin.scoring.places import ROWS as COPY_ROWS
from sssd_plugin.scoring.views import Tree, store_of, write_context
from sssd_plugin.scoring.weights import WIDTH, Weights
from sssd_plugin.sources import DATASTORE, LEARNT

NO_LOGITS = np.zeros((0, TOP), np.int32), np.zeros((0, TOP), np.float32)
NO_LIMIT = 1 << 31
UNSEEN = -1  # number of matches of a node that a draft does not expand
WITHOUT_LOGITS = Recycled(entries(0), np.int64(0))
SHAPES = ((16, False), (32, False), (16, True))  # (nodes, chain) of drafts, in turns
FOLDS, STORE_EVERY, RECYCLED_MEGABYTES = 4, 16, 64
RARE = 8  # times that a length was seen, below which the next shorter one counts more
LONG_ROWS, REPEATED = 2, 3  # recorded answers per answer over a long prompt; turns per turn that is repeated, edited
ROUNDS, EPOCHS, BATCH, RATE, CANDIDATES = 2, 14, 1024, 6e-3, FEW_CANDIDATES
"""The second round replays with the network of the first, so that examples come from the scorer's own drafts."""


class Examples(NamedTuple):
    """Nodes, and the tokens that followed them."""

    node_inputs: NDArray[np.floating]  # [E, NODE_INPUTS]
    inputs: NDArray[np.floating]  # [E, SHORTLIST, INPUTS]
    sizes: NDArray[np.int32]  # [E], number of candidates
    labels: NDArray[np.int32]  # [E], index of the candidate that followed, -1 for none


class Lesson(NamedTuple):
    """An answer to replay, and the store to draft from."""

    view: View
    answer: Recording
    recycled: Recycled = WITHOUT_LOGITS


@compiled(nogil=True)
def _replay(
    slots, s, truth, position, store, limits, weights, tree, scratch, recycled, start, top_tokens, top_log_probs,
    examples, filled,
):  # fmt: skip
    """Replay one request, adding examples from index `filled` on; return where its slot has to grow, and their number.
    If `recycled` has entries, the logits before `truth[start + i]` are `top_tokens[i]` and `top_log_probs[i]`."""
    while position < len(truth) and ingest(slots, s, truth, 0, position, position):
        sources = Sources(request_at(slots, s), store, recycled, (0, 0))
        scratch.matches[:, 0, 0] = UNSEEN
        n = draft_tree(sources, weights, limits, tree, scratch)
        current, parent, accepted = 0, len(scratch.ranges) - 1 if position > 1 else -1, 0
        effort = effort_of(limits[0], False)  # of chains, too, all candidates are examples
        while position + accepted < len(truth):
            token = truth[position + accepted]
            if scratch.matches[current, 0, 0] != UNSEEN and scratch.places[current].text == NOWHERE:
                known = look_back(sources, tree, scratch, current, parent)
                size, _ = expand(sources, weights, scratch, current, parent, effort, known)
                examples.node_inputs[filled] = scratch.node_inputs[0]
                examples.inputs[filled, :size] = scratch.inputs[:size]
                examples.sizes[filled], examples.labels[filled] = size, -1
                for i in range(size):
                    if scratch.found.candidates[scratch.shortlist[i]].token == token:
                        examples.labels[filled] = i
                filled += size > 0
            following = -1
            for i in range(1, n):
                if tree.parents[i] == current and tree.tokens[i] == token:
                    following = i
                    break
            if following < 0:
                break
            current, parent = following, current
            accepted += 1
        if len(recycled.entries) > 0:
            for at in range(position, min(position + accepted + 1, len(truth))):
                known = write_context(truth[:at], tree.tokens, tree.parents, 0, scratch.context)
                likeliest = top_tokens[at - start], top_log_probs[at - start]
                put(recycled, scratch.context, known, scratch.keys, likeliest, NO_LIMIT, scratch.found.state[0])
        position += accepted + 1
    return position, filled


@compiled(nogil=True)
def _count_copies(slots, s, truth, position, store, tree, scratch, seen):
    """Count, before each token of a request, the places that it may be copied on from, and those that bring the token:
    int64 [2, COPY_ROWS, MAX_MATCH + 1]. Returns where its slot has to grow."""
    while position < len(truth) and ingest(slots, s, truth, 0, position, position):
        request, places = request_at(slots, s), (scratch.places[0], scratch.place[0])
        sources = Sources(request, store, WITHOUT_LOGITS, (0, 0))
        start(sources, scratch)
        filled = look_back(sources, tree, scratch, 0, 0)
        find_in_request(request, scratch.matches[0], scratch.context, filled, 0, places[0])
        find_in_store(store.table, scratch.ranges[0], scratch.many[0], True, places[1])
        for place in places:
            if place.text != NOWHERE:
                seen[0, place.row, place.length] += 1
                seen[1, place.row, place.length] += next_token(request, store.table, place) == truth[position]
        position += 1
    return position


def allocated(max_nodes: int, max_sub_indices: int) -> tuple[Scratch, NDArray[np.uint8]]:
    """Allocate a `Scratch`, which lives as long as the second result, its memory."""
    memory = np.zeros(size_of_scratch(max_nodes, max_sub_indices), np.uint8)
    return scratch(memory.ctypes.data, max_nodes, max_sub_indices)[0], memory


def shares_of_copies(lessons: Iterator[Lesson]) -> NDArray[np.float32]:
    """Return `Weights.copies`; rare lengths take over from the next shorter one."""
    seen, tree = np.zeros((2, COPY_ROWS, MAX_MATCH + 1), np.int64), DraftBatch.empty(1, 2)
    for view, answer, _ in lessons:
        store, (space, _memory) = store_of((view.table, view.bounds), 0), allocated(1, len(view.table))
        truth = np.concatenate([answer.prompt, answer.output]).astype(np.int32)
        index, position = RequestIndex(1), len(answer.prompt)
        while position < len(truth):
            index.replace("r", truth[:position])
            row = Tree(tree.tokens[0], tree.parents[0], tree.depths[0], tree.scores[0], tree.kinds[0])
            slot = index.slot_ids(["r"])[0]
            position = _count_copies(index.slots, slot, truth, position, store, row, space, seen)
    shares = np.zeros(seen.shape[1:], np.float32)
    for length in range(1, MAX_MATCH + 1):
        shorter = shares[:, length - 1]
        shares[:, length] = (seen[1, :, length] + RARE * shorter) / (seen[0, :, length] + RARE)
    return shares


def replay(lesson: Lesson, weights: Weights, max_nodes: int, is_chain: bool) -> Examples:
    """Return the examples of one answer."""
    view, answer, n = lesson.view, lesson.answer, max_nodes + 1
    out = DraftBatch.empty(1, n)
    tree = Tree(out.tokens[0], out.parents[0], out.depths[0], out.scores[0], out.kinds[0])

    def inputs(count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return np.zeros((count, NODE_INPUTS), np.float32), np.zeros((count, SHORTLIST, INPUTS), np.float32)

    most = 2 * len(answer.output) + 1  # nodes on the true path: one per token, and one per step
    examples = Examples(*inputs(most), np.zeros(most, np.int32), np.zeros(most, np.int32))
    store, (space, _memory) = store_of((view.table, view.bounds), 0), allocated(n, len(view.table))
    truth = np.concatenate([answer.prompt, answer.output]).astype(np.int32)
    index, position, filled = RequestIndex(1), len(answer.prompt), 0
    while position < len(truth):
        index.replace("r", truth[:position])
        position, filled = _replay(
            index.slots, index.slot_ids(["r"])[0], truth, position, store, (max_nodes, is_chain),
            (weights.layer, weights.out, weights.copies), tree, space, lesson.recycled, len(answer.prompt),
            answer.top_tokens, answer.top_log_probs, examples, filled,
        )  # fmt: skip
    node_inputs, of_candidates = (part[:filled].astype(np.float16) for part in examples[:2])
    return Examples(node_inputs, of_candidates, examples.sizes[:filled].copy(), examples.labels[:filled].copy())


def view_of(outputs: Sequence[NDArray[np.int32]], vocab_size: int, learnt: bool) -> View:
    """Build a store of outputs, marked as built or as learnt."""
    view = View.of(trace.store_of(outputs, vocab_size))
    view.table[:, SOURCE] = LEARNT if learnt else DATASTORE
    return view


def lessons_of_rows(rows: Sequence[Row], vocab_size: int) -> Iterator[Lesson]:
    """Yield each row, and answers over long prompts built from rows of its fold, with a store of the outputs of all
    other folds, alternately built and learnt. Raises ValueError: there are too few rows to split."""
    if len(rows) < 2 * FOLDS:
        raise ValueError(f"training needs at least {2 * FOLDS} rows with a prompt and an output, not {len(rows)}")
    for fold in range(FOLDS):
        others = [output for i, (_, output) in enumerate(rows) if i % FOLDS != fold]
        views = [view_of(others, vocab_size, learnt) for learnt in (False, True)]
        own = rows[fold::FOLDS]
        for i, row in enumerate([*own, *long_rows(own, len(own) // LONG_ROWS + 1, seed=fold)]):
            yield Lesson(views[i % 2], Recording(*row, *NO_LOGITS))


def lessons_of_sessions(sessions: Sessions) -> Iterator[Lesson]:
    """Yield turns in order, with a store of the turns before; then some of them once more, edited."""
    live, rng = LiveStore(sessions.vocab_size, isolation="shared"), np.random.default_rng(0)
    turns = list(chain.from_iterable(sessions.turns.values()))
    again = [turns[i] for i in range(0, len(turns), REPEATED)]
    edited = [(p, edit(a, EDITS[rng.integers(4)], float(rng.uniform(0.01, 0.12)), a, rng)) for p, a in again]
    for prompt, answer in [*turns, *edited]:
        yield Lesson(live.runs.view_of(), Recording(prompt, answer, *NO_LOGITS))
        live.insert(to_learn(prompt, answer, LEADING))
        live.runs.settle()
    live.close()


def lessons_of_recordings(recordings: Sequence[Recording], vocab_size: int) -> Iterator[Lesson]:
    """Yield answers in order, with the logits and a store of earlier answers."""
    recycled, view = Recycled(entries(RECYCLED_MEGABYTES), np.int64(0)), View.of(())
    for i, recording in enumerate(recordings):
        if i % STORE_EVERY == 0 and i > 0:
            view = view_of([r.output for r in recordings[:i]], vocab_size, learnt=True)
        yield Lesson(view, recording, recycled)


def collect(lessons: Iterator[Lesson], weights: Weights) -> Examples:
    """Replay answers, with the drafts' shapes alternating between SHAPES."""
    found = [replay(lesson, weights, *SHAPES[i % len(SHAPES)]) for i, lesson in enumerate(lessons)]
    return Examples(*map(np.concatenate, zip(*found, strict=True)))


def fit(examples: Examples, *, epochs: int = EPOCHS, seed: int = 0) -> tuple[NDArray[np.float32], ...]:
    """Train a network, layer and out, on the log-loss of the next token, among the first CANDIDATES of each node."""
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    mask = torch.arange(CANDIDATES)[None] < torch.from_numpy(examples.sizes)[:, None]
    labels = torch.from_numpy(np.where(examples.labels < CANDIDATES, examples.labels, -1) + 1).long()
    nodes, inputs = torch.from_numpy(examples.node_inputs).float(), torch.from_numpy(examples.inputs).float()
    inputs = inputs[:, :CANDIDATES] * mask[..., None]
    some = nodes, inputs[mask]
    spread = [part.square().mean(0).sqrt() + 0.05 for part in some]  # inputs are scaled to similar sizes
    inputs /= spread[1]
    largest = inputs.masked_fill(~mask[..., None], -torch.inf).amax(1)
    shared = torch.cat([torch.ones(len(nodes), 1), nodes / spread[0], largest], 1)
    scale = torch.cat([torch.ones(1), spread[0], spread[1], spread[1]])[:, None]
    first = torch.from_numpy(initial_weights().layer) * scale
    first[:, :-1] = torch.randn(ROWS, WIDTH - 1) * ROWS**-0.5
    layer, out = torch.nn.Parameter(first), torch.nn.Parameter(torch.randn(WIDTH - 1) * 0.1)
    optimizer = torch.optim.Adam([layer, out], lr=RATE)
    steps = epochs * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    none = torch.zeros(BATCH, 1)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels))[: len(labels) // BATCH * BATCH].split(BATCH):
            hidden = (shared[batch] @ layer[: ROW.candidate])[:, None] + inputs[batch] @ layer[ROW.candidate :]
            logits = torch.relu(hidden[..., :-1]) @ out + hidden[..., -1]
            logits = torch.cat([none, logits.masked_fill(~mask[batch], -1e9)], 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[batch])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    linear = torch.cat([out, torch.ones(1)])
    return (layer / scale).detach().numpy().copy(), linear.detach().numpy().copy()


def train(
    traces: Sequence[Sequence[Row]], sessions: Sequence[Sessions], recordings: Sequence[Sequence[Recording]],
    vocab_size: int,
) -> Weights:  # fmt: skip
    """Train on all of these. Raises ValueError: a trace has too few rows, or there is no training data at all."""
    if not (traces or sessions or recordings):
        raise ValueError("there is nothing to train on: give a trace, sessions or answers with logits")

    def lessons() -> Iterator[Lesson]:
        each = [lessons_of_rows(rows, vocab_size) for rows in traces]
        each += [lessons_of_sessions(one) for one in sessions]
        return chain(*each, *(lessons_of_recordings(one, vocab_size) for one in recordings))

    weights = replace(initial_weights(), copies=shares_of_copies(lessons()))
    for _ in range(ROUNDS):
        layer, out = fit(collect(lessons(), weights))
        weights = replace(weights, layer=layer, out=out)
    return weights
