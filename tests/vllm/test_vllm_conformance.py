"""What every engine promises, of vLLM: one engine of one process, cramped, with all methods.

Of model runner V1; of V2, in Triton's interpreter, where the environment asks for it (`make test-vllm-v2`).
"""

import copy
import functools
import itertools
import json
import os
from collections import Counter
from contextlib import contextmanager
from unittest.mock import DEFAULT, patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_cases import ASKED, metric, token_prompts
from vllm_engines import engine, runner_of, settle, spied
from vllm_pages import Pages, Reading, leaving_the_cache
from windowed_reference import Reference

from freedraft.draft import DraftBatch
from freedraft.draft_model import Window
from freedraft.engines import copies
from freedraft.engines.vllm.kept_layers import Backbone, UnsupportedModel
from freedraft.engines.vllm.methods import register
from layerskip_plugin.skip_set import SkipSet
from tests.support import switched
from tests.support.conformance import (
    BIAS,
    CONTEXT,
    FEW,
    LAYERS,
    OFF,
    PROMPTS,
    TOKENS,
    Conformance,
    Served,
    greedy,
    make_model,
    methods,
)
from tests.support.models import continuations
from tests.support.prompts import random_ids

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
K, BLOCK = 5, 32
WINDOW = Window(16, 24)


def seeded():
    """Prompts and sampling parameters: each prompt with three seeds and four temperatures (0 among them). The kinds of
    sampling alternate."""
    product = itertools.product(random_ids([12] * 8, 24, first=5, seed=5), (1, 2, 3), (0.0, 0.3, 0.9, 1.3))
    given = list(zip(product, itertools.cycle(ASKED)))
    common = {"max_tokens": 32, "ignore_eos": True}
    return [prompt for (prompt, _, _), _ in given], [
        common | {"temperature": warm, "seed": seed} | asked for (_, seed, warm), asked in given
    ]


