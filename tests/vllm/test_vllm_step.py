"""What a method sees of a step of vLLM, from the state of its model runner. No engine needed."""

from __future__ import annotations

import numpy as np
import pytest

from freedraft.draft import DraftBatch
from freedraft.engines.vllm.outputs import output_of
from freedraft.engines.vllm.v1.runner import V1StepState, draft_lists, make_step

MAX_MODEL_LEN = 16
ROWS = 4


def request_of(request_id, prompt, output, **parameters):
    """vLLM's CachedRequestState, with the stop tokens of a model whose end is token 9."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    sampling = SamplingParams(**parameters)
    sampling.update_from_generation_config({}, eos_token_id=9)
    return CachedRequestState(request_id, prompt, [], sampling, None, ([0],), 0, output)


def step_of(sampled, lengths, drafts, query_tokens, limits=None, **output):
    """Requests "a", "b", ... whose tokens are 0, 1, ... in row 0, 100, 101, ... in row 1 and so on."""
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch

    batch = InputBatch(ROWS, MAX_MODEL_LEN, 64, torch.device("cpu"), 1000, [MAX_MODEL_LEN], [1])
    for row, (tokens, length) in enumerate(zip(sampled, lengths, strict=True)):
        text = list(range(100 * row, 100 * row + length))
        prompt = length - len(tokens)
        batch.add_request(request_of(chr(ord("a") + row), text[:prompt], text[prompt:]))
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_spec_decode_tokens, scheduled.total_num_scheduled_tokens = drafts, query_tokens
    scheduled.num_spec_tokens_to_schedule = 4
    for name, value in output.items():
        setattr(scheduled, name, value)
    arguments = {"scheduler_output": scheduled, "sampled_token_ids": sampled}
    state = V1StepState(None, arguments, np.flatnonzero([len(tokens) for tokens in sampled]))
    return make_step(batch, state, max_draft_tokens=4, max_model_len=MAX_MODEL_LEN, limits=limits or {})


def test_a_step_of_decoding():
    step = step_of([[4], [105, 106, 107], [214]], [5, 8, 15], {"b": [105, 106, 1], "c": [3, -1]}, 7)
    assert step.request_ids == ["a", "b", "c"] and step.contexts.tolist() == [5, 8, 15]
    assert step.gained.tolist() == [1, 3, 1] and step.roots.tolist() == [4, 107, 214]
    assert step.tokens[step.starts[1] : step.ends[1]].tolist() == [105, 106, 107]
    # What the scheduler pads with is no draft; the last token that may be sampled is at max_model_len - 1.
    assert step.drafted.tolist() == [0, 3, 1] and step.accepted.tolist() == [0, 2, 0]
    assert step.capacities.tolist() == [4, 4, 0]
    assert step.history(1).tolist() == list(range(100, 108))
    assert step.previous == (3, 7) and step.widths is None


def test_a_request_in_the_midst_of_its_prompt_is_left_out():
    step = step_of([[], [105]], [9, 6], {}, 12)
    assert step.request_ids == ["b"] and step.engine.rows.tolist() == [1] and step.roots.tolist() == [105]
    assert step.previous is None, "the step did more than decode"
    draft = DraftBatch.roots(step.roots)
    assert draft_lists(draft, step, 2) == draft_lists(None, step, 2) == [[], []]
    draft = DraftBatch.empty(1, 4)
    draft.tokens[0, 1:], draft.counts[0] = (7, 8, 9), 4
    assert draft_lists(draft, step, 2) == [[], [7, 8, 9]]


def test_a_step_that_is_padded_or_schedules_less():
    step = step_of([[4], [105]], [5, 6], {"b": [3, -1]}, 4, num_spec_tokens_to_schedule=2)
    assert step.previous is None, "its query tokens are not those of the drafts"
    assert step.capacities.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("tokens", "parameters", "expected"),
    [
        ([1, 2, 9, 4, 5, 6], {}, [1, 2, 9]),
        ([1, 2, 3, 4, 5, 6], {}, [1, 2, 3, 4, 5]),
        ([1, 2, 3, 4, 5, 6], {"stop_token_ids": [4]}, [1, 2, 3, 4]),
        ([1, 2, 9, 4, 5, 6], {"ignore_eos": True}, [1, 2, 9, 4, 5]),
        ([1, 2], {}, [1, 2]),
    ],
)
def test_the_output_of_a_request_ends_where_the_scheduler_ends_it(tokens, parameters, expected):
    sampling = request_of("a", [0], tokens, max_tokens=5, **parameters).sampling_params
    assert output_of(sampling, tokens).tolist() == expected


def test_a_request_without_sampling_parameters_keeps_its_output():
    assert output_of(None, [1, 2]).tolist() == [1, 2]


def test_an_output_ends_with_the_token_that_completes_a_stop_string(demo_model):
    """As vLLM's own front end has it, which ends the request some steps later."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    rng = np.random.default_rng(0)
    names = EngineCoreRequest.__struct_fields__
    shortened = 0
    for seed in range(40):
        tokens = rng.integers(10, len(tokenizer), 700).tolist()
        at = int(rng.integers(0, 690))
        stop = tokenizer.decode(tokens[at : at + 3])[1:-1]
        if not stop.strip() or "\ufffd" in stop:
            continue
        behind = int(rng.integers(0, 2) * rng.integers(0, 600))
        sampling = SamplingParams(max_tokens=None, stop=["never there", stop], min_tokens=behind)
        known = {"request_id": "r", "prompt_token_ids": [1], "sampling_params": sampling}
        request = EngineCoreRequest(**dict.fromkeys(names) | known)
        front_end = IncrementalDetokenizer.from_new_request(tokenizer, request)
        taken = 0
        while taken < len(tokens) and front_end.update([tokens[taken]], False) is None:
            taken += 1
        found = output_of(sampling, tokens, tokenizer)
        assert found.tolist() == tokens[: taken + 1], seed
        shortened += len(found) < len(tokens)
        assert output_of(sampling, tokens).tolist() == tokens
    assert shortened > 20


