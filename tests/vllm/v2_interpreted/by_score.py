"""Draft tokens by score, as vLLM's adaptive verification has them where graphs are captured, in Triton's interpreter.

Tensor-parallel ranks take this as a plugin of vLLM, where ADAPTIVE is set.
"""

import functools

import torch
from vllm.v1.worker.cpu import shm
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

from freedraft.engines.vllm.v2.heads import OnTop
from freedraft.engines.vllm.v2.speculator import MethodSpeculator

SIZES = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]  # of steps whose times are known, in tokens


def enable(runner):
    """As vLLM does where graphs are captured."""
    torch.cuda.Stream, torch.cuda.Event = shm._StreamPlaceholder, shm._EventPlaceholder
    manager = adaptive_verification.AdaptiveVerificationManager
    runner.adaptive_verification = manager(runner.req_states, runner.input_buffers.query_start_loc, 1, 1000)
    runner.adaptive_verification.set_cost_curves([(1, 0.0)], [(size, 10.0 + 0.6 * size) for size in SIZES])
    runner.rejection_sampler.enable_adaptive_verification = True


def begin_on_top(runner, head, ours):
    """Verify the tokens of vLLM's speculator `head`, and n-grams behind them, by score from now on. Returns, for each
    step in which not all were verified, how many of each request were; and, for each step that was drafted for, how
    likely each token was said to be, and those of n-grams."""
    enable(runner)
    adaptive_verification._assign_draft_token_budget_compiled = adaptive_verification._assign_draft_token_budget
    head.acceptance_estimator = OnlineAcceptanceEstimator(runner.max_num_reqs, head.num_speculative_steps, head.device)
    ours.verify_by_score()
    manager, noted = runner.adaptive_verification, {"verified": [], "likely": []}
    assign, record = manager.reallocate_drafts, manager.record_confidences

    def assigned(ids, slots):
        budget = manager._batch_budget
        found = assign(ids, slots)
        if budget[2] < sum(budget[0].values()):
            noted["verified"].append((found[0].diff() - 1).tolist())
        return found

    def recorded(confidences, batch):
        likely, slots = confidences[: batch.num_reqs].tolist(), batch.idx_mapping.long()
        drafts, ngrams = runner.req_states.draft_tokens[slots].tolist(), ours._drafts[slots, 0].tolist()
        noted["likely"].append([likely, [a == b for a, b in zip(drafts, ngrams, strict=True)]])
        record(confidences, batch)

    manager.reallocate_drafts, manager.record_confidences = assigned, recorded
    return noted


def begin(runner):
    """Verify by score from now on; returns of each choice how many draft tokens were to be verified, the scores, and
    how many of each request were, and whether drafts were learnt from as they had been."""
    enable(runner)
    runner.speculator.verify_by_score()
    ours = runner.speculator.by_score
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
        if isinstance(self, OnTop):
            begin_on_top(runner, runner.speculator, self)
        else:
            begin(runner)

    MethodSpeculator.prepare = prepared
