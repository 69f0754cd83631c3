"""Loaded by the tests' engines through PYTHONPATH: methods that stress the product's worker, and a count of its work.

`sssd_cycle` drafts with SSSD, puts a wrong sibling before every draft token, so that every accepted one has to be
moved, and changes the width at every step; it fails wherever a request's id begins with `broken`. `wild` drafts random
trees over a few tokens.
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
    from tests.support import switched

    if os.environ.get("TREE_TEST_WIDTHS"):
        from freedraft.engines.sglang import guards

        widths = tuple(map(int, os.environ["TREE_TEST_WIDTHS"].split(",")))
        guards.widths_for = lambda *_, **__: widths
    if os.environ.get("TREE_TEST_PROBABILITIES"):
        from freedraft.engines.sglang import verify

        verify.MAX_PROBABILITIES = int(os.environ["TREE_TEST_PROBABILITIES"])
    take_seeds_on_cpu()
    if os.environ.get("TRITON_INTERPRET"):
        import freedraft_sglang_recurrent

        take_pinned_memory_on_cpu()
        freedraft_sglang_recurrent.take_kernels()
    if os.environ.get("TREE_TEST_TRANSFERS"):
        import torch

        take_pinned_memory_on_cpu()  # KV is sent from host memory
        torch.cuda.Event, torch.cuda.current_stream = torch.cpu.Event, torch.cpu.current_stream
    if os.environ.get("TREE_TEST_HEADS"):
        import freedraft_sglang_heads

        freedraft_sglang_heads.take_heads()
    if os.environ.get("TREE_TEST_STATES"):
        keep_states_too_early()
    take_sinks_on_cpu()
    leave_out_experts_of_others()
    cap_logits_on_cpu()
    if os.environ.get("TREE_TEST_ATTENTION_RANKS") and multiprocessing.parent_process() is not None:
        take_attention_ranks_on_cpu()
    if os.environ.get("TREE_TEST_ADAPTERS") and multiprocessing.parent_process() is not None:  # not in the tests' own
        take_pinned_memory_on_cpu()
    register(dataclasses.replace(SPEC, name="sssd_cycle", factory=f"{__name__}:make_cycle"))
    register(MethodSpec("wild", f"{__name__}:make_wild", SssdOptions))
    register(switched.SPEC)
    if os.environ.get("TREE_TEST_COUNTS"):
        count_work(Path(os.environ["TREE_TEST_COUNTS"]))
    if os.environ.get("TREE_TEST_COMPILED"):
        record_compilation(Path(os.environ["TREE_TEST_COMPILED"]))
    if os.environ.get("TREE_TEST_RANKS"):
        record_ranks(Path(os.environ["TREE_TEST_RANKS"]))


def take_seeds_on_cpu():
    """Let `--enable-deterministic-inference` start here, with SGLang's sampler as it is: what stands in the way is that
    no attention backend of a CPU is on its lists, and that the hash of seeds and the matrix products that do not depend
    on the batch are Triton's or of a package for Intel's processors."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, HookType.REPLACE)
    batch_invariant = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
    HookRegistry.register(batch_invariant, lambda runner: None, HookType.REPLACE)


def take_sinks_on_cpu():
    """Let gpt-oss start: SGLang has a list of the backends with sinks, which cannot know of the platform's."""
    from sglang.srt.arg_groups import model_hook

    model_hook.attention_backends_of = lambda _: ("intel_amx", "intel_amx")


def leave_out_experts_of_others():
    """Let experts be split between ranks: SGLang's kernel of experts in PyTorch takes all chosen ones to be the rank's
    own, and -1, which stands for those of others, to be an index."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def of_own(kernel, layer, x, chosen, config):
        ids, weights = chosen.topk_ids, chosen.topk_weights
        if not (away := ids < 0).any():
            return kernel(layer, x, chosen, config)
        one = chosen._replace(topk_ids=ids.clamp(0).view(-1, 1), topk_weights=weights.masked_fill(away, 0).view(-1, 1))
        return kernel(layer, x.repeat_interleave(ids.shape[1], 0), one, config).view(*ids.shape, -1).sum(1)

    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", of_own, HookType.AROUND)


def cap_logits_on_cpu():
    """Let Gemma 2 run, whose logits SGLang caps by a kernel of Triton."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def capped(logits, cap):
        logits.div_(cap).tanh_().mul_(cap)

    HookRegistry.register("sglang.srt.layers.logits_processor.fused_softcap", capped, HookType.REPLACE)