def test_no_stop_string_costs_more_than_a_few_readings_of_the_output(demo_model):
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    class Counting:
        tokenizer = AutoTokenizer.from_pretrained(demo_model)
        decoded = 0

        def decode(self, tokens, skip_special_tokens):
            self.decoded += len(tokens)
            return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    tokens = np.random.default_rng(0).integers(10, len(Counting.tokenizer), 20_000).tolist()
    longest = "x" * 1_000_000
    late = Counting.tokenizer.decode(tokens[-1_000:-20])[1:-1]
    for stops, ends in (([longest], [20_000]), ([longest, late], [19_980, 19_981])):
        tokenizer = Counting()
        assert len(output_of(SamplingParams(max_tokens=None, stop=stops), tokens, tokenizer)) in ends
        assert tokenizer.decoded < 8 * len(tokens)


def test_a_step_of_a_rest_makes_no_call_and_its_tokens_come_with_the_next():
    """Unless it did more than decode one token of each request."""
    from types import SimpleNamespace

    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch

    from freedraft.engines.vllm.v1.runner import MethodProposer
    from freedraft.guarded_method import GuardedMethod
    from freedraft.step import EngineContext
    from sssd_plugin.method import SPEC
    from sssd_plugin.options import SssdOptions

    batch = InputBatch(ROWS, MAX_MODEL_LEN, 64, torch.device("cpu"), 1000, [MAX_MODEL_LEN], [1])
    proposer = MethodProposer.__new__(MethodProposer)
    options, context = SssdOptions(live="off", policy="fixed"), EngineContext(vocab_size=1000, max_draft_tokens=4)
    guarded = proposer.guarded = GuardedMethod(SPEC, options, context)
    proposer.limits = {"a": MAX_MODEL_LEN, "b": MAX_MODEL_LEN}
    guarded.method.controller.rests = lambda: True
    for name, text in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8])):
        batch.add_request(request_of(name, text[:2], text[2:]))
        guarded.begin(name, np.array(text[:-1], np.int32))
    scheduled = SchedulerOutput.make_empty()
    config = SimpleNamespace(num_speculative_tokens=4)
    runner = SimpleNamespace(input_batch=batch, max_model_len=MAX_MODEL_LEN, speculative_config=config)
    arguments = {"scheduler_output": scheduled, "sampled_token_ids": [[5], [8]]}
    scheduled.total_num_scheduled_tokens = 2
    assert proposer.draft(runner, arguments) == [[], []]
    assert guarded.method.drafter.tokens("a").tolist() == [1, 2, 3, 4], "later"
    batch.token_ids_cpu[0, 5], batch.num_tokens_no_spec[0] = 9, 6
    scheduled.total_num_scheduled_tokens = 3  # one of them reads its prompt
    arguments["sampled_token_ids"] = [[9], []]
    proposer.draft(runner, arguments)
    assert guarded.method.drafter.tokens("a").tolist() == [1, 2, 3, 4, 5, 9]
    assert guarded.method.drafter.tokens("b").tolist() == [6, 7, 8]
