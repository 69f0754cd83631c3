"""Loaded by the tests' engines through PYTHONPATH: layer skip that checks the KV pool around every draft.

What a request does is in its id, as words between dashes: `set2` drafts with skip set 2, `chain` verifies chains in
place of trees, `nodes` runs draft passes as verifications of one node (as with CUDA graphs), `replay` drafts nothing
and verifies what the request with the same word `as...` had drafted.

Algorithm `hybrid_any` is the hybrid one with draft passes for requests at random.
"""

import collections
import copy
import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np

LOG = "LAYERSKIP_TEST_LOG"
TIMES = "LAYERSKIP_TEST_TIMES"  # what a draft pass and a step are said to take, whatever they do; and no checks


def register():
    # Whatever the first engine of this process is for: SGLang loads plugins once.
    from freedraft.engines.sglang.registration import register
    from freedraft.hybrid import SPEC as HYBRID
    from layerskip_plugin.method import SPEC as LAYERSKIP

    register(dataclasses.replace(LAYERSKIP, name="layerskip_checked", factory=f"{__name__}:make_checked"))
    register(dataclasses.replace(HYBRID, name="hybrid_any", factory=f"{__name__}:make_any"))


def fix(times, one_pass, one_step):
    """Let a pass and a step take so long, however busy the machine is."""
    update, update_pass = times.update, times.update_pass
    times.update = lambda batch, tokens, context, seconds: update(batch, tokens, context, one_step)
    times.update_pass = lambda recipe, batch, context, seconds: update_pass(recipe, batch, context, one_pass)


def make_any(options, context, controller):
    from freedraft.cost.acceptance import PASS_KINDS
    from freedraft.hybrid.method import HybridMethod

    path = Path(os.environ[LOG])
    coins = np.random.default_rng(1)
    totals = collections.Counter()

    class Any(HybridMethod):
        def _rows_of_passes(self, step, draft):
            _, rest = super()._rows_of_passes(step, draft)  # what it would have been: its code runs, too
            allowed = self.passes.capacities(step) > 0
            rows = np.flatnonzero(allowed & (coins.random(len(allowed)) < 0.5))
            totals["mixed"] += 0 < len(rows) < len(allowed)
            return rows if self.passes.begin_round(pays=True) else rows[:0], rest

        def draft(self, step, **how):
            tree = super().draft(step, **how)
            tree.check()
            for b in range(tree.batch_size):
                nodes = int(tree.counts[b]) - 1
                if nodes > 0:
                    totals["of the model" if tree.kinds[b, 1] >= PASS_KINDS else "of n-grams"] += nodes
            path.write_text(json.dumps(totals))
            return tree

    method = Any(options, context, controller)
    fix(method.auto.times, 0.001, 0.01)
    return method


def words(request_id):
    return set(request_id.split("-"))


def set_of(request_id):
    """Number of the skip set that the id asks for; None for none."""
    return next((number for number in range(4) if f"set{number}" in words(request_id)), None)


def recorded_as(request_id):
    return next((word for word in words(request_id) if word.startswith("as")), None)


def make_checked(options, context, controller):
    from layerskip_plugin.method import LayerSkipMethod

    path = Path(os.environ[LOG])
    totals = collections.Counter()
    trees, hashes = {}, collections.defaultdict(list)

    def write():
        path.write_text(json.dumps({**totals, "hashes": hashes}))

    class Checked(LayerSkipMethod):
        def prepare(self, model):
            super().prepare(model)
            self.paged = model
            one_token_each = model.one_token_each

            def watched(*args, left_out=None, **more):
                batch = one_token_each(*args, left_out=left_out, **more)
                if left_out is not None:  # positions stay as they are
                    before = batch.seq_lens_cpu - (0 if batch.forward_mode.is_target_verify() else 1)
                    assert (batch.positions.cpu() == before + left_out.tokens).all()
                totals["longest read"] = max(totals["longest read"], int(batch.seq_lens_cpu.max()))
                return batch

            model.one_token_each = watched
            record = self.lookahead.record_acceptance

            def recording(outcome):
                drafted, accepted = outcome.verified.tolist(), outcome.accepted.tolist()
                for request_id, d, a in zip(outcome.request_ids, drafted, accepted, strict=True):
                    totals[f"drafted by set {set_of(request_id)}"] += d
                    totals[f"accepted of set {set_of(request_id)}"] += a
                record(outcome)

            self.lookahead.record_acceptance = recording
            if os.environ.get(TIMES):
                fix(self.costs.times, *map(float, os.environ[TIMES].split()))

        def draft(self, step):
            totals["steps"] += 1
            tree = super().draft(step) if os.environ.get(TIMES) else self.checked(step)
            totals["rounds"] += self._last is not None
            write()
            return tree

        def checked(self, step):
            ids, batch, runner = step.request_ids, step.engine, self.paged.runner
            buffers = [*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer]
            rows = runner.req_to_token_pool.req_to_token
            lengths = batch.seq_lens_cpu.tolist()
            for request_id, row, length in zip(ids, batch.req_pool_indices.tolist(), lengths, strict=True):
                if recorded_as(request_id):
                    slots = rows[row, :length].long()
                    kept = b"".join(buffer[slots].numpy().tobytes() for buffer in buffers)
                    hashes[request_id].append([length, hashlib.sha256(kept).hexdigest()])
                if set_of(request_id) is not None:
                    skip_set = list(self.selection.sets.values())[set_of(request_id)]
                    self.selection.requests[request_id] = skip_set
            nodes = any("nodes" in words(request_id) for request_id in ids)
            self.paged.has_graphs = lambda stages: nodes
            self.trees = not any("chain" in words(request_id) for request_id in ids)
            if "replay" in words(ids[0]):
                return trees[recorded_as(ids[0])].pop(0)
            before = [buffer.clone() for buffer in buffers]
            tree = super().draft(step)
            width = int(step.capacities.max()) + 1
            window = np.concatenate(
                [
                    rows[row, length : length + width].numpy()
                    for row, length in zip(batch.req_pool_indices.tolist(), lengths, strict=True)
                ]
            )
            changed = set()
            for old, new in zip(before, buffers, strict=True):
                changed |= set(np.flatnonzero((old != new).flatten(1).any(1).numpy()).tolist())
            totals["written outside the window"] += len(changed - set(window.tolist()))
            totals["written"] += len(changed)
            if self._last is not None:
                drafted = self._last.drafted
                totals["drafted"] += int(drafted.sum())
                totals["batch 4"] += len(ids) == 4
                totals["uneven"] += len(set(drafted.tolist())) > 1
                chosen = len(set(self.selection.choose(ids, step.contexts)))
                totals["sets in a batch"] = max(totals["sets in a batch"], chosen)
                totals["branches"] += int((tree.counts - 1 - drafted).sum())
            for i, request_id in enumerate(ids):
                if recorded_as(request_id):
                    assert i == 0
                    trees.setdefault(recorded_as(request_id), []).append(copy.deepcopy(tree))
            tree.check()
            return tree

        def finish(self, request_id, output, aborted):
            super().finish(request_id, output, aborted)
            totals["held"] = len(self.selection.requests) + len(self._running)
            write()

    return Checked(options, context, controller)
