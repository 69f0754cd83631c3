"""Loaded by the tests' engines through PYTHONPATH: layer skip whose selection depends on the requests' ids.

Algorithm `layerskip_selecting` starts with selection swift. Requests whose id begins with `static`, `knn` or `plan` are
served with that selection, whose file is then read from the folder in SELECTION_TEST_FOLDER; it must not be while
others run.
"""

import json
import os
from pathlib import Path


def register():
    from freedraft.engines.sglang.registration import install

    install("layerskip_selecting", make_selecting, runs_model=True)


def make_selecting(context):
    from layerskip_plugin.selection.base import Static
    from layerskip_plugin.selection.knapsack import Knapsack, Plan
    from layerskip_plugin.selection.knn import Domains, Knn
    from layerskip_plugin.selection.serving import Selector
    from layerskip_plugin.sglang import LayerSkipSource, make_source
    from layerskip_plugin.skip_set import SkipSet

    folder = Path(os.environ["SELECTION_TEST_FOLDER"])
    runner = context.target_worker.model_runner
    log = {"places": {}, "states": {}, "kv changed": 0, "mixed": 0, "swift sets": [], "searches": 0}

    class Selecting(LayerSkipSource):
        @property
        def needs_states(self):
            return True

        @needs_states.setter
        def needs_states(self, value):
            pass

        def begin(self, request_id, tokens):
            word = request_id.split("-")[0]
            if word not in self.selectors and word in self.makers:
                self.selectors[word] = Selector(self.makers[word]())
            if self.selector is not self.selectors.get(word, self.swift):
                assert not len(self.selector)
                self.selector = self.selectors.get(word, self.swift)
                self.stages = [self.model.stages(s.attention, s.mlp) for s in self.selector.sets.values()]
            super().begin(request_id, tokens)

        def take_state(self, request_id, state):
            log["states"][request_id] = state.float().tolist()
            super().take_state(request_id, state)

        def _search(self, step):
            if self.selector is not self.swift:
                return
            kv = runner.token_to_kv_pool
            buffers = [*kv.k_buffer, *kv.v_buffer]
            before = [buffer.clone() for buffer in buffers]
            super()._search(step)
            for old, new in zip(before, buffers, strict=True):
                changed = set((old != new).flatten(1).any(1).nonzero().flatten().tolist())
                log["kv changed"] += len(changed - {0})

        def draft(self, step, width):
            tree = super().draft(step, width)
            tree.check()
            if width > 1:
                places = self.selector.last(step.request_ids).tolist()
                log["mixed"] = max(log["mixed"], len(set(places)))
                past, drafted = step.batch.seq_lens_cpu.tolist(), self._last.drafted.tolist()
                for request_id, *seen in zip(step.request_ids, past, places, drafted, strict=True):
                    log["places"].setdefault(request_id, []).append([seen[0] + 1, *seen[1:]])
            swift = self.swift.selection
            if swift.incumbent.sublayers not in [tuple(s) for s in log["swift sets"]]:
                log["swift sets"].append(list(swift.incumbent.sublayers))
            log["held"] = len(self.selector)
            (folder / "log.json").write_text(json.dumps(log))
            return tree

        def finish(self, request_ids):
            super().finish(request_ids)
            log["held"] = len(self.selector) + len(self._newest) + len(self._states)
            (folder / "log.json").write_text(json.dumps(log))

    source = make_source(context)
    source.__class__ = Selecting
    source.swift = source.selector
    evaluate = source.swift.selection.evaluate

    def scoring(skips):
        log["searches"] += len(skips)
        return evaluate(skips)

    source.swift.selection.evaluate = scoring
    source.selectors = {"swift": source.swift}
    layers = source.model.n_layers
    source.makers = {
        "static": lambda: Static({"": SkipSet.empty(layers)}),
        "knn": lambda: Knn(Domains.load(folder / "knn.json", layers)),
        "plan": lambda: Knapsack(Plan.load(folder / "plan.json", layers)),
    }
    return source
