"""Loaded by the tests' engines through PYTHONPATH: draft sources that stress the product's worker, and a count of its
work.

`sssd_cycle` drafts with SSSD, puts a wrong sibling before every draft token, so that every accepted one has to be
moved, and changes the width at every step; requests whose id begins with `broken` make it fail at their third draft.
`sssd_chain` is SSSD without branches. `wild` drafts random trees over a tiny vocabulary.
"""

import collections
import itertools
import json
import os
from pathlib import Path

import numpy as np


def register():
    from freedraft.engines.sglang.registration import install

    install("sssd_cycle", make_cycle, corpora=True)
    install("sssd_chain", make_chain)
    install("wild", make_wild)
    if os.environ.get("TREE_TEST_COUNTS"):
        count_work(Path(os.environ["TREE_TEST_COUNTS"]))


def count_work(path):
    """Write, after every verified step, what the worker has done so far."""
    from freedraft.engines.sglang.worker import TreeVerifyWorker

    totals = collections.Counter()
    compact, step, stop = TreeVerifyWorker._compact, TreeVerifyWorker._step, TreeVerifyWorker._stop_drafting
    finished = TreeVerifyWorker.note_request_finished

    def counting(self, batch, verified):
        compact(self, batch, verified)
        accepted = verified.accepted
        here = np.arange(accepted.shape[1])
        moved = ((accepted.numpy() >= 0) & (accepted.numpy() != here)).any(1)
        totals["compacted"] += int(moved.sum())
        totals["steps"] += 1
        totals["tokens"] += int(verified.lengths.sum())
        totals["request_steps"] += accepted.shape[0]
        totals[f"width {accepted.shape[1]}"] += 1
        totals["batch 4"] += accepted.shape[0] == 4
        path.write_text(json.dumps(totals))

    def stepping(self, batch, tokens, lengths):
        before = dict(self._requests._lengths)
        made = step(self, batch, tokens, lengths)
        drafter = getattr(self._source, "drafter", None)
        for row, request in enumerate(batch.reqs):
            if request.finished():
                continue
            past = int(batch.seq_lens_cpu[row]) + 1 - int(lengths[row])  # the root is not in the KV cache
            totals["rebuilt"] += before.get(request.rid, -1) != past
            if drafter is not None and not self._draft_failed:
                drafter._await_prompts([request.rid])
                assert drafter.length(request.rid) == past, "the index does not hold the text so far"
        return made

    def stopping(self):
        totals["failures"] += 1
        path.write_text(json.dumps(totals))
        stop(self)

    def ending(self, **kwargs):
        finished(self, **kwargs)
        totals["finished"] += 1
        drafter = getattr(self._source, "drafter", None)
        totals["held"] = len(drafter) if drafter is not None else 0
        path.write_text(json.dumps(totals))

    TreeVerifyWorker._compact, TreeVerifyWorker._step = counting, stepping
    TreeVerifyWorker._stop_drafting, TreeVerifyWorker.note_request_finished = stopping, ending


def make_cycle(context):
    from sssd_plugin.options import SssdOptions
    from sssd_plugin.sglang import SssdSource

    class Cycle(SssdSource):
        cycle = itertools.cycle((16, 4, 1, 8, 2))
        broken = 0

        def width(self, batch_size):
            return next(w for w in self.cycle if w in self.widths)

        def draft(self, step, width):
            from freedraft.draft import DraftBatch

            self.broken += any(name.startswith("broken") for name in step.request_ids)
            if self.broken > 2:
                raise RuntimeError("no more drafts")
            tree = super().draft(step, max(1, (width + 1) // 2))
            out = DraftBatch.empty(tree.batch_size, width)
            for b in range(tree.batch_size):
                place = [0]  # node i of the tree stands at place[i]
                out.tokens[b, 0], out.parents[b, 0], out.scores[b, 0] = tree.tokens[b, 0], -1, 1
                n = 1
                for i in range(1, int(tree.counts[b])):
                    if n + 2 > width:
                        break
                    parent = place[tree.parents[b, i]] if tree.parents[b, i] < len(place) else None
                    if parent is None:
                        break
                    siblings = {int(tree.tokens[b, j]) for j in range(i, int(tree.counts[b]))}
                    siblings |= {int(out.tokens[b, j]) for j in range(1, n) if out.parents[b, j] == parent}
                    decoy = next(t for t in range(100, 1000) if t not in siblings)
                    for token in (decoy, tree.tokens[b, i]):
                        out.tokens[b, n], out.parents[b, n] = token, parent
                        out.depths[b, n] = out.depths[b, parent] + 1
                        n += 1
                    place.append(n - 1)
                out.counts[b] = n
            out.check()
            return out

    return Cycle(context, SssdOptions.read())


def make_chain(context):
    """The best chain in place of the best tree: what an engine without tree attention would verify."""
    from sssd_plugin.options import SssdOptions
    from sssd_plugin.sglang import SssdSource

    class Chain(SssdSource):
        def draft(self, step, width):
            self.drafter.append(step.request_ids, step.tokens, step.offsets)
            return self.drafter.draft(step.request_ids, max_nodes=width, shape="chain")

    return Chain(context, SssdOptions.read())


class Simple:
    """A source that keeps nothing."""

    def __init__(self, context):
        self.context = context

    def width(self, batch_size):
        return self.context.max_nodes

    def begin(self, request_id, tokens):
        pass

    def observe(self, accepted):
        pass

    def finish(self, request_ids):
        pass

    def add_corpus(self, corpus_id, documents):
        raise ValueError("this source takes no corpora")


def make_wild(context):
    from freedraft.draft import DraftBatch

    rng = np.random.default_rng(0)

    class Wild(Simple):
        def draft(self, step, width):
            batch = len(step.request_ids)
            out = DraftBatch.empty(batch, width)
            for b in range(batch):
                out.counts[b] = rng.integers(1, width + 1)
                out.tokens[b, 0] = step.tokens[step.offsets[b + 1] - 1]
                out.parents[b, 0], out.scores[b, 0] = -1, 1
                used = collections.defaultdict(set)
                for i in range(1, out.counts[b]):
                    while True:
                        parent = int(rng.integers(0, i))
                        free = set(range(context.vocab_size)) - used[parent]
                        if free:
                            break
                    token = int(rng.choice(sorted(free)))
                    used[parent].add(token)
                    out.tokens[b, i], out.parents[b, i] = token, parent
                    out.depths[b, i] = out.depths[b, parent] + 1
            return out

    return Wild(context)
