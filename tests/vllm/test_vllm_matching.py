"""`Matching` beside plain decoding by vLLM's own sampler, on its CPU path and on the one that GPUs take for seeds."""

from __future__ import annotations

import random

import pytest

VOCABULARY, TOKENS, MAX_DRAFT = 12, 40, 6
TEMPERATURES, TOP_PS, TOP_KS = [0.0, 0.4, 0.8, 1.3, 0.8], [1.0, 1.0, 0.8, 0.9, 1.0], [12, 4, 12, 6, 12]
SEEDED = [1, 2, 3]  # rows; the first is greedy, and the last has no seed


def metadata_of(generators, written):
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinTokensLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata

    rows = len(TEMPERATURES)
    # Half of the vocabulary may not be drawn before each row's `min_tokens`.
    asked = [SamplingParams(min_tokens=5 + 6 * row, max_tokens=99, stop_token_ids=[*range(6)]) for row in range(rows)]
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    processor.update_state(BatchUpdate(rows, [], [(row, asked[row], None, written[row]) for row in range(rows)], []))
    given = {"temperature": torch.tensor(TEMPERATURES), "all_greedy": False, "all_random": False}
    given |= {"top_p": torch.tensor(TOP_PS), "top_k": torch.tensor(TOP_KS, dtype=torch.int32)}
    given |= {"frequency_penalties": torch.full((rows,), 0.3), "presence_penalties": torch.zeros(rows)}
    given |= {"repetition_penalties": torch.full((rows,), 1.1), "no_penalties": False, "output_token_ids": written}
    given |= {"allowed_token_ids_mask": None, "bad_words_token_ids": {1: [[3, 4]], 2: [[5]]}, "max_num_logprobs": 2}
    given |= {"prompt_token_ids": torch.full((rows, 1), VOCABULARY), "generators": generators}
    return SamplingMetadata(**given, logitsprocs=LogitsProcessors([processor]))


@pytest.mark.parametrize("path", ["forward_cpu", "forward_native"])
def test_tokens_logprobs_and_generators_are_plain_decodings(path):
    import torch
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from freedraft.engines.vllm.v1.matching import Matching

    sampler, choose = Sampler(), random.Random(0)
    sampler.topk_topp_sampler.forward = getattr(sampler.topk_topp_sampler, path)
    rows = range(len(TEMPERATURES))
    # The model: what follows depends on the last token.
    model = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2

    def generators():
        return {row: torch.Generator().manual_seed(row) for row in SEEDED}

    own, plain = generators(), [[0] for _ in rows]
    plain_logprobs = [[] for _ in rows]
    states = []
    for _ in range(TOKENS + MAX_DRAFT + 1):
        states.append({row: generator.get_state() for row, generator in own.items()})
        output = sampler(
            logits=model[[tokens[-1] for tokens in plain]],
            sampling_metadata=metadata_of(own, [t[1:] for t in plain]),
        )
        for row in rows:
            plain_logprobs[row].append(output.logprobs_tensors.logprobs[row])
            plain[row].append(int(output.sampled_token_ids[row]))

    own, written, steps, accepted = generators(), [[0] for _ in rows], 0, 0
    logprobs = [[] for _ in rows]
    while min(map(len, written)) <= TOKENS:
        steps += 1
        drafts: list[list[int]] = []
        for row in rows:
            at = len(written[row])
            draft = (plain[row] + [0] * TOKENS)[at : at + choose.randint(0, MAX_DRAFT)]
            if draft and choose.random() < 0.5:
                draft[choose.randrange(len(draft))] = choose.randrange(VOCABULARY)
            drafts.append(draft if at <= TOKENS else [])
        before = [tokens[-1:] + draft for tokens, draft in zip(written, drafts, strict=True)]
        output = Matching(sampler)(
            SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu")),
            None,
            model[[token for tokens in before for token in tokens]],
            metadata_of(own, [tokens[1:] for tokens in written]),
        )
        tokens, said = RejectionSampler.parse_output(
            output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
        )
        for row, gained in enumerate(tokens):
            written[row] += gained
            accepted += len(gained) - 1
            ours = said.slice_request(row, len(gained)).logprobs
            logprobs[row] += [torch.from_numpy(each) for each in ours]
            if row in SEEDED and len(written[row]) <= TOKENS + 1:
                assert torch.equal(own[row].get_state(), states[len(written[row]) - 1][row])
    assert steps < accepted, "drafts were seldom accepted: the test does not test that"
    for row in (0, *SEEDED):
        assert written[row][: TOKENS + 1] == plain[row][: TOKENS + 1]
        assert all(torch.equal(a, b) for a, b in zip(logprobs[row][:TOKENS], plain_logprobs[row], strict=False))
