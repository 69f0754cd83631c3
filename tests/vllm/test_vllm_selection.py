"""Skip sets that change while vLLM serves, between requests and within them: the same tokens all the time."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import greedily
from vllm_engines import engine, runner_of, settle, spied

from freedraft.config import ConfigError
from freedraft.fingerprints import hardware_name
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.knapsack_search import search
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.base import Static
from layerskip_plugin.selection.knapsack import Choice, Plan
from layerskip_plugin.selection.online_search import KnapSpec, Swift
from layerskip_plugin.skip_set import SkipSet

LAYERS, HIDDEN, K = 30, 576, 4
MAX_MODEL_LEN = 384


@pytest.fixture(scope="module")
def prompts(demo_prompts):
    return [*demo_prompts[:5], *demo_prompts[12:]]


@pytest.fixture(scope="module")
def plain(plain_demo):
    answers = plain_demo["prompts"]
    return [*answers[:5], *answers[12:]]


def generate(llm, prompts):
    return greedily(llm, prompts)


@pytest.fixture(scope="module")
def swift_engine(plain, demo_model):
    """Searching for half of the time, so that a short test sees sets change."""
    given: dict[str, Any] = {"method": "layerskip", "num_speculative_tokens": K, "selection": "swift"}
    given |= {"search_share": 0.5, "skip_ratio": 0.3, "lookahead": "confidence", "threshold": 0.0}
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "max_num_batched_tokens": 160}
    with engine(demo_model, enable_prefix_caching=True, speculative_config=given, **sizes) as llm:
        yield llm


@contextmanager
def selecting(llm, selection):
    """Another selection in the same engine, with its sets built as at the start."""
    method = runner_of(llm).drafter.guarded.method
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"selection": selection, "needs_prompt_states": selection.needs_prompt_states}.items():
            patch.setattr(method, name, value)
        build_all(method)
        yield method
        settle(llm)
        assert not method.selection.requests
    build_all(method)


def build_all(method):
    method.draft_passes.clear()
    method.recipes.use(method.selection.sets.values())
    for skip_set in method.selection.sets.values():
        method.build(skip_set, optimize=False)


def kept_sublayers(method):
    """Of the only draft pass."""
    (draft_pass,) = method.draft_passes.values()
    return len(draft_pass.layers.sublayers)


@pytest.mark.extended
def test_swift_searches_while_it_serves(swift_engine: Any, prompts: list, plain: list) -> None:
    proposer = runner_of(swift_engine).drafter
    method = proposer.guarded.method
    swift, modules = method.selection, set()
    assert isinstance(swift, Swift)
    size = len(swift.incumbent)
    start = SkipSet.of_sublayers(range(size), LAYERS)  # without its first layers the model guesses: any other is better
    swift.sets = {swift.name: start}
    build_all(method)
    with spied(proposer, lambda step, drafts: modules.update(method.draft_passes.values())):
        for turn in range(40):  # it searches for a share of the time, which is longer on a slow machine
            assert generate(swift_engine, prompts) == plain
            if turn >= 2 and len(swift.space.values) > 20 and len(modules) > 1 and swift.incumbent != start:
                break
    assert len(swift.space.values) > 20, "it hardly searched: the test does not test that"
    assert start in swift.space.values
    assert len(modules) > 1 and swift.incumbent != start, "the set never changed: the test does not test that"
    assert method.recipes.all == [swift.incumbent] and kept_sublayers(method) == 60 - len(swift.incumbent)


class Reading(HostModel):
    """The model on the host, whose drafted tokens read the whole model's KV of themselves too, as `SetScores` do."""

    def attend(self, text, layer, q, past, near_k, near_v):
        own = [kv[layer][:, past].transpose(0, 1)[:, None] for kv in (text.keys, text.values)]
        return super().attend(text, layer, q, past, *own)


@contextmanager
def leaving_the_cache(proposer):
    """Fail where anything is written into the KV cache."""
    caches = [layer.self_attn.attn.kv_cache for layer in proposer.draft_model.backbone.layers]
    before = [cache.clone() for cache in caches]
    yield
    assert all(bool((old == cache).all()) for old, cache in zip(before, caches, strict=True))


def scored_text(scorer, step):
    """Of the step's requests the one that is scored."""
    histories = [step.history(b) for b in range(step.batch_size)]
    return next(text for text in histories if np.array_equal(text[scorer.first :], scorer.tokens)).tolist()


