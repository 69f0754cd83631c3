"""Engines with drafters of vLLM's own on model runner V2 in Triton's interpreter, one after the other: what each
answers, as a list of JSON on the last line.

    python on_top.py '[{"model": ..., "speculative_config": ..., "cases": {name: {"prompts": ..., ...}}, ...}, ...]'

Cases are those of `serve.py`; with "fails", every other draft of ours raises. Of an engine, "own" is how many tokens
its own drafter drafts, "seconds" what a step is measured to take, and each of its query tokens, "launches" counts those
of steps, of which "nothing" have no n-gram, and with "by_score", draft tokens are verified by score. The rest are
arguments of vLLM's `LLM`.
"""

import json
import sys
from unittest.mock import Mock

import pytest

from bench.lib import launches
from freedraft.draft import DraftBatch
from freedraft.engines.vllm.v2.speculator import MethodSpeculator
from tests.support.switched import kept_by
from tests.vllm.v2_interpreted import by_score as scores
from tests.vllm.v2_interpreted import serve


def note_drafts(runner, own):
    """A request's tokens, and the first `own` tokens drafted behind them."""
    noted, propose = [], runner.speculator.propose

    def proposed(batch, *args, **kwargs):
        drafts, states = propose(batch, *args, **kwargs), runner.req_states
        for row, slot in enumerate(batch.idx_mapping_np.tolist()):
            length, drafted = int(states.total_len.gpu[slot]), drafts[row, :own].tolist()
            if length > states.prefill_len.np[slot] and -1 not in drafted:  # vLLM 0.33 drafts nothing that is not used
                noted.append((states.all_token_ids.gpu[slot, :length].tolist(), drafted))
        return drafts

    runner.speculator.propose = proposed
    return noted


def failing(method):
    propose, calls = method.propose, [0]

    def fails(*args):
        calls[0] += 1
        if calls[0] % 2:
            raise RuntimeError("on purpose")
        return propose(*args)

    return fails


def totals(llm):
    """Operations and kernels of decoding steps: the most of any."""
    engine, counter = llm.llm_engine, launches.Counter()
    launches.add_requests(engine)
    with counter.patches(), counter:
        for step in range(launches.WARM + launches.STEPS):
            if step >= launches.WARM:
                counter.steps.append(launches.defaultdict(lambda: ([], [])))
            engine.step()
    engine.abort_request(["0", "1"])
    for _ in range(3):
        engine.step()
    sums = [
        [sorted(n for phase, kinds in step.items() if phase != "order" for n in kinds[i]) for step in counter.steps]
        for i in (0, 1)
    ]
    return {"eager": max(sums[0], key=len), "kernels": max(sums[1], key=len)}


def served(model, cases, speculative_config=None, *, own=0, seconds=(), launches=False, by_score=False, **given):
    """What one engine says."""
    with serve.engine(model, seconds, speculative_config=speculative_config, **given) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        ours = getattr(runner.speculator, "_freedraft_speculator", runner.speculator)
        ours = ours if isinstance(ours, MethodSpeculator) else None
        if launches == "nothing":
            ours.guarded.method.propose = lambda step, most: DraftBatch.empty(step.batch_size, 1)
        counted = totals(llm) if launches else {}
        noted = note_drafts(runner, own) if own else []
        scored = scores.begin_on_top(runner, runner.speculator, ours) if by_score else {}
        waits = serve.note_waits()
        found = {name: asked(llm, ours, noted, waits, **case) for name, case in cases.items()}
        found["engine"] = {"launches": counted, "class": type(runner.speculator).__name__}
        found["engine"] |= scored
        if ours is not None:
            core = llm.llm_engine.engine_core.engine_core
            for _ in range(3):
                core.step()
            held, guarded = ours.host.requests, ours.guarded
            left = len(held.slots) + len(held._preempted) + len(held.ended)
            found["engine"]["held"] = [kept_by(guarded.method), len(guarded.running), left]
            if (head := guarded.method.controller.head) is not None:
                found["engine"]["learnt"] = [head.accepted, *head.tails.tolist()]
        return found


def asked(llm, ours, noted, waits, *, fails=False, **case):
    """One case's answers, and what was drafted and accepted."""
    before, first, waited = serve.figures(llm), len(noted), waits[1]
    guarded = getattr(ours, "guarded", None)
    failures = guarded.metrics.failures._value.get() if ours else 0
    mine = counted(guarded.metrics, guarded._below) if ours else []
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(guarded.method, "propose", failing(guarded.method))
        if ours:
            patch.setattr(ours.host, "draft", calls := Mock(wraps=ours.host.draft))
        said = serve.answers(llm, **case)
    found = {name: value - before[name] for name, value in serve.figures(llm).items()}
    found |= {"answers": said, "own drafts": noted[first:], "waits": waits[1] - waited}
    if ours:
        found["failures"] = guarded.metrics.failures._value.get() - failures
        drafted, accepted, *lengths = [
            b - a for a, b in zip(mine, counted(guarded.metrics, guarded._below), strict=True)
        ]
        found |= {"n-grams": [drafted, accepted], "below": lengths, "waited for": calls.call_count}
    return found


def counted(metrics, below):
    """Tokens of n-grams that were drafted, and accepted; drafts of which they are on top, by accepted tokens."""
    below = [metrics.head_lengths(below, str(n)) for n in range(8)]
    return [int(one._value.get()) for one in (metrics.drafted, metrics.accepted, *below)]


def main():
    serve.as_on_devices()
    found = [served(**engine) for engine in json.loads(sys.argv[1])]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
