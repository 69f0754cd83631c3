"""Windowed drafts through the real engine: what they read, by a reference; the same tokens, whatever they read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_layerskip_models import GOOD, skip_set_of
from vllm_cases import TINY, parameters, token_prompts, tokens_of
from vllm_engines import cramped, engine, failures, runner_of, settle, spied
from windowed_reference import Reference

from freedraft.draft_pass import Window
from freedraft.engines.vllm.draft_passes import PagedDraftRound
from freedraft.engines.vllm.pages import Pages
from tests.support.models import save, tiny_model
from tests.support.prompts import random_ids

BLOCK, K = 32, 3
WINDOW = Window(16, 40)
ATTENDED = 112
PROMPTS = token_prompts(random_ids((150, 70, 40, 199, 97, 160, 128, 129), TINY["vocab_size"]))


def make(family: str, folder: Path) -> Path:
    more = {"sliding_window": ATTENDED} if family == "Mistral" else {}
    return save(tiny_model(family, seed=11, num_hidden_layers=2, **TINY, **more), folder)


@pytest.fixture(scope="module", params=["Llama", pytest.param("Mistral", marks=pytest.mark.extended)])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cramped engine with a skip set that skips nothing and one that does; a Mistral with a window of its own. It
    always drafts K tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param, folder / "model")
    sets = [skip_set_of(model, folder, set(), set(), "empty"), skip_set_of(model, folder, {1}, set(), "some")]
    given = {"skip_set": sets, "lookahead": "fixed", "window": WINDOW.tokens, "sinks": WINDOW.sinks}
    cramped = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": BLOCK}
    cramped |= {"num_gpu_blocks_override": 16, "enable_prefix_caching": True, "skip_tokenizer_init": True}
    with engine(model, speculative_config=GOOD | given, **cramped) as llm:
        llm.family, llm.folder = request.param, folder / "model"
        yield llm
        settle(llm)
        assert not failures(runner_of(llm).drafter)


def generate(llm: Any, prompts: list[Any], sets: list[str], tokens: int = 40) -> list[list[int]]:
    asked = [
        parameters(tokens, ignore_eos=True, detokenize=False, extra_args={"skip_set": name})
        for _, name in zip(prompts, sets * len(prompts), strict=False)
    ]
    return tokens_of(llm.generate(prompts, asked, use_tqdm=False))


def plainly(llm: Any, prompts: list[Any], tokens: int) -> list[list[int]]:
    """What the same engine answers without drafts."""
    guarded = runner_of(llm).drafter.guarded
    guarded.draft = lambda step: None
    try:
        return generate(llm, prompts, ["empty"], tokens)
    finally:
        del guarded.draft


def test_drafts_are_those_of_a_masked_reference(windowed: Any) -> None:
    """Through the prefix cache, too: the second time most pages are another request's of before."""
    rounds: list[tuple[list[int], list[int]]] = []
    for prompts in (PROMPTS[:2], PROMPTS[:2]):
        with spied(
            runner_of(windowed).drafter,
            lambda step, drafts: rounds.extend(
                (step.history(b).tolist(), draft) for b, draft in enumerate(drafts) if len(draft) == K
            ),
        ):
            generate(windowed, prompts, ["empty"])
    Reference(windowed.folder, BLOCK, ATTENDED if windowed.family == "Mistral" else None).judge(rounds, WINDOW)


def test_a_common_skip_set_with_chunked_prefill_and_preemption(windowed: Any) -> None:
    prompts = token_prompts(random_ids(range(56, 64), TINY["vocab_size"]))  # which fill the KV cache, and grow
    expected = plainly(windowed, prompts, 80)
    with cramped(windowed, skip_sets=2):
        assert generate(windowed, prompts, ["empty", "some"], 80) == expected


def test_attention_reads_no_more_than_the_window(windowed: Any) -> None:
    model = runner_of(windowed).drafter.guarded.method._model
    run, read = model.run, []

    def watched(*args: Any, lengths: Any, pages: Any, **more: Any) -> Any:
        read.append((int(lengths.max()), pages.shape[1]))
        return run(*args, lengths=lengths, pages=pages, **more)

    model.run = watched
    try:
        generate(windowed, PROMPTS[3:4], ["empty"])
    finally:
        del model.run
    longest = BLOCK + WINDOW.newest + BLOCK - 1 + K  # a page of sinks, and the pages that the newest tokens lie in
    assert read and max(length for length, _ in read) <= longest
    assert max(pages for _, pages in read) <= -(-longest // BLOCK) + 1 < 200 // BLOCK + 1


@pytest.mark.parametrize("window", [Window(16, 48), Window(16, 8176)])
def test_a_table_that_is_full_stays_as_wide(windowed: Any, window: Window) -> None:
    """One request nearly at the end of its context, beside one that may still draft five tokens."""
    runner, longest = runner_of(windowed), 5
    model, table = runner.drafter.draft_model, runner.input_batch.block_table[0]
    size, width = table.block_size, table.max_num_blocks_per_req
    whole = torch.arange(2 * width, dtype=torch.int32, device=model.device).view(2, width)
    first, rows = np.array([width * size - 3, 100], np.int64), np.arange(2)
    pages = Pages(whole, rows, np.full(2, width), size)
    (draft_pass, *_) = runner.drafter.guarded.method.draft_passes.values()
    tables = PagedDraftRound(model, None, draft_pass._replace(window=window), pages, first, longest)._tables(rows)
    assert tables.read.shape[1] <= width
    for row, (position, left_out) in enumerate(zip(first.tolist(), tables.dropped.tolist(), strict=True)):
        newest = min((position + longest - 1) // size, width - 1)
        assert tables.read[row, newest - left_out // size] == whole[row, newest], "where the newest token's KV goes"