def test_matchness_is_that_of_the_model_and_writes_no_kv(swift_engine, prompts, plain):
    """Scores are what the model says by itself, one for the whole model, and the KV cache stays as it is."""
    proposer = runner_of(swift_engine).drafter
    scores = proposer.guarded.method.selection.scorer
    rng = np.random.default_rng(0)
    bits = np.zeros((6, 60), bool)
    for row in bits[1:5]:
        row[rng.choice(np.arange(4, 56), 12, replace=False)] = True
    bits[5, 1] = True
    recipes = [SkipSet.of_sublayers(np.flatnonzero(row), LAYERS) for row in bits]
    found, texts = [], []

    def look(step, drafts):
        if len(found) < 4 and scores.observe(step):
            with leaving_the_cache(proposer):
                found.append(scores(recipes))
            texts.append(scored_text(scores, step))

    with spied(proposer, look):
        assert generate(swift_engine, prompts[:4]) == plain[:4]
    assert len(found) == 4
    host = Reading.load(Path(swift_engine.llm_engine.model_config.model), dtype="float32")
    sets = [host.skip(np.flatnonzero(row)) for row in bits]
    for text, measured in zip(texts, found, strict=True):
        sample = host.sample([text[:-1]], 32, [len(text) - 33])
        drafted = host.best(host.final_states(sets, sample)).numpy()
        expected = (drafted == np.array(text[-32:])).mean(1)
        assert measured == pytest.approx(expected, abs=1.01 / 32) and measured[0] == 1
    assert 0.1 < np.mean(found, 0)[1:].max() < 0.97


def test_knapspec_searches_as_the_reference_does(swift_engine, prompts, plain):
    """Sublayer by sublayer over the engine's own modules: the sets that the model by itself comes to. Drafts that cost
    next to nothing, so that some are found to pay, and are drafted with."""
    proposer = runner_of(swift_engine).drafter
    paged = proposer.guarded.method._model
    scorer = paged.scorer(KnapSpec.window)
    text, found = [], []

    def propose(weights, most, base):
        with leaving_the_cache(proposer):
            sets = scorer.run_sublayers(lambda embedded, run: search(embedded, run, 2 * LAYERS, weights, most)).sets()
        found.append((list(text), sets))
        return sets

    def observe(step):
        if able := type(scorer).observe(scorer, step):
            text[:] = scored_text(scorer, step)
        return able

    times = PassTimes(1.0, 1.0, 0.0, lambda n: 100.0 + n)
    policy = KnapSpec(LAYERS)
    policy.prepare(scorer, None)
    policy.sets_of_weights, policy.pass_times, policy.share = propose, lambda: times, 0.9
    with selecting(swift_engine, policy) as method:
        scorer.observe = observe
        for _ in range(12):
            assert generate(swift_engine, prompts) == plain
            if policy.incumbent and len(found) >= 3:
                break
        assert policy.incumbent, "no set was found: the test does not test that"
        assert method.recipes.all == [policy.incumbent] and kept_sublayers(method) == 60 - len(policy.incumbent)
    host = Reading.load(Path(swift_engine.llm_engine.model_config.model), dtype="float32")
    for text, sets in found[:3]:
        most = max(len(skip) for skip in sets)
        sample = host.sample([text[:-1]], KnapSpec.window, [len(text) - 1 - KnapSpec.window])
        expected = search(sample.states(0), partial(host.sublayer, sample=sample), 2 * LAYERS, (1, 1), most)
        same = [skip.bits == tuple(bits) for skip, bits in zip(sets, expected.skipped.tolist(), strict=True)]
        assert np.mean(same) > 0.8, "beyond what rounding turns"


def test_a_selection_is_passed_the_hidden_states_of_prompts(swift_engine, prompts, plain):
    """What KNN-SSD makes of them: `tests/sglang/test_selection.py`, `tests/layerskip/test_knn.py`."""
    seen: dict[str, np.ndarray] = {}

    class Listening(Static):
        needs_prompt_states = True

        def set_prompt_state(self, request_id, state):
            seen[request_id] = state

    with selecting(swift_engine, Listening({"a": SkipSet.empty(LAYERS), "b": SkipSet.empty(LAYERS)})):
        assert generate(swift_engine, prompts) == plain
    states = [seen[name] for name in sorted(seen, key=lambda name: int(name.split("-")[0]))]
    assert states[0].shape == (HIDDEN,)

    import torch
    from transformers import AutoModelForCausalLM

    folder = swift_engine.llm_engine.model_config.model
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    for prompt, state in zip(prompts[::4], states[::4], strict=True):
        with torch.inference_mode():
            theirs = whole.model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0, -1].numpy()
        assert state == pytest.approx(theirs, abs=2e-3 * float(np.abs(theirs).max()))


def test_files_of_another_machine_stop_the_start(demo_fingerprint, demo_model, tmp_path):
    """What else is refused: `tests/layerskip/test_layerskip_options.py`."""
    from vllm.engine.arg_utils import EngineArgs

    def start(where):
        path = tmp_path / "plan.json"
        Plan((64,), (Choice(SkipSet.of_sublayers([6], LAYERS, demo_fingerprint), 2, 1.0),), where).save(path, {})
        given = {"method": "layerskip", "num_speculative_tokens": K}
        given |= {"selection": "knapsack", "selection_file": str(path)}
        EngineArgs(str(demo_model), speculative_config=given).create_engine_config()

    start(hardware_name())
    with pytest.raises(ConfigError, match="measured on a Cray"):
        start("a Cray")
