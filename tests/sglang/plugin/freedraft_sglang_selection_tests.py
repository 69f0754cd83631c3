"""Loaded by the tests' engines through PYTHONPATH: layer skip whose selection depends on the requests' ids.

Algorithm `layerskip_selecting` starts with selection swift. Requests whose id begins with `static`, `knn` or
`knapspec` are served with that selection, whose file is then read from the folder in SELECTION_TEST_FOLDER; it must not
be while others run.
"""

import dataclasses
import json
import os
from pathlib import Path


def register():
    from freedraft.engines.sglang.registration import register
    from layerskip_plugin.method import SPEC

    register(dataclasses.replace(SPEC, name="layerskip_selecting", factory=f"{__name__}:make_selecting"))


def make_selecting(options, context, controller):
    from layerskip_plugin.knapsack_search import search
    from layerskip_plugin.method import LayerSkipMethod
    from layerskip_plugin.pass_times import PassTimes
    from layerskip_plugin.selection.base import Static
    from layerskip_plugin.selection.knn import Domains, Knn
    from layerskip_plugin.selection.online_search import KnapSpec
    from layerskip_plugin.skip_set import SkipSet

    folder = Path(os.environ["SELECTION_TEST_FOLDER"])
    log = {"places": {}, "states": {}, "kv changed": 0, "mixed": 0, "swift sets": [], "searches": 0}
    log |= {"knapspec sets": [], "as in one pass": []}

    def write():
        (folder / "log.json").write_text(json.dumps(log))

    class Selecting(LayerSkipMethod):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.needs_prompt_states = True
            self.swift = self.selection
            self.selections = {"swift": self.swift}

        def prepare(self, model):
            super().prepare(model)
            self.paged = model
            layers, scorer, knapspec = model.n_layers, self.swift.scorer, KnapSpec(model.n_layers)

            class Counting(type(scorer)):
                def __call__(self, recipes):
                    log["searches"] += len(recipes)
                    return super().__call__(recipes)

            scorer.__class__ = Counting
            knapspec.prepare(scorer, None)
            # Drafts that cost next to nothing, so that some sets pay.
            knapspec.pass_times = lambda: PassTimes(1.0, 1.0, 0.0, lambda n: 100.0 + n)
            knapspec.sets_of_weights = self.propose_sets
            self.makers = {
                "static": lambda: Static({"": SkipSet.empty(layers)}),
                "knn": lambda: Knn(Domains.load(folder / "knn.json", layers)),
                "knapspec": lambda: knapspec,
            }

        def propose_sets(self, weights, most, base):
            """As the method does, and the same sets in one pass each: the same tokens."""
            scorer, decoder = self.swift.scorer, self.paged.decoder

            def visit(embedded, run):
                found = search(embedded, run, 2 * self.paged.n_layers, weights, most, base=base.sublayers)
                hidden = decoder.norm(found.states.flatten(0, 1))
                logits = hidden @ self.paged._model.lm_head.weight.T
                return found.skipped, logits.argmax(-1).view(len(found.skipped), -1).numpy()

            skipped, best = scorer.run_sublayers(visit)
            start = scorer.window - best.shape[1]
            right = best == scorer.tokens[1:][start:]
            one_by_one = [scorer._right(bits[None], start, scorer.window)[0] for bits in skipped]
            log["as in one pass"].append(bool((right == one_by_one).all()))
            return [SkipSet.of_sublayers(bits.nonzero()[0], self.paged.n_layers) for bits in skipped]

        def begin(self, request_id, tokens, tenant, extra):
            word = request_id.split("-")[0]
            if word not in self.selections and word in self.makers:
                self.selections[word] = self.makers[word]()
                self.selections[word].share = 0.9  # of time, for those that search
            if self.selection is not self.selections.get(word, self.swift):
                assert not self.selection.requests
                self.selection = self.selections.get(word, self.swift)
                self.recipes.use(self.selection.sets.values())
                for skip_set in self.selection.sets.values():
                    self.build(skip_set, optimize=False)
            super().begin(request_id, tokens, tenant, extra)

        def set_prompt_state(self, request_id, state):
            log["states"][request_id] = state.tolist()
            super().set_prompt_state(request_id, state)

        def update(self, step):
            kv = self.paged.runner.token_to_kv_pool
            buffers = [*kv.k_buffer, *kv.v_buffer]
            before = [buffer.clone() for buffer in buffers]
            super().update(step)
            for old, new in zip(before, buffers, strict=True):
                changed = set((old != new).flatten(1).any(1).nonzero().flatten().tolist())
                log["kv changed"] += len(changed - {0})

        def draft(self, step):
            tree = super().draft(step)
            tree.check()
            sets = list(self.selection.sets.values())
            chosen = self.selection.choose(step.request_ids, step.contexts)
            places = [sets.index(skip_set) if skip_set in sets else 0 for skip_set in chosen]  # of a search one
            log["mixed"] = max(log["mixed"], len(set(places)))
            for request_id, place in zip(step.request_ids, places, strict=True):
                log["places"].setdefault(request_id, []).append(place)
            if self.swift.incumbent.sublayers not in [tuple(s) for s in log["swift sets"]]:
                log["swift sets"].append(list(self.swift.incumbent.sublayers))
            if isinstance(self.selection, KnapSpec):
                log["knapspec sets"].append(list(self.selection.incumbent.sublayers))
            write()
            return tree

        def finish(self, request_id, output, aborted):
            super().finish(request_id, output, aborted)
            log["held"] = len(self.selection.requests) + len(self._running)
            write()

    return Selecting(options, context, controller)
