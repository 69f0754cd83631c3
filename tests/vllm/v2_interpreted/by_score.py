"""Draft tokens by score, as vLLM's adaptive verification has them where graphs are captured, in Triton's interpreter.

Tensor-parallel ranks take this as a plugin of vLLM, where ADAPTIVE is set.
"""

import functools

import torch
from vllm.v1.worker.cpu import shm
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from freedraft.engines.vllm.v2.speculator import MethodSpeculator

SIZES = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]  # of steps whose times are known, in tokens


def begin(runner):
    """Verify by score from now on; returns of each choice how many draft tokens were to be verified, the scores, and
    how many of each request were, and whether drafts were learnt from as they had been."""
    torch.cuda.Stream, torch.cuda.Event = shm._StreamPlaceholder, shm._EventPlaceholder
    states, speculator = runner.req_states, runner.speculator
    runner.adaptive_verification = AdaptiveVerificationManager(states, runner.input_buffers.query_start_loc, 1, 1000)
    runner.adaptive_verification.set_cost_curves([(1, 0.0)], [(size, 10.0 + 0.6 * size) for size in SIZES])
    runner.rejection_sampler.enable_adaptive_verification = True
    speculator.verify_by_score()
    ours = speculator.by_score
    noted, followed, choose, learn = {"chosen": [], "learnt": []}, [], ours.choose, ours.acceptance.update

    def chosen(draft, slots, counts, batch):
        choose(draft, slots, counts, batch)
        followed[:] = () if draft is None else (draft.tokens.copy(),)
        if ours.late:
            scores = ours._scores[batch.idx_mapping_np, 1:].tolist()
            noted["chosen"].append([ours._budget, scores, ours._counts.tolist()])

    def learnt(step):
        if followed:
            noted["learnt"].append(bool((ours.acceptance._followed.tokens == followed[0]).all()))
        followed.clear()
        learn(step)

    ours.choose, ours.acceptance.update = chosen, learnt
    return noted


def install():
    """In a tensor-parallel rank."""
    prepare = MethodSpeculator.prepare

    @functools.wraps(prepare)
    def prepared(self, runner):
        prepare(self, runner)
        begin(runner)

    MethodSpeculator.prepare = prepared
