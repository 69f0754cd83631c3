"""Where a request's output ends, by what it asked for. No engine needed."""

import numpy as np
import pytest

from freedraft.engines.vllm.outputs import trimmed_output


def request_of(request_id, prompt, output, **parameters):
    """vLLM's CachedRequestState, with the stop tokens of a model whose end is token 9."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    sampling = SamplingParams(**parameters)
    sampling.update_from_generation_config({}, eos_token_id=9)
    return CachedRequestState(request_id, prompt, [], sampling, None, ([0],), 0, output)


@pytest.mark.parametrize(
    ("tokens", "parameters", "expected"),
    [
        ([1, 2, 9, 4, 5, 6], {}, [1, 2, 9]),
        ([1, 2, 3, 4, 5, 6], {}, [1, 2, 3, 4, 5]),
        ([1, 2, 3, 4, 5, 6], {"stop_token_ids": [4]}, [1, 2, 3, 4]),
        ([1, 2, 9, 4, 5, 6], {"ignore_eos": True}, [1, 2, 9, 4, 5]),
        ([1, 2, 9, 4, 5, 6], {"ignore_eos": True, "stop_token_ids": [4]}, [1, 2, 9, 4]),
        ([1, 2], {}, [1, 2]),
    ],
)
def test_the_output_of_a_request_ends_where_the_scheduler_ends_it(tokens, parameters, expected):
    sampling = request_of("a", [0], tokens, max_tokens=5, **parameters).sampling_params
    assert trimmed_output(sampling, tokens).tolist() == expected


def test_a_request_without_sampling_parameters_keeps_its_output():
    assert trimmed_output(None, [1, 2]).tolist() == [1, 2]


def test_an_output_ends_where_the_scheduler_detects_a_repetition():
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.request import Request

    detected, shortened = RepetitionDetectionParams(max_pattern_size=3, min_count=3), 0
    for seed, tokens in enumerate(np.random.default_rng(0).integers(0, 4, (40, 60)).tolist()):
        parameters = SamplingParams(max_tokens=50, min_tokens=10 * (seed % 3), repetition_detection=detected)
        request = Request("r", [5], parameters, None)
        for token in tokens:
            request.append_output_token_ids(token)
            if check_stop(request, 999):
                break
        assert trimmed_output(parameters, tokens).tolist() == [*request.output_token_ids], seed
        shortened += request.num_output_tokens < 50
    assert shortened > 20


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
        found = trimmed_output(sampling, tokens, tokenizer)
        assert found.tolist() == tokens[: taken + 1], seed
        shortened += len(found) < len(tokens)
        assert trimmed_output(sampling, tokens).tolist() == tokens
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
        assert len(trimmed_output(SamplingParams(max_tokens=None, stop=stops), tokens, tokenizer)) in ends
        assert tokenizer.decoded < 8 * len(tokens)