class OnVllm(Served):
    counts_ends = not V2

    def __init__(self, llm, folder):
        self.llm, self.folder = llm, folder
        self.expected = continuations(folder, PROMPTS, 40)
        self.proposer = runner_of(llm).speculator if V2 else runner_of(llm).drafter

    @property
    def method(self):
        """`Switched`."""
        return self.proposer.guarded.method

    def sampling(self, asked, method):
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        asked = dict(asked)
        extra = {"method": method} | asked.pop("extra", {})
        if (schema := asked.pop("schema", None)) is not None:
            asked["structured_outputs"] = StructuredOutputsParams(json=schema)
        if V2 and asked.get("logit_bias") == BIAS:  # refused with drafts
            asked |= {"logit_bias": None, "allowed_token_ids": FEW}
        return SamplingParams(extra_args=extra, **asked)

    def prompts(self, prompts, salt):
        return [prompt | {"cache_salt": salt} for prompt in token_prompts(prompts)]

    def answers(self, prompts, each, *, method, salt="a"):
        settle(self.llm)
        sampling = [self.sampling(asked, method) for asked in each]
        outputs = self.llm.generate(self.prompts(prompts, salt), sampling, use_tqdm=False)
        first = [output.outputs[0] for output in outputs]
        said = [[sorted(x.logprob for x in one.values()) for one in answer.logprobs or ()] for answer in first]
        return [
            (list(answer.token_ids), [p for one in logprobs for p in one])
            for answer, logprobs in zip(first, said, strict=True)
        ]

    def abort(self, prompts, method):
        settle(self.llm)
        llm = self.llm.llm_engine
        for i, prompt in enumerate(self.prompts(prompts, "a")):
            llm.add_request(f"job-{i}", prompt, self.sampling(greedy(100), method))
        for _ in range(6):
            llm.step()
        assert self.method.running
        llm.abort_request([f"job-{i}" for i in range(len(prompts))])
        # The same ids again, at once, with other prompts.
        for i, prompt in enumerate(self.prompts(PROMPTS[6:8], "a")):
            llm.add_request(f"job-{i}", prompt, self.sampling(greedy(), method))
        found = {}
        while llm.has_unfinished_requests():
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished}
        assert [found["job-0"], found["job-1"]] == self.expected[6:8]

    def counts(self):
        names = {"drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
        names |= {"cached": "prefix_cache_hits", "preempted": "num_preemptions"}
        found = Counter({name: int(metric(self.llm, f"vllm:{of}")) for name, of in names.items()})
        # On V2, vLLM counts the placeholders of requests that have no drafts.
        for name in ("failures", "drafted", "accepted") if V2 else ("failures",):
            found[name] = int(getattr(self.method.metrics, name)._value.get())
        return found + Counter(switched.by_source(self.method.metrics))

    def forget_prefixes(self):
        self.llm.reset_prefix_cache()

    @contextmanager
    def crowded(self):
        reading, before = [], self.counts()["preempted"]
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

        def note(*_):
            reading.append({one.num_computed_tokens < one.num_prompt_tokens for one in scheduler.running})
            return DEFAULT

        with patch.object(scheduler, "schedule", wraps=scheduler.schedule, side_effect=note):
            yield
        assert {True, False} in reading, "no prompt was read in chunks beside others: the test does not test that"
        assert self.counts()["preempted"] > before, "nobody was preempted: the test does not test that"

    def check_nothing_is_left(self):
        settle(self.llm)
        requests = self.proposer.host.requests if V2 else None
        held = (requests.slots, requests._preempted, requests.ended) if V2 else [self.proposer.limits]
        assert not self.method.running and not self.proposer.guarded.running and not any(held)
        assert not switched.kept_by(self.method)


@pytest.fixture(scope="module")
def served(demo_model, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"), demo_model)
    searching = {"method": "layerskip", "selection": "swift", "skip_ratio": 0.3, "lookahead": "fixed"}
    (folder / "methods.json").write_text(json.dumps(methods(folder) | {"searching": searching}))
    assert register(switched.SPEC)
    cramped = {"max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": BLOCK}
    cramped |= {"num_gpu_blocks_override": 16, "enable_prefix_caching": True}
    given = {"method": "switched", "num_speculative_tokens": K, "parts": str(folder / "methods.json")}
    with pytest.MonkeyPatch.context() as changed:
        if V2:
            changed.setenv("SERVED_AS_ON_GPUS", "1")
            # Their kernel takes the interpreter most of a step: `test_vllm_v2_trees`.
            changed.setattr(copies, "top_tokens", functools.partial(copies.top_tokens, backend="reference"))
            # Steps of five and six requests are not drafted for: what they gain is taken later.
            given["num_speculative_tokens_per_batch_size"] = [[1, 4, K], [5, 6, 0], [7, 64, K]]
        with engine(folder, speculative_config=given, **cramped) as llm:
            yield OnVllm(llm, folder)


@pytest.fixture(autouse=True)
def nothing_failed_or_leaked(served):
    yield
    served.check_nothing_is_left()


def skipping(name, tokens=TOKENS):
    return greedy(tokens, extra={"skip_set": name})


class TestVllm(Conformance):
    """On both model runners."""


@pytest.mark.skipif(V2, reason="of V1 alone")
class TestV1:
    @pytest.mark.parametrize(("at_once", "path"), [(4, "forward_cpu"), (96, "forward_native")])
    def test_seeds(self, served, at_once, path, monkeypatch):
        """Tokens and logprobs are those of clients that want no drafts, beside a request without a seed and through
        preemptions, too; by the sampler that vLLM has for CPUs, and by the one that GPUs take for seeds."""
        draws, (prompts, each) = runner_of(served.llm).sampler.topk_topp_sampler, seeded()
        monkeypatch.setattr(draws, "forward", getattr(draws, path))
        off = served.answers(prompts, [asked | {"extra": OFF} for asked in each], method="fixed")
        before = served.counts()
        for first in range(0, len(prompts), at_once):
            part = slice(first, first + at_once)
            asked = [*each[part], {"temperature": 1.0, "max_tokens": 32}]
            *answers, _ = served.answers([*prompts[part], PROMPTS[0]], asked, method="fixed")
            for found, plain in zip(answers, off[part], strict=True):
                assert found[0] == plain[0] and found[1] == pytest.approx(plain[1], abs=1e-4)
        done = served.counts() - before
        assert 50 < done["accepted"] < done["drafted"] - 50
        assert at_once < 96 or done["preempted"] > 0

    def test_scheduled_draft_length_is_honoured(self, served, monkeypatch):
        longest = []
        monkeypatch.setattr(served.llm.llm_engine.engine_core.engine_core.scheduler, "dynamic_sd_lookup", [3] * 9)
        with spied(served.proposer, lambda step, drafts: longest.append(max(map(len, drafts), default=0))):
            assert served.ask(PROMPTS[:3], greedy(), method="fixed") == served.expected[:3]
        assert max(longest) == 3

    def test_steps_of_a_rest_are_taken_later(self, served, monkeypatch):
        """Before the next draft, which then goes on from the whole text; and before a request ends."""
        method, rested, texts = served.method.parts["fixed"], [], []
        keep, finish, turns = served.proposer.guarded.keep, method.finish, itertools.cycle([True, True, True, False])

        def ending(request_id, *given):
            texts.append(method.drafter.tokens(request_id).tolist())
            finish(request_id, *given)

        plan = method.controller.plan
        drafts = itertools.cycle([False, True])  # none before a rest: a step that verifies some is not one of a rest
        monkeypatch.setattr(method.controller, "rests", lambda: next(turns))
        monkeypatch.setattr(
            method.controller, "plan", lambda step: plan(step) if step.capacities.any() and next(drafts) else 0
        )
        monkeypatch.setattr(served.proposer.guarded, "keep", lambda *step: (rested.append(step), keep(*step)))
        monkeypatch.setattr(method, "finish", ending)
        before = served.counts()
        assert served.ask(PROMPTS[:3], greedy(), method="fixed") == served.expected[:3]
        done = served.counts() - before
        settle(served.llm)
        assert len(rested) > 10 and done["accepted"] > 0
        whole = [prompt + answer for prompt, answer in zip(PROMPTS[:3], served.expected[:3], strict=True)]
        assert len(texts) == 3 and all(any(text == one[: len(text)] for one in whole) for text in texts)
        assert sum(map(len, texts)) >= sum(map(len, whole)) - 3, "all but the last token of each"

    def test_slots_are_reserved_and_drafts_end_where_none_are(self, served, monkeypatch):
        """With the scheduler's reserve every draft has its slots; without it drafts end at the last block of a row."""
        scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler.num_lookahead_tokens == K
        model, capacities = served.method.parts["passes"]._model, []

        def record(step, drafts):
            capacities.extend((model.capacities(step) - step.capacities).tolist())
            ends = step.contexts - 1 + np.array(list(map(len, drafts)), np.int32)
            table = step.engine.runner.input_batch.block_table[0]
            assert (ends <= table.num_blocks_per_row[step.engine.rows] * table.block_size).all()

        for reserved in (K, 0):
            monkeypatch.setattr(scheduler, "num_lookahead_tokens", reserved)
            with spied(served.proposer, record):
                assert served.ask(PROMPTS[8:12], skipping("weak"), method="passes") == served.expected[8:12]
            assert not reserved or min(capacities) == 0
        assert min(capacities) < 0, "no draft came to the end of its blocks: the test does not test that"

    def test_drafting_writes_reserved_slots_and_nothing_else(self, served, monkeypatch):
        method, pages = served.method, Pages(runner_of(served.llm), BLOCK)
        original, written, strays = method.parts["passes"].draft, [], []

        def watched(step):
            before = pages.tokens()
            drafts = original(step)
            allowed = set()
            rows, contexts, counts = (each.tolist() for each in (step.engine.rows, step.contexts, drafts.counts))
            for row, n, nodes in zip(rows, contexts, counts, strict=True):
                blocks = pages.blocks(row)
                allowed |= {(blocks[position // BLOCK], position % BLOCK) for position in range(n - 1, n + nodes - 2)}
            changed = (before != pages.tokens()).any(-1).nonzero().tolist()
            written.extend(changed)
            strays.extend(place for place in changed if tuple(place) not in allowed)
            return drafts

        monkeypatch.setattr(method, "draft", watched)
        answers = [answer[:16] for answer in served.expected[2:6]]
        assert served.ask(PROMPTS[2:6], skipping("weak", 16), method="passes") == answers
        assert len(written) > 4 * 16 / 2 and not strays

    def test_committed_pages_are_those_of_an_engine_that_does_not_draft(self, served, monkeypatch):
        """The same drafts, once from draft passes and once out of the air, leave the same KV bit for bit."""
        pages = Pages(runner_of(served.llm), BLOCK)
        drafted, digests = {}, [{}, {}]

        def keys(step):
            rows, lengths = step.engine.rows.tolist(), step.contexts.tolist()
            return [(row, n, step.history(b).tobytes()) for b, (row, n) in enumerate(zip(rows, lengths, strict=True))]

        def record(step, drafts):
            for (row, n, key), draft in zip(keys(step), drafts, strict=True):
                drafted[key] = draft
                digests[0][key] = pages.digest(row, n - 1)

        def replay(step):
            drafts = DraftBatch.empty(step.batch_size, K + 1)
            drafts.tokens[:, 0], drafts.parents[:], drafts.scores[:] = step.roots, np.arange(-1, K), 1.0
            for b, (row, n, key) in enumerate(keys(step)):
                chain = drafted[key]
                drafts.tokens[b, 1 : len(chain) + 1], drafts.counts[b] = chain, len(chain) + 1
                digests[1][key] = pages.digest(row, n - 1)
            return drafts

        served.forget_prefixes()
        with spied(served.proposer, record):
            first = served.ask(PROMPTS[5:9], skipping("mixed", 16), method="passes")
        served.forget_prefixes()
        monkeypatch.setattr(served.proposer.guarded, "step", replay)
        assert first == served.ask(PROMPTS[5:9], skipping("mixed", 16), method="passes")
        assert len(digests[0]) > 16 and digests[0] == digests[1]

    def test_windowed_drafts_are_those_of_a_masked_reference(self, served, monkeypatch):
        """Through the prefix cache, too; and attention reads no more than the window."""
        given, rounds, read = random_ids((150, 70), 250, first=5, seed=6), [], []
        model = served.method.parts["windows"]._model
        run = model.run

        def watched(*args, lengths, pages, **more):
            read.append((int(lengths.max()), pages.shape[1]))
            return run(*args, lengths=lengths, pages=pages, **more)

        monkeypatch.setattr(model, "run", watched)
        for _ in range(2):
            with spied(
                served.proposer,
                lambda step, drafts: rounds.extend(
                    (step.history(b).tolist(), draft) for b, draft in enumerate(drafts) if len(draft) == K
                ),
            ):
                served.ask(given, skipping("empty"), method="windows")
        Reference(served.folder, BLOCK).judge(rounds, WINDOW)
        longest = BLOCK + WINDOW.newest + BLOCK - 1 + K  # a page of sinks, and the pages of the newest tokens
        assert read and max(length for length, _ in read) <= longest
        assert max(pages for _, pages in read) <= -(-longest // BLOCK) + 1

    def test_matchness_is_that_of_the_model_and_writes_no_kv(self, served):
        """Scores are what the model says by itself, one for the whole model, and the KV cache stays as it is."""
        scores, found, texts = served.method.parts["searching"].selection.scorer, [], []
        bits = np.zeros((5, 2 * LAYERS), bool)
        bits[1, 0] = bits[2, 3] = bits[3, [2, 5]] = bits[4, [4, 5, 6, 7]] = True
        recipes = [SkipSet.of_sublayers(np.flatnonzero(row), LAYERS) for row in bits]

        def look(step, drafts):
            if len(found) < 4 and scores.observe(step):
                with leaving_the_cache(served.proposer):
                    found.append(scores(recipes))
                histories = [step.history(b) for b in range(step.batch_size)]
                scored = (text for text in histories if np.array_equal(text[scores.first :], scores.tokens))
                texts.append(next(scored).tolist())

        with spied(served.proposer, look):
            assert served.ask(PROMPTS[8:12], greedy(), method="searching") == served.expected[8:12]
        assert len(found) == 4
        host = Reading.load(served.folder, dtype="float32")
        sets = [host.skip(np.flatnonzero(row)) for row in bits]
        for text, measured in zip(texts, found, strict=True):
            sample = host.sample([text[:-1]], 32, [len(text) - 33])
            drafted = host.best(host.final_states(sets, sample)).numpy()
            expected = (drafted == np.array(text[-32:])).mean(1)
            assert measured == pytest.approx(expected, abs=1.01 / 32) and measured[0] == 1
        assert np.mean(found, 0)[1:].min() < 0.9 and np.mean(found, 0)[4] > 0.1

    def test_a_selection_is_passed_the_hidden_states_of_prompts(self, served, monkeypatch):
        """What KNN-SSD makes of them: `tests/sglang/test_conformance.py`, `tests/layerskip/test_knn.py`."""
        seen, method = {}, served.method.parts["passes"]
        monkeypatch.setattr(method, "needs_prompt_states", True)
        monkeypatch.setattr(method, "set_prompt_state", lambda request_id, state: seen.setdefault(request_id, state))
        assert served.ask(PROMPTS, greedy(), method="passes") == served.expected
        states = [seen[name] for name in sorted(seen, key=lambda name: int(name.split("-")[0]))]
        whole = AutoModelForCausalLM.from_pretrained(served.folder, dtype="float32")
        for prompt, state in zip(PROMPTS[::4], states[::4], strict=True):
            with torch.inference_mode():
                theirs = whole.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
            assert state == pytest.approx(theirs, abs=2e-3 * float(np.abs(theirs).max()))

    def test_targets_that_are_built_otherwise_than_their_name_says(self, served, monkeypatch):
        """A part too many, a norm that may hand over something else than a tensor, and no decoder."""
        from torch import nn

        target = runner_of(served.llm).model
        layers = target.model.layers
        assert len(Backbone.of(target).layers) == LAYERS
        fused = copy.copy(layers[0].input_layernorm)
        fused.__class__ = type("FusedNormQuant", (type(fused),), {})
        for layer, name, part, words in (
            (layers[1], "pre_feedforward_layernorm", nn.Identity(), r"layer 1 .*pre_feedforward_layernorm"),
            (layers[0], "input_layernorm", fused, r"layer 0 .*norms other than RMSNorm"),
        ):
            with monkeypatch.context() as changed, pytest.raises(UnsupportedModel, match=words):
                changed.setitem(layer._modules, name, part)
                Backbone.of(target)
        assert len(Backbone.of(target).layers) == LAYERS
        with pytest.raises(UnsupportedModel, match="not a standard decoder"):
            Backbone.of(nn.Linear(2, 2))
