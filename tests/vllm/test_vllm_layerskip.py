"""Layer skipping through the real engine: the same tokens, and KV written only where it was reserved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_cases import MAX_MODEL_LEN, parameters, tokens_of
from vllm_engines import cramped, drafting_to_the_end, engine, failures, runner_of, settle, spied, verified

from freedraft.draft import DraftBatch
from layerskip_plugin.skip_set import SkipSet

BLOCK = 32
TOKENS = 32
K = 5
SOME = SkipSet(30, frozenset({7, 12, 20, 29}), frozenset({5, 12, 24}))


@pytest.fixture(scope="module")
def prompts(demo_prompts: list) -> list[dict[str, list[int]]]:
    return demo_prompts


@pytest.fixture(scope="module")
def plain(plain_demo: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    return plain_demo | {"prompts": [tokens[:TOKENS] for tokens in plain_demo["prompts"]]}


@pytest.fixture(scope="module")
def layerskip(
    plain: dict, demo_model: Path, demo_fingerprint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The engine under test, cramped, with two skip sets, the empty one first. It always drafts K tokens."""
    folder = tmp_path_factory.mktemp("skip_sets")
    SkipSet.empty(30, demo_fingerprint).save(folder / "empty.json")
    SkipSet(30, SOME.attention, SOME.mlp, demo_fingerprint).save(folder / "some.json")
    given: dict[str, Any] = {"method": "layerskip", "num_speculative_tokens": K}
    given |= {"skip_set": [str(folder / "empty.json"), str(folder / "some.json")]}
    given |= {"lookahead": "confidence", "threshold": 0.0}
    cramped = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 160, "block_size": BLOCK}
    cramped |= {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    with engine(demo_model, speculative_config=given, **cramped) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_failed_or_leaked(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "layerskip" in request.fixturenames:
        llm = request.getfixturevalue("layerskip")
        settle(llm)
        proposer = runner_of(llm).drafter
        assert not failures(proposer)
        assert not proposer.guarded.running and not proposer.guarded.method.selection.requests


def skipping(name: str, max_tokens: int = TOKENS) -> Any:
    return parameters(max_tokens, extra_args={"skip_set": name})


def generate(llm: Any, prompts: list, parameters: Any) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, parameters, use_tqdm=False))


def test_everything_is_accepted_when_nothing_is_skipped(layerskip: Any, prompts: list, plain: dict) -> None:
    verdicts: list[tuple[int, int]] = []
    with spied(runner_of(layerskip).drafter, lambda step, drafts: verdicts.append(verified(step))):
        for start in range(0, 12, 4):
            some = slice(start, start + 4)
            assert generate(layerskip, prompts[some], skipping("empty")) == plain["prompts"][some]
    # Of 12 x 32 tokens five of six are drafts, but for those of each request's first and last step.
    assert sum(drafted for drafted, _ in verdicts) > 12 * (TOKENS - 2 * (K + 1)) * K / (K + 1)
    assert all(drafted == accepted for drafted, accepted in verdicts)


def test_a_common_skip_set_with_chunked_prefill_and_preemption(layerskip: Any, prompts: list, plain: dict) -> None:
    with cramped(layerskip, skip_sets=2):
        settings = [skipping(("empty", "some")[i % 2]) for i in range(len(prompts))]
        assert generate(layerskip, prompts, settings) == plain["prompts"]


def test_near_max_model_len_others_still_draft(layerskip: Any, prompts: list, long_prompts: list, plain: dict) -> None:
    with drafting_to_the_end(layerskip, MAX_MODEL_LEN, K):
        for index, long in enumerate(long_prompts):
            outputs = generate(layerskip, [long, prompts[0]], skipping("some"))
            assert outputs == [plain["long"][index], plain["prompts"][0]]


def test_slots_are_reserved_and_drafts_end_where_none_are(layerskip: Any, prompts: list, plain: dict) -> None:
    """With the scheduler's reserve every draft has its slots; without it drafts end at the last block of the row."""
    scheduler = layerskip.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.num_lookahead_tokens == K
    proposer = runner_of(layerskip).drafter
    model = proposer.guarded.method._model
    capacities: list[int] = []

    def record(step: Any, drafts: list[list[int]]) -> None:
        capacities.extend((model.capacities(step) - step.capacities).tolist())
        ends = step.contexts - 1 + np.array(list(map(len, drafts)), np.int32)
        table = step.engine.runner.input_batch.block_table[0]
        assert (ends <= table.num_blocks_per_row[step.engine.rows] * table.block_size).all()

    with spied(proposer, record):
        assert generate(layerskip, prompts[:4], skipping("some")) == plain["prompts"][:4]
    assert min(capacities) == 0
    capacities.clear()
    scheduler.num_lookahead_tokens = 0
    try:
        with spied(proposer, record):
            assert generate(layerskip, prompts[:4], skipping("some")) == plain["prompts"][:4]
    finally:
        scheduler.num_lookahead_tokens = K
    assert min(capacities) < 0, "no draft came to the end of its blocks: the test does not test that"


