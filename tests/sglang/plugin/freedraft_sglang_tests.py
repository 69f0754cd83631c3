"""Loaded by the tests' engines through PYTHONPATH: methods that stress the product's worker, and a count of its work.

`sssd_cycle` drafts with SSSD, puts a wrong sibling before every draft token, so that every accepted one has to be
moved, and changes the width at every step; it fails wherever a request's id begins with `broken`. `wild` drafts random
trees over a tiny vocabulary.
"""

import collections
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np


def register():
    from freedraft.engines.sglang.registration import register
    from freedraft.method import MethodSpec
    from sssd_plugin.method import SPEC
    from sssd_plugin.options import SssdOptions

    if os.environ.get("TREE_TEST_WIDTHS"):
        from freedraft.engines.sglang import guards

        widths = tuple(map(int, os.environ["TREE_TEST_WIDTHS"].split(",")))
        guards.widths_for = lambda *_, **__: widths
    if os.environ.get("TREE_TEST_PROBABILITIES"):
        from freedraft.engines.sglang import verify

        verify.MAX_PROBABILITIES = int(os.environ["TREE_TEST_PROBABILITIES"])
    take_seeds_on_cpu()
    if os.environ.get("TREE_TEST_ADAPTERS") and multiprocessing.parent_process() is not None:  # not in the tests' own
        take_adapters_on_cpu()
    register(dataclasses.replace(SPEC, name="sssd_cycle", factory=f"{__name__}:make_cycle"))
    register(MethodSpec("wild", f"{__name__}:make_wild", SssdOptions))
    if os.environ.get("TREE_TEST_COUNTS"):
        count_work(Path(os.environ["TREE_TEST_COUNTS"]))
    if os.environ.get("TREE_TEST_RANKS"):
        record_ranks(Path(os.environ["TREE_TEST_RANKS"]))


def take_seeds_on_cpu():
    """Let `--enable-deterministic-inference` start here, with SGLang's sampler as it is: what stands in the way is that
    no attention backend of a CPU is on its list, and that the hash of seeds and the matrix products that do not depend
    on the batch are Triton's or of a package for Intel's processors."""
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, HookType.REPLACE)
    batch_invariant = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
    HookRegistry.register(batch_invariant, lambda runner: None, HookType.REPLACE)


def take_adapters_on_cpu():
    """Let SGLang's LoRA in PyTorch, written for any device, run here: what stands in the way is pinned memory alone."""
    import torch

    for name in ("empty", "tensor", "zeros"):
        made = getattr(torch, name)
        setattr(torch, name, lambda *given, _made=made, pin_memory=False, **options: _made(*given, **options))
    torch.Tensor.pin_memory = lambda self: self


def murmur_hash32(seed, positions, columns):
    """int64 [rows, columns]: MurmurHash3 of 32 bits over the seed's two halves, the position and the column."""
    import torch

    ones = 2**32 - 1

    def rotated(words, bits):
        return (words << bits | words >> (32 - bits)) & ones

    seed = seed.view(torch.int64)[:, None]
    state = torch.zeros_like(seed)
    for block in (seed & ones, seed >> 32 & ones, positions.to(torch.int64)[:, None] & ones, columns[None]):
        state = state ^ rotated(block * 0xCC9E2D51 & ones, 15) * 0x1B873593 & ones
        state = rotated(state, 13) * 5 + 0xE6546B64 & ones
    state = state ^ 16  # bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & ones
    return state


