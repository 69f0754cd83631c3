"""What a method sees of a step of vLLM, from the state of its model runner. No engine needed."""

from __future__ import annotations

from types import SimpleNamespace as Object
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from freedraft.draft import DraftBatch
from freedraft.engines.vllm.v1.runner import draft_lists, make_step, output_of
from freedraft.method import Step

LONGEST = 16


def step_of(
    sampled: list[list[int]], lengths: list[int], drafts: dict[str, list[int]], query_tokens: int, **output: Any
) -> Step:
    """Requests "a", "b", ... whose tokens are 0, 1, ... in row 0, 100, 101, ... in row 1 and so on."""
    tokens = np.arange(LONGEST, dtype=np.int32) + 100 * np.arange(len(sampled) + 1, dtype=np.int32)[:, None]
    batch = Object(
        req_ids=[chr(ord("a") + i) for i in range(len(sampled))],
        num_tokens_no_spec=np.array([*lengths, 0]),
        token_ids_cpu=tokens,
    )
    config = Object(num_speculative_tokens=4)
    scheduled = Object(scheduled_spec_decode_tokens=drafts, total_num_scheduled_tokens=query_tokens, **output)
    runner = Object(input_batch=batch, max_model_len=LONGEST, speculative_config=config)
    return make_step(runner, {"scheduler_output": scheduled, "sampled_token_ids": sampled})


def test_a_step_of_decoding() -> None:
    step = step_of([[4], [105, 106, 107], [214]], [5, 8, 15], {"b": [105, 106, 1], "c": [3, -1]}, 7)
    assert step.request_ids == ["a", "b", "c"] and step.contexts.tolist() == [5, 8, 15]
    assert step.gained.tolist() == [1, 3, 1] and step.roots.tolist() == [4, 107, 214]
    assert step.tokens[step.starts[1] : step.ends[1]].tolist() == [105, 106, 107]
    # What the scheduler pads with is no draft; the last token that may be sampled is at max_model_len - 1.
    assert step.drafted.tolist() == [0, 3, 1] and step.accepted.tolist() == [0, 2, 0]
    assert step.capacities.tolist() == [4, 4, 0]
    assert step.history(1).tolist() == list(range(100, 108))
    assert step.previous == (3, 7) and step.widths is None


def test_a_request_in_the_midst_of_its_prompt_is_left_out() -> None:
    step = step_of([[], [105]], [9, 6], {}, 12)
    assert step.request_ids == ["b"] and step.engine.rows.tolist() == [1] and step.roots.tolist() == [105]
    assert step.previous is None, "the step did more than decode"
    draft = DraftBatch.roots(step.roots)
    assert draft_lists(draft, step, 2) == draft_lists(None, step, 2) == [[], []]
    draft = DraftBatch.empty(1, 4)
    draft.tokens[0, 1:], draft.counts[0] = (7, 8, 9), 4
    assert draft_lists(draft, step, 2) == [[], [7, 8, 9]]


def test_a_step_that_is_padded_or_schedules_less() -> None:
    step = step_of([[4], [105]], [5, 6], {"b": [3, -1]}, 4, num_spec_tokens_to_schedule=2)
    assert step.previous is None, "its query tokens are not those of the drafts"
    assert step.capacities.tolist() == [2, 2]


def test_a_step_without_requests() -> None:
    step = step_of([], [], {}, 0)
    assert step.batch_size == 0 and draft_lists(None, step, 0) == []


def test_the_output_of_a_request_ends_where_the_scheduler_ends_it() -> None:
    def output(tokens: list[int], parameters: Any) -> list[int]:
        return output_of(Object(output_token_ids=tokens, sampling_params=parameters)).tolist()

    parameters = Object(max_tokens=5, ignore_eos=False, all_stop_token_ids={9})
    assert output([1, 2, 9, 4, 5, 6], parameters) == [1, 2, 9]
    assert output([1, 2, 3, 4, 5, 6], parameters) == [1, 2, 3, 4, 5]
    parameters.ignore_eos = True
    assert output([1, 2, 9, 4, 5, 6], parameters) == [1, 2, 9, 4, 5]
    assert output([1, 2], None) == [1, 2]
