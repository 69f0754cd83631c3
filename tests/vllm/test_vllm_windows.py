"""Windowed drafts through the real engine: what they read, by a reference; the same tokens, whatever they read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from test_vllm_layerskip_models import GOOD, skipping
from vllm_cases import TINY, generate, save_sets, token_prompts
from vllm_engines import cramped, engine, runner_of, spied
from windowed_reference import Reference

from freedraft.engines.vllm.draft_passes import PagedDraftRound
from freedraft.engines.vllm.forward import Pages
from freedraft.recipe import Window
from tests.support.models import continuations, save, tiny_model
from tests.support.prompts import random_ids

BLOCK, K = 32, 3
WINDOW = Window(16, 40)
ATTENDED = 112
PROMPTS = token_prompts(random_ids((150, 70, 40, 199, 97, 160, 128, 129), TINY["vocab_size"]))


@pytest.fixture(scope="module", params=["Llama", pytest.param("Mistral", marks=pytest.mark.extended)])
def windowed(request, tmp_path_factory):
    """A cramped engine with a skip set that skips nothing and one that does; a Mistral with a window of its own. It
    always drafts K tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    more = {"sliding_window": ATTENDED} if request.param == "Mistral" else {}
    model = save(tiny_model(request.param, seed=11, num_hidden_layers=2, **TINY, **more), folder / "model")
    sets = save_sets(model, folder, empty=(set(), set()), some=({1}, set()))
    given = {"skip_set": sets, "lookahead": "fixed", "window": WINDOW.tokens, "sinks": WINDOW.sinks}
    cramped = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": BLOCK}
    cramped |= {"num_gpu_blocks_override": 16, "enable_prefix_caching": True, "skip_tokenizer_init": True}
    with engine(model, speculative_config=GOOD | given, **cramped) as llm:
        llm.family, llm.folder = request.param, model
        yield llm


def answers(llm, prompts, *sets, tokens=40):
    """With these skip sets in turn."""
    asked = skipping(*itertools.islice(itertools.cycle(sets), len(prompts)), tokens=tokens)
    return generate(llm, prompts, asked)


def test_drafts_are_those_of_a_masked_reference(windowed):
    """Through the prefix cache, too: the second time most pages are another request's of before."""
    rounds: list[tuple[list[int], list[int]]] = []
    for prompts in (PROMPTS[:2], PROMPTS[:2]):
        with spied(
            runner_of(windowed).drafter,
            lambda step, drafts: rounds.extend(
                (step.history(b).tolist(), draft) for b, draft in enumerate(drafts) if len(draft) == K
            ),
        ):
            answers(windowed, prompts, "empty")
    Reference(windowed.folder, BLOCK, ATTENDED if windowed.family == "Mistral" else None).judge(rounds, WINDOW)


def test_a_common_skip_set_with_chunked_prefill_and_preemption(windowed):
    prompts = token_prompts(random_ids(range(56, 64), TINY["vocab_size"]))  # which fill the KV cache, and grow
    expected = continuations(windowed.folder, [prompt["prompt_token_ids"] for prompt in prompts], 80)
    with cramped(windowed, skip_sets=2):
        assert answers(windowed, prompts, "empty", "some", tokens=80) == expected


def test_attention_reads_no_more_than_the_window(windowed, monkeypatch):
    model = runner_of(windowed).drafter.guarded.method._model
    run, read = model.run, []

    def watched(*args, lengths, pages, **more):
        read.append((int(lengths.max()), pages.shape[1]))
        return run(*args, lengths=lengths, pages=pages, **more)

    monkeypatch.setattr(model, "run", watched)
    answers(windowed, PROMPTS[3:4], "empty")
    longest = BLOCK + WINDOW.newest + BLOCK - 1 + K  # a page of sinks, and the pages that the newest tokens lie in
    assert read and max(length for length, _ in read) <= longest
    assert max(pages for _, pages in read) <= -(-longest // BLOCK) + 1 < 200 // BLOCK + 1


@pytest.mark.parametrize("window", [Window(16, 48), Window(16, 8176)])
def test_a_table_that_is_full_stays_as_wide(windowed, window):
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