def take_attention_ranks_on_cpu():
    """Let DP attention run here, with SGLang's own code for one kind of CPU: torch's copies and collectives in place of
    its kernels. Its backend of a CPU does not tell the length of the requests that pad a batch, 1 on all others."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    for module in (parallel_state, dp_attention, forward_batch_info):
        module._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    ranks = parallel_state.GroupCoordinator
    ranks.all_to_all_single = ranks._all_to_all_single
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def take_pinned_memory_on_cpu():
    """Let SGLang's LoRA in PyTorch, written for any device, and recurrent layers run here: what stands in the way is
    pinned memory alone."""
    import torch

    for name in ("empty", "tensor", "zeros"):
        made = getattr(torch, name)
        setattr(torch, name, lambda *given, _made=made, pin_memory=False, **options: _made(*given, **options))
    torch.Tensor.pin_memory = lambda self: self


def keep_states_too_early():
    """Keep the state before the last accepted node."""
    from freedraft.engines.sglang import worker

    original = worker.commit_mamba_states_after_verify

    def commit(target_worker, batch, lengths, accepted, nodes):
        original(target_worker, batch, (lengths - 1).clamp(min=1), accepted, nodes)

    worker.commit_mamba_states_after_verify = commit


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
    """Write, after every verified step, what the worker has done so far. Requests that SGLang does not report are
    forgotten in steps of a request whose id begins with `sweep`, and in these only; requests are thrown out where an id
    begins with `crowded`."""
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers import scheduler

    from freedraft.engines.sglang.drafting import BatchDrafting
    from freedraft.engines.sglang.verify import TreeVerifier
    from freedraft.files import write_atomically
    from tests.support.switched import by_source, kept_by, sssd_in

    totals = collections.Counter()
    verify, step_of, draft, finish = TreeVerifier.verify, BatchDrafting._step, BatchDrafting.draft, BatchDrafting.finish
    sample, sweep = Sampler.forward, BatchDrafting._sweep

    def verifying(self, batch, host_tree, tree, output):
        verified = verify(self, batch, host_tree, tree, output)
        accepted = verified.accepted.numpy()
        totals["compacted"] += int(((accepted >= 0) & (accepted != np.arange(accepted.shape[1]))).any(1).sum())
        totals["steps"] += 1
        totals[f"width {accepted.shape[1]}"] += 1
        if "drafted" in totals:  # in the rank that drafts
            write_atomically(path, json.dumps(totals).encode(), durable=False)
        return verified

    @functools.wraps(sample)  # whose parameters are checked
    def sampling(self, output, *arguments, **options):
        totals["most rows sampled"] = max(totals["most rows sampled"], len(output.next_token_logits))
        return sample(self, output, *arguments, **options)

    def stepping(self, batch, *given):
        step = step_of(self, batch, *given)
        for row, request in enumerate(batch.reqs):
            if not request.finished():
                whole = vars(self).setdefault("texts", {})[step.request_ids[row]] = step.history(row).tolist()
                assert len(whole) == step.contexts[row] and whole[-1] == step.roots[row]
        return step

    def drafting(self, batch):
        scheduler.TEST_RETRACT = any(request.rid.startswith("crowded") for request in batch.reqs)
        totals["prepared"] += self._awaited is not None
        self.texts = {}
        tree = draft(self, batch)
        metrics, method = self.guarded.metrics, self.guarded.method
        for name in ("drafted", "accepted", "failures"):
            totals[name] = int(getattr(metrics, name)._value.get())
        if not totals["failures"] and (ngrams := sssd_in(method)) is not None:
            tokens = ngrams.drafter.tokens
            totals["wrong texts"] += sum(tokens(name).tolist() != text for name, text in self.texts.items())
        dict.update(totals, by_source(metrics))
        return tree

    def sweeping(self, ids):
        self._max_running = 0 if any(name.startswith("sweep") for name in ids) else 1 << 30
        sweep(self, ids)
        hold(self)

    def finishing(self, request_id):
        finish(self, request_id)
        hold(self)

    def hold(drafting):
        """Count what is kept of requests."""
        kept = len(drafting.guarded.running) + len(drafting._requests) + len(drafting._states)
        totals["held"] = kept + kept_by(drafting.guarded.method)
        write_atomically(path, json.dumps(totals).encode(), durable=False)

    TreeVerifier.verify, BatchDrafting._step, Sampler.forward = verifying, stepping, sampling
    BatchDrafting.draft, BatchDrafting.finish, BatchDrafting._sweep = drafting, finishing, sweeping


def record_compilation(path):
    """Write, after every step and request, which functions got a signature compiled, or loaded from the disk, before
    the first request and since."""
    from numba.core.dispatcher import Dispatcher

    from freedraft.engines.sglang.drafting import BatchDrafting
    from freedraft.files import write_atomically

    found = {"at start": [], "serving": []}
    phase = "at start"
    compile_one, begin = Dispatcher.compile, BatchDrafting.begin

    def compiling(self, signature):
        found[phase].append(f"{self.py_func.__module__}.{self.py_func.__qualname__}")
        return compile_one(self, signature)

    def beginning(self, requests):
        nonlocal phase
        phase = "serving"
        begin(self, requests)

    def recording(original):
        def recorded(self, *given):
            original(self, *given)
            write_atomically(path, json.dumps(found).encode(), durable=False)

        return recorded

    Dispatcher.compile, BatchDrafting.begin = compiling, beginning
    BatchDrafting.note, BatchDrafting.finish = map(recording, (BatchDrafting.note, BatchDrafting.finish))


def record_ranks(folder):
    """Every process writes what it verifies, a line for each step, and whether it has a drafter. Ranks other than the
    first cannot do draft passes for a request whose id begins with `broken`; the first fails in the midst of one for
    `ends0`, and the others for `ends1`."""
    from freedraft.engines.sglang.draft_model import PagedDraftModel, PagedRound
    from freedraft.engines.sglang.verify import Ranks, TreeVerifier
    from sssd_plugin.method import SssdMethod

    verify, init, ready = TreeVerifier.verify, SssdMethod.__init__, PagedRound._ready
    run, share = PagedDraftModel.run, Ranks.share_outcome

    def verifying(self, batch, host_tree, tree, output):
        if os.environ.get("TREE_TEST_ATTENTION_RANKS") and any(r.rid.startswith("ends") for r in batch.reqs):
            raise RuntimeError("this rank fails on purpose")
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
        if batch.rids[0].startswith(f"ends{0 if self.ranks.first else 1}"):
            raise RuntimeError("this rank fails on purpose")
        return run(self, stages, batch)

    def sharing(self, verified):
        (folder / "shared").touch()
        return share(self, verified)

    PagedDraftModel.run, Ranks.share_outcome = ending, sharing
    TreeVerifier.verify, SssdMethod.__init__, PagedRound._ready = verifying, making, failing


def make_cycle(options, context):
    from freedraft.draft import DraftBatch
    from sssd_plugin.method import SssdMethod

    class Cycle(SssdMethod):
        widths = itertools.cycle((16, 4, 1, 8))

        def draft(self, step, **how):
            if any(name.startswith("broken") for name in step.request_ids):
                raise RuntimeError("this drafter fails on purpose")
            self.update(step)
            length = (min(next(self.widths), int(step.capacities.max()) + 1) - 1) // 2
            return decoys_beside(self.propose(step, length)) if length else DraftBatch.roots(step.roots)

    def decoys_beside(chains):
        out = DraftBatch.empty(chains.batch_size, 2 * chains.max_nodes - 1)
        nodes = np.arange(out.max_nodes)
        out.tokens[:, ::2], out.tokens[:, 1::2] = chains.tokens, (chains.tokens[:, 1:] + 1) % context.vocab_size
        out.parents[:], out.depths[:] = np.where(nodes, (nodes - 1) // 2 * 2, -1), (nodes + 1) // 2
        out.scores[:], out.counts[:] = 1.0, 2 * chains.counts - 1
        out.check()
        return out

    return Cycle(options.model_copy(update={"shape": "chain"}), context)


def make_wild(options, context):
    from freedraft.method import Method
    from tests.support.conformance import FEW
    from tests.support.random_trees import random_batch

    rng = np.random.default_rng(0)

    class Wild(Method):
        def draft(self, step, **how):
            width = int(step.capacities.max()) + 1
            counts = rng.integers(1, width + 1, step.batch_size).tolist()
            out = random_batch(rng, step.batch_size, width, len(FEW), counts)
            out.tokens[...] += FEW[0]
            out.tokens[:, 0] = step.roots
            return out

    return Wild(options, context, options.make_controller(context), "wild")
