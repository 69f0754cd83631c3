"""Loaded by the tests' engines through PYTHONPATH: layer skip that looks at the KV pool around every step.

`layerskip_watched` writes what it has seen to a file of JSON, in the folder of LAYERSKIP_TEST_LOG. Clients tell it what
to do: {"record": name} notes drafts and the KV of committed tokens under this name, {"replay": name} verifies these
drafts in place of others, {"nodes": true} runs draft passes as verifications of one node (as with CUDA graphs),
{"name": name} notes a request's prompt state and its first set.
"""

import collections
import contextlib
import copy
import dataclasses
import hashlib
import json
import os
from pathlib import Path

log = collections.Counter(states={}, first={}, kv={})
trees = collections.defaultdict(dict)


def write():
    from freedraft.files import write_atomically

    path = Path(os.environ["LAYERSKIP_TEST_LOG"]) / "watched.json"
    write_atomically(path, json.dumps(log).encode(), durable=False)


def register():
    # Whatever the first engine of this process is for: SGLang loads plugins once.
    from freedraft.engines.sglang.registration import register
    from layerskip_plugin.method import SPEC

    register(dataclasses.replace(SPEC, name="layerskip_watched", factory=f"{__name__}:make_watched"))


def make_watched(options, context, controller=None):
    from layerskip_plugin.knapsack_search import search
    from layerskip_plugin.method import LayerSkipMethod
    from layerskip_plugin.pass_times import PassTimes
    from layerskip_plugin.selection.online_search import KnapSpec, OnlineSearch
    from layerskip_plugin.skip_set import SkipSet

    class Watched(LayerSkipMethod):
        def prepare(self, model):
            super().prepare(model)
            self.asked, self.run_once = {}, model.one_token_each
            if isinstance(self.selection, KnapSpec):
                # Drafts that cost next to nothing, so that some sets pay.
                self.selection.pass_times = lambda: PassTimes(1.0, 1.0, 0.0, lambda n: 100.0 + n)
                self.selection.sets_of_weights = self.sets_of_weights

        @contextlib.contextmanager
        def watching(self, nodes):
            self._model.has_graphs, self._model.one_token_each = lambda stages: nodes, self.one_token_each
            yield
            del self._model.has_graphs, self._model.one_token_each

        def one_token_each(self, *args, left_out=None, **more):
            batch = self.run_once(*args, left_out=left_out, **more)
            if left_out is not None:  # positions stay as they are
                before = batch.seq_lens_cpu - (0 if batch.forward_mode.is_target_verify() else 1)
                assert (batch.positions.cpu() == before + left_out.tokens).all()
            log["passes"] += 1
            log["passes that read more than 80 tokens"] += int(batch.seq_lens_cpu.max()) > 80
            return batch

        def sets_of_weights(self, weights, most, base):
            """As the search has them, and the same sets in one pass each: the same tokens."""
            scorer, decoder = self.selection.scorer, self._model.decoder

            def visit(embedded, run):
                found = search(embedded, run, 2 * self._model.n_layers, weights, most, base=base.sublayers)
                logits = decoder.norm(found.states.flatten(0, 1)) @ self._model._model.lm_head.weight.T
                return found.skipped, logits.argmax(-1).view(len(found.skipped), -1).numpy()

            skipped, best = scorer.run_sublayers(visit)
            start = scorer.window - best.shape[1]
            right = best == scorer.tokens[1:][start:]
            alone = [scorer._right(bits[None], start, scorer.window)[0] for bits in skipped]
            log["searches"] += 1
            log["searches as in one pass"] += bool((right == alone).all())
            return [SkipSet.of_sublayers(bits.nonzero()[0], self._model.n_layers) for bits in skipped]

        def begin(self, request_id, tokens, tenant, extra):
            super().begin(request_id, tokens, tenant, extra)
            self.asked[request_id] = extra

        def set_prompt_state(self, request_id, state):
            super().set_prompt_state(request_id, state)
            log["states"][self.asked[request_id].get("name")] = state.tolist()

        def draft(self, step, **how):
            batch, runner = step.engine, self._model.runner
            pool, rows = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
            buffers = [*pool.k_buffer, *pool.v_buffer]
            places = [*zip(batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist(), strict=True)]
            asked = self.asked.get(step.request_ids[0], {})
            if name := asked.get("record") or asked.get("replay"):
                (row, length), *_ = places
                kept = b"".join(buffer[rows[row, :length].long()].numpy().tobytes() for buffer in buffers)
                log["kv"].setdefault(f"{name} replayed" if "replay" in asked else name, []).append(
                    [length, hashlib.sha256(kept).hexdigest()]
                )
            if "replay" in asked:
                return trees[name][length]
            before = [buffer.clone() for buffer in buffers]
            with self.watching(bool(asked.get("nodes"))):
                tree = super().draft(step, **how)
            tree.check()
            changed = set[int]()
            for old, new in zip(before, buffers, strict=True):
                changed |= set((old != new).flatten(1).any(1).nonzero().flatten().tolist())
            width = int(step.capacities.max()) + 1
            own = {slot for row, length in places for slot in rows[row, length : length + width].tolist()}
            log["written"] += len(changed)
            log["written elsewhere"] += len(changed - own - {0})  # SGLang's slot for padding
            if name:
                trees[name][length] = copy.deepcopy(tree)
            self.note(step, tree)
            return tree

        def note(self, step, tree):
            if self._last is not None:
                log["uneven"] += len(set(self._last.drafted.tolist())) > 1
                log["branches"] += int((tree.counts - 1 - self._last.drafted).sum())
            names = {skip_set: name for name, skip_set in self.selection.sets.items()}
            chosen = [names.get(skip_set) for skip_set in self.selection.choose(step.request_ids, step.contexts)]
            log["mixed"] += len({*chosen}) > 1
            for request_id, skip_set in zip(step.request_ids, chosen, strict=True):
                log["first"].setdefault(self.asked.get(request_id, {}).get("name"), skip_set)
            if isinstance(self.selection, OnlineSearch):
                found = log.setdefault(f"sets of {self.selection.name}", [])
                sublayers = [*map(int, self.selection.incumbent.sublayers)]
                found += [sublayers] if sublayers not in found else []
            write()

        def finish(self, request_id, output):
            super().finish(request_id, output)
            self.asked.pop(request_id, None)
            write()

    return Watched(options, context, controller)
