"""Layer skipping through the real engine: the same tokens, and KV written only where it was reserved."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from vllm_cases import MAX_MODEL_LEN, TOKENS, generate, parameters
from vllm_engines import cramped, drafting_to_the_end, engine, runner_of, spied, verified

from freedraft.draft import DraftBatch
from layerskip_plugin.skip_set import SkipSet

BLOCK, K = 32, 5


@pytest.fixture(scope="module")
def layerskip(plain_demo, demo_model, demo_fingerprint, tmp_path_factory):
    """The engine under test, cramped, with two skip sets, the empty one first. It always drafts K tokens."""
    folder = tmp_path_factory.mktemp("skip_sets")
    SkipSet.empty(30, demo_fingerprint).save(folder / "empty.json")
    SkipSet(30, frozenset({7, 12, 20, 29}), frozenset({5, 12, 24}), demo_fingerprint).save(folder / "some.json")
    given = {"method": "layerskip", "num_speculative_tokens": K}
    given |= {"skip_set": [str(folder / "empty.json"), str(folder / "some.json")]}
    given |= {"lookahead": "confidence", "threshold": 0.0}
    cramped = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 160, "block_size": BLOCK}
    cramped |= {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    with engine(demo_model, speculative_config=given, **cramped) as llm:
        yield llm


def skipping(name, max_tokens=TOKENS):
    return parameters(max_tokens, extra_args={"skip_set": name})


def test_everything_is_accepted_when_nothing_is_skipped(layerskip, demo_prompts, plain_demo):
    verdicts: list[tuple[int, int]] = []
    with spied(runner_of(layerskip).drafter, lambda step, drafts: verdicts.append(verified(step))):
        for start in range(0, 12, 4):
            some = slice(start, start + 4)
            assert generate(layerskip, demo_prompts[some], skipping("empty")) == plain_demo["prompts"][some]
    # Of 12 answers five of six tokens are drafts, but for those of each request's first and last step.
    assert sum(drafted for drafted, _ in verdicts) > 12 * (TOKENS - 2 * (K + 1)) * K / (K + 1)
    assert all(drafted == accepted for drafted, accepted in verdicts)


def test_a_common_skip_set_with_chunked_prefill_and_preemption(layerskip, demo_prompts, plain_demo):
    """A wish that cannot be met, of whatever kind, is none: the first set drafts."""
    with cramped(layerskip, skip_sets=2):
        settings = [skipping(("empty", "some", ["no", "such"])[i % 3]) for i in range(len(demo_prompts))]
        assert generate(layerskip, demo_prompts, settings) == plain_demo["prompts"]


def test_near_max_model_len_others_still_draft(layerskip, demo_prompts, long_prompts, plain_demo):
    with drafting_to_the_end(layerskip, MAX_MODEL_LEN, K):
        for index, long in enumerate(long_prompts):
            outputs = generate(layerskip, [long, demo_prompts[0]], skipping("some"))
            assert outputs == [plain_demo["long"][index], plain_demo["prompts"][0]]


def test_slots_are_reserved_and_drafts_end_where_none_are(layerskip, demo_prompts, plain_demo, monkeypatch):
    """With the scheduler's reserve every draft has its slots; without it drafts end at the last block of the row."""
    scheduler = layerskip.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.num_lookahead_tokens == K
    proposer, capacities = runner_of(layerskip).drafter, list[int]()
    model = proposer.guarded.method._model

    def record(step, drafts):
        capacities.extend((model.capacities(step) - step.capacities).tolist())
        ends = step.contexts - 1 + np.array(list(map(len, drafts)), np.int32)
        table = step.engine.runner.input_batch.block_table[0]
        assert (ends <= table.num_blocks_per_row[step.engine.rows] * table.block_size).all()

    for reserved in (K, 0):
        monkeypatch.setattr(scheduler, "num_lookahead_tokens", reserved)
        with spied(proposer, record):
            assert generate(layerskip, demo_prompts[:4], skipping("some")) == plain_demo["prompts"][:4]
        if reserved:
            assert min(capacities) == 0
    assert min(capacities) < 0, "no draft came to the end of its blocks: the test does not test that"


class Pages:
    """The KV cache of all layers, looked at token by token."""

    def __init__(self, runner):
        self.runner = runner
        attention = [layer.self_attn.attn for layer in runner.model.model.layers]
        self.caches = [layer.kv_cache for layer in attention]
        # Which elements of a block belong to the token at each offset: kernels pack blocks as they like.
        first, places = attention[0], list[torch.Tensor]()
        for offset in range(BLOCK):
            block = torch.zeros_like(self.caches[0][:1])
            ones = torch.ones(1, first.num_kv_heads, first.head_size)
            first.impl.do_kv_cache_update(first, ones, ones, block, torch.tensor([offset]))
            places.append(block.flatten().nonzero().flatten())
        self.places = torch.stack(places)
        assert sorted(self.places.flatten().tolist()) == [*range(self.caches[0][0].numel())]

    def blocks(self, row):
        table = self.runner.input_batch.block_table[0]
        return table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()

    def tokens(self, blocks=slice(None)):
        """[blocks, BLOCK, ...], a copy of what each token has in all layers."""
        return torch.cat([cache[blocks].flatten(1)[:, self.places] for cache in self.caches], -1)

    def digest(self, row, tokens):
        """Of the KV of a row's first tokens."""
        kept = self.tokens(self.blocks(row)).flatten(0, 1)[:tokens]
        return hashlib.sha256(kept.numpy().tobytes()).hexdigest()


def test_drafting_writes_reserved_slots_and_nothing_else(layerskip, demo_prompts, plain_demo, monkeypatch):
    method, pages = runner_of(layerskip).drafter.guarded.method, Pages(runner_of(layerskip))
    original, written, strays = method.draft, [], []

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
    answers = [answer[:16] for answer in plain_demo["prompts"][2:6]]
    assert generate(layerskip, demo_prompts[2:6], skipping("some", 16)) == answers
    assert len(written) > 4 * 16 / 2 and not strays


def test_committed_pages_are_those_of_an_engine_that_does_not_draft(layerskip, demo_prompts, monkeypatch):
    """The same drafts, once from draft passes and once out of the air, leave the same KV bit for bit."""
    proposer, pages = runner_of(layerskip).drafter, Pages(runner_of(layerskip))
    drafted: dict[bytes, list[int]] = {}
    digests: list[dict[bytes, str]] = [{}, {}]

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

    layerskip.reset_prefix_cache()
    with spied(proposer, record):
        first = generate(layerskip, demo_prompts[5:9], skipping("some", 16))
    layerskip.reset_prefix_cache()
    monkeypatch.setattr(proposer.guarded, "draft", replay)
    assert first == generate(layerskip, demo_prompts[5:9], skipping("some", 16))
    assert len(digests[0]) > 16 and digests[0] == digests[1]