class Pages:
    """The KV cache of all layers, looked at token by token."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        attention = [layer.self_attn.attn for layer in runner.model.model.layers]
        self.caches = [layer.kv_cache for layer in attention]
        # Which elements of a block belong to the token at each offset: kernels pack blocks as they like.
        first, cache = attention[0], self.caches[0]
        self.mine = torch.zeros(BLOCK, *cache.shape[1:], dtype=torch.bool)
        for offset in range(BLOCK):
            block = torch.zeros_like(cache[:1])
            ones = torch.ones(1, first.num_kv_heads, first.head_size)
            first.impl.do_kv_cache_update(first, ones, ones, block, torch.tensor([offset]))
            self.mine[offset] = block[0] != 0
        assert self.mine.sum(0).eq(1).all()

    def blocks(self, row: int) -> list[int]:
        table = self.runner.input_batch.block_table[0]
        return table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()

    def copy(self) -> list[torch.Tensor]:
        return [cache.clone() for cache in self.caches]

    def changed(self, before: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """bool [BLOCK] by block: which of its tokens differ in any layer."""
        result = {}
        for old, cache in zip(before, self.caches, strict=True):
            differs = old != cache
            for block in differs.flatten(1).any(1).nonzero().flatten().tolist():
                tokens = (differs[block] & self.mine).flatten(1).any(1)
                result[block] = result.get(block, torch.zeros(BLOCK, dtype=torch.bool)) | tokens
        return result

    def digest(self, row: int, tokens: int) -> str:
        """Of the KV of a row's first tokens, all layers."""
        blocks = self.blocks(row)
        made = hashlib.sha256()
        for cache in self.caches:
            for index in range(0, tokens, BLOCK):
                mine = self.mine[: min(BLOCK, tokens - index)].any(0)
                made.update(cache[blocks[index // BLOCK]][mine].numpy().tobytes())
        return made.hexdigest()


def test_drafting_writes_reserved_slots_and_nothing_else(layerskip: Any, prompts: list, plain: dict) -> None:
    method = runner_of(layerskip).drafter.guarded.method
    pages = Pages(runner_of(layerskip))
    original = method.draft
    written = 0
    strays: list[tuple[int, int]] = []

    def watched(step: Any) -> Any:
        nonlocal written
        before = pages.copy()
        drafts = original(step)
        allowed = set()
        for row, n, nodes in zip(
            step.engine.rows.tolist(), step.contexts.tolist(), drafts.counts.tolist(), strict=True
        ):
            blocks = pages.blocks(row)
            allowed |= {(blocks[position // BLOCK], position % BLOCK) for position in range(n - 1, n + nodes - 2)}
        for block, tokens in pages.changed(before).items():
            offsets = tokens.nonzero().flatten().tolist()
            written += len(offsets)
            strays.extend((block, offset) for offset in offsets if (block, offset) not in allowed)
        return drafts

    method.draft = watched
    try:
        assert generate(layerskip, prompts[2:6], skipping("some", 16)) == [t[:16] for t in plain["prompts"][2:6]]
    finally:
        del method.draft
    assert written > 4 * 16 / 2 and not strays


def test_committed_pages_are_those_of_an_engine_that_does_not_draft(layerskip: Any, prompts: list) -> None:
    """The same drafts, once from draft passes and once out of the air, leave the same KV bit for bit."""
    proposer = runner_of(layerskip).drafter
    pages = Pages(runner_of(layerskip))
    drafted: dict[bytes, list[int]] = {}
    digests: list[dict[bytes, str]] = [{}, {}]

    def keys(step: Any) -> list[tuple[int, int, bytes]]:
        rows, lengths = step.engine.rows.tolist(), step.contexts.tolist()
        return [(row, n, step.history(b).tobytes()) for b, (row, n) in enumerate(zip(rows, lengths, strict=True))]

    def record(step: Any, drafts: list[list[int]]) -> None:
        for (row, n, key), draft in zip(keys(step), drafts, strict=True):
            drafted[key] = draft
            digests[0][key] = pages.digest(row, n - 1)

    def replay(step: Any) -> DraftBatch:
        drafts = DraftBatch.empty(step.batch_size, K + 1)
        drafts.tokens[:, 0], drafts.parents[:], drafts.scores[:] = step.roots, np.arange(-1, K), 1.0
        for b, (row, n, key) in enumerate(keys(step)):
            chain = drafted[key]
            drafts.tokens[b, 1 : len(chain) + 1], drafts.counts[b] = chain, len(chain) + 1
            digests[1][key] = pages.digest(row, n - 1)
        return drafts

    some = prompts[5:9]
    layerskip.reset_prefix_cache()
    with spied(proposer, record):
        first = generate(layerskip, some, skipping("some", 16))
    layerskip.reset_prefix_cache()
    proposer.guarded.draft = replay
    try:
        second = generate(layerskip, some, skipping("some", 16))
    finally:
        del proposer.guarded.draft
    assert first == second
    assert len(digests[0]) > 16 and digests[0] == digests[1]


def test_requests_that_are_aborted_are_forgotten(layerskip: Any, prompts: list, plain: dict) -> None:
    llm_engine = layerskip.llm_engine
    for index in range(3):
        llm_engine.add_request(f"job-{index}", prompts[index], skipping("some"))
    finished = {}
    step = 0
    while llm_engine.has_unfinished_requests():
        if step == 3:
            llm_engine.abort_request(["job-1"])
        for output in llm_engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    # A wish that cannot be met, of whatever kind, is none.
    assert generate(layerskip, prompts[:1], parameters(8, extra_args={"skip_set": ["no", "such"]})) == [
        plain["prompts"][0][:8]
    ]
    assert finished["job-0"] == plain["prompts"][0] and finished["job-2"] == plain["prompts"][2]