def count_work(path):
    """Write, after every verified step, what the worker has done so far."""
    from sglang.srt.layers.sampler import Sampler

    from freedraft.engines.sglang.drafting import Drafting
    from freedraft.engines.sglang.verify import TreeVerifier

    totals = collections.Counter()
    verify, step_of, draft, finish = TreeVerifier.verify, Drafting._step, Drafting.draft, Drafting.finish
    sample = Sampler.forward

    def verifying(self, batch, host_tree, tree, output):
        verified = verify(self, batch, host_tree, tree, output)
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
        return verified

    @functools.wraps(sample)  # whose parameters are checked
    def sampling(self, output, *arguments, **options):
        totals["most rows sampled"] = max(totals["most rows sampled"], len(output.next_token_logits))
        return sample(self, output, *arguments, **options)

    def stepping(self, batch, *given):
        step = step_of(self, batch, *given)
        drafter = getattr(self.guarded.method, "drafter", None)
        running = [row for row, request in enumerate(batch.reqs) if not request.finished()]
        for row in running:
            whole = step.history(row)
            assert len(whole) == step.contexts[row] and whole[-1] == step.roots[row]
            if drafter is not None and not totals["failures"]:
                held = drafter.tokens(step.request_ids[row]).tolist()
                assert held == whole[: len(whole) - step.gained[row]].tolist(), "not the text so far"

        def history(row):
            totals["rebuilt"] += row in running
            return step.history(row)

        return dataclasses.replace(step, history=history)

    def drafting(self, batch):
        totals["prepared"] += self._prepared is not None
        tree = draft(self, batch)
        metrics = self.guarded.metrics
        for name in ("drafted", "accepted", "failures"):
            totals[name] = int(getattr(metrics, name)._value.get())
        totals["drafts between failures"] += int((tree.counts - 1).sum()) if totals["failures"] else 0
        return tree

    def finishing(self, request_id):
        finish(self, request_id)
        totals["finished"] += 1
        drafter = getattr(self.guarded.method, "drafter", ())
        totals["held"] = len(drafter) + len(self.guarded.running) + len(self._requests) + len(self._states)
        path.write_text(json.dumps(totals))

    TreeVerifier.verify, Drafting._step, Sampler.forward = verifying, stepping, sampling
    Drafting.draft, Drafting.finish = drafting, finishing


def record_ranks(folder):
    """Every process writes what it verifies, a line for each step, and whether it has a drafter. Ranks other than the
    first cannot do draft passes for a request whose id begins with `broken`; the first fails in the midst of one for
    `ends0`, and the others for `ends1`."""
    from freedraft.engines.sglang.draft_model import PagedDraftModel, PagedRound
    from freedraft.engines.sglang.ranks import Ranks
    from freedraft.engines.sglang.verify import TreeVerifier
    from sssd_plugin.method import SssdMethod

    verify, init, ready = TreeVerifier.verify, SssdMethod.__init__, PagedRound._ready
    run, share = PagedDraftModel.run, Ranks.share_outcome

    def verifying(self, batch, host_tree, tree, output):
        verified = verify(self, batch, host_tree, tree, output)
        host = [getattr(host_tree, name) for name in ("tokens", "parents", "depths", "counts")]
        device = [getattr(verified, name).numpy() for name in ("accepted", "lengths", "tokens")]
        with (folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(json.dumps([array.tolist() for array in host + device]) + "\n")
        return verified

    def making(self, *arguments):
        init(self, *arguments)
        (folder / f"drafter-{os.getpid()}").touch()

    def failing(self, *arguments):
        if not self._model.ranks.first and any(request.rid.startswith("broken") for request in self._batch.reqs):
            raise RuntimeError("this rank fails on purpose")
        return ready(self, *arguments)

    def ending(self, stages, batch):
        if f"ends{0 if self.ranks.first else 1}" in batch.rids:
            raise RuntimeError("this rank fails on purpose")
        return run(self, stages, batch)

    def sharing(self, verified):
        (folder / "shared").touch()
        return share(self, verified)

    PagedDraftModel.run, Ranks.share_outcome = ending, sharing
    TreeVerifier.verify, SssdMethod.__init__, PagedRound._ready = verifying, making, failing


def make_cycle(options, context, controller):
    from freedraft.draft import DraftBatch
    from sssd_plugin.method import SssdMethod

    class Cycle(SssdMethod):
        cycle = itertools.cycle((16, 4, 1, 8, 2))

        def draft(self, step):
            if any(name.startswith("broken") for name in step.request_ids):
                raise RuntimeError("this drafter fails on purpose")
            self.update(step)
            width = min(next(self.cycle), int(step.capacities.max()) + 1)
            return decoys_beside(self.propose(step, (width + 1) // 2 - 1), width) if width > 1 else roots(step)

    def roots(step):
        return DraftBatch.roots(step.roots)

    def decoys_beside(tree, width):
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

    return Cycle(options, context, controller)


def make_wild(options, context, controller):
    from freedraft.method import Method
    from tests.support.random_trees import random_batch

    rng = np.random.default_rng(0)

    class Wild(Method):
        def draft(self, step):
            width = int(step.capacities.max()) + 1
            counts = rng.integers(1, width + 1, step.batch_size).tolist()
            out = random_batch(rng, step.batch_size, width, context.vocab_size, counts)
            out.tokens[:, 0] = step.roots
            return out

    return Wild(options, context, options.make_controller(context), "wild")
