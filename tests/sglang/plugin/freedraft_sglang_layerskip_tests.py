"""Loaded by the tests' engines through PYTHONPATH: layer skip that checks the KV pool around every draft.

What a request does is in its id, as words between dashes: `set2` drafts with skip set 2, `chain` verifies chains in
place of trees, `nodes` runs draft passes as verifications of one node (as with CUDA graphs), `replay` drafts nothing
and verifies what the request with the same word `as...` had drafted.

Algorithm `composed_any` is the composed one with draft passes for requests at random.
"""

import collections
import hashlib
import json
import os
from pathlib import Path

import numpy as np

LOG = "LAYERSKIP_TEST_LOG"
TIMES = "LAYERSKIP_TEST_TIMES"  # what a draft pass and a step are said to take, whatever they do; and no checks


def register():
    # Whatever the first engine of this process is for: SGLang loads plugins once.
    from freedraft.engines.sglang.registration import install

    install("layerskip_checked", make_checked, runs_model=True)
    install("composed_any", make_any, runs_model=True)


def make_any(context):
    from freedraft.composition import Choice
    from freedraft.engines.sglang.composed import make_source

    path = Path(os.environ[LOG])
    coins = np.random.default_rng(1)
    totals = collections.Counter()
    source = make_source(context)
    composer = source.composer
    chosen = composer.choose

    def choose(request_ids, draft, allowed, most):
        choice = chosen(request_ids, draft, allowed, most)  # what it would have been: its code runs, too
        rows = np.flatnonzero(allowed & (coins.random(len(allowed)) < 0.5))
        totals["mixed"] += 0 < len(rows) < len(allowed)
        return Choice(rows, int(coins.integers(1, most + 1)), max(choice.rate, 100.0))

    composer.choose = choose
    draft = source.draft

    def drafting(step, width):
        tree = draft(step, width)
        tree.check()
        for b in range(tree.batch_size):
            nodes = int(tree.counts[b]) - 1
            if nodes > 0:
                totals["of the model" if tree.kinds[b, 1] == MODEL_KIND else "of n-grams"] += nodes
        path.write_text(json.dumps(totals))
        return tree

    from freedraft.composer import MODEL_KIND

    source.draft = drafting
    return source


def make_checked(context):
    from layerskip_plugin.sglang import LayerSkipSource, make_source

    path = Path(os.environ[LOG])
    totals = collections.Counter()
    runner = context.target_worker.model_runner
    trees, hashes = {}, collections.defaultdict(list)

    def words(request_id):
        return set(request_id.split("-"))

    def told(request_id):
        return next((word for word in words(request_id) if word.startswith("as")), None)

    def write():
        path.write_text(json.dumps({**totals, "hashes": hashes}))

    class Checked(LayerSkipSource):
        def draft(self, step, width):
            ids = step.request_ids
            totals["steps"] += 1
            totals["rounds"] += width > 1
            if os.environ.get(TIMES):
                tree = super().draft(step, width)
                write()
                return tree
            kv = runner.token_to_kv_pool
            buffers = [*kv.k_buffer, *kv.v_buffer]
            rows = runner.req_to_token_pool.req_to_token
            batch = step.batch
            lengths = batch.seq_lens_cpu.tolist()
            for request_id, row, length in zip(ids, batch.req_pool_indices.tolist(), lengths, strict=True):
                if told(request_id):
                    slots = rows[row, :length].long()
                    kept = b"".join(buffer[slots].numpy().tobytes() for buffer in buffers)
                    hashes[request_id].append([length, hashlib.sha256(kept).hexdigest()])
                for number in range(4):
                    if f"set{number}" in words(request_id):
                        self.selector.selection.asked[request_id] = number
            self.model.as_nodes = any("nodes" in words(request_id) for request_id in ids)
            self.tree = not any("chain" in words(request_id) for request_id in ids)
            replays = "replay" in words(ids[0])
            if replays:
                return trees[told(ids[0])].pop(0)
            before = [buffer.clone() for buffer in buffers]
            tree = super().draft(step, width)
            free = np.concatenate(
                [
                    rows[row, length : length + width].numpy()
                    for row, length in zip(batch.req_pool_indices.tolist(), lengths, strict=True)
                ]
            )
            changed = set()
            for old, new in zip(before, buffers, strict=True):
                changed |= set(np.flatnonzero((old != new).flatten(1).any(1).numpy()).tolist())
            totals["written outside the window"] += len(changed - set(free.tolist()))
            totals["written"] += len(changed)
            if self._last is not None and width > 1:
                drafted = self._last.drafted
                totals["drafted"] += int(drafted.sum())
                totals["batch 4"] += len(ids) == 4
                totals["uneven"] += len(set(drafted.tolist())) > 1
                totals["sets in a batch"] = max(totals["sets in a batch"], len(set(self.selector.last(ids).tolist())))
                totals["branches"] += int((tree.counts - 1 - drafted).sum())
            for i, request_id in enumerate(ids):
                if told(request_id):
                    import copy

                    assert i == 0
                    trees.setdefault(told(request_id), []).append(copy.deepcopy(tree))
            tree.check()
            write()
            return tree

        def finish(self, request_ids):
            super().finish(request_ids)
            totals["held"] = len(self.selector)
            write()

    source = make_source(context)
    source.__class__ = Checked
    observe = source.lookahead.observe

    def observing(request_ids, drafted, accepted):
        for request_id, d, a in zip(request_ids, drafted.tolist(), accepted.tolist(), strict=True):
            for number in range(4):
                if f"set{number}" in words(request_id):
                    totals[f"drafted by set {number}"] += d
                    totals[f"accepted of set {number}"] += a
        observe(request_ids, drafted, accepted)

    source.lookahead.observe = observing
    if TIMES in os.environ:
        times, (one_pass, one_step) = source.times, map(float, os.environ[TIMES].split())
        note_draft, note_step = times.note_draft, times.note_step
        times.note_draft = lambda batch, seconds: note_draft(batch, one_pass)
        times.note_step = lambda batch, tokens, seconds: note_step(batch, tokens, one_step)
    return source
