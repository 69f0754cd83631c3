"""Verification on model runner V1: the engine's sampler draws every token, and a draft is accepted where it is equal.

At each position of a request's draft, vLLM's `Sampler` is called as in plain decoding: with the same logits,
parameters, earlier tokens and random generator. While it draws the draft's token, the next position is sampled; another
token ends the request's step. For greedy batches without other influences one call samples all positions. So output
does not depend on drafts: with a seed it is plain decoding's, and the request's generator draws once per accepted
token.
"""

from copy import copy
from dataclasses import replace
from typing import Any


class Matching:
    """Replaces vLLM's RejectionSampler, with the same arguments."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, metadata: Any, draft_probs: None, logits: Any, sampling: Any) -> Any:
        """Return vLLM's SamplerOutput with the accepted tokens of each request, int32 [B, positions drawn] padded with
        -1, and their logprobs if the batch requests them.

        Args:
            metadata: SpecDecodeMetadata, the draft tokens of B requests.
            logits: [draft tokens + B, vocabulary], request by request: after its last token and each draft token.
            sampling: SamplingMetadata of the B requests.
        """
        import torch
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        drafts, counts = metadata.draft_token_ids.tolist(), metadata.num_draft_tokens
        if _by_logits_alone(sampling):
            return SamplerOutput(self._greedy(logits, sampling, drafts, counts), None)
        last = torch.tensor(counts, device=logits.device)
        first = torch.cumsum(last + 1, 0) - last - 1
        starts = (first - torch.arange(len(counts), device=first.device)).tolist()
        written = [list(tokens) for tokens in sampling.output_token_ids]  # empty where no parameter needs them
        alive = list(range(len(counts)))
        gained, logprobs = [], []
        for position in range(metadata.max_spec_len + 1):
            # All rows: parameters and logits processors are per row. Draws after a row's end are not used.
            drawn = self._sampler(
                logits=logits[first + last.clamp(max=position)],
                sampling_metadata=replace(
                    sampling,
                    generators={row: sampling.generators[row] for row in alive if row in sampling.generators},
                    output_token_ids=written,
                    spec_token_ids=None,
                    logitsprocs=_ahead(sampling.logitsprocs, position),
                ),
                predict_bonus_token=True,
            )
            tokens = drawn.sampled_token_ids[:, 0].tolist()
            gained.append([-1] * len(counts))
            logprobs.append(drawn.logprobs_tensors)
            for row in alive:
                gained[-1][row] = tokens[row]
            alive = [row for row in alive if position < counts[row] and tokens[row] == drafts[starts[row] + position]]
            if not alive:
                break
            if written:
                for row in alive:
                    written[row].append(tokens[row])
        ids = torch.tensor(gained, dtype=torch.int32, device=logits.device).T.contiguous()
        if logprobs[0] is None:
            return SamplerOutput(ids, None)
        # Ids, logprobs and ranks, position by position within each request.
        parts = zip(*(each[:3] for each in logprobs), strict=True)
        made: Any = (torch.stack(part, 1).flatten(0, 1) for part in parts)
        return SamplerOutput(ids, LogprobsTensors(*made))

    def _greedy(self, logits: Any, sampling: Any, drafts: list[int], counts: list[int]) -> Any:
        """Return the accepted tokens, int32 [B, most draft tokens + 1]."""
        import torch

        output = self._sampler(logits=logits, sampling_metadata=sampling, predict_bonus_token=True)
        drawn = output.sampled_token_ids[:, 0].tolist()
        gained = [[-1] * (max(counts) + 1) for _ in counts]
        row = 0
        for request, count in enumerate(counts):
            start = row - request  # of its drafts
            for position in range(count + 1):
                gained[request][position] = drawn[row + position]
                if position < count and drawn[row + position] != drafts[start + position]:
                    break
            row += count + 1
        return torch.tensor(gained, dtype=torch.int32, device=logits.device)


def _by_logits_alone(sampling: Any) -> bool:
    """Whether all requests are greedy, without parameters that depend on the row or on earlier tokens."""
    from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    def idle(processor: Any) -> bool:
        if isinstance(processor, MinTokensLogitsProcessor):
            return not processor.min_toks
        return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases

    asked = (sampling.output_token_ids, sampling.bad_words_token_ids, getattr(sampling, "logprob_token_ids", None))
    free = sampling.allowed_token_ids_mask is None and sampling.max_num_logprobs is None and not any(asked)
    greedy = sampling.all_greedy and sampling.no_penalties
    return greedy and free and all(map(idle, sampling.logitsprocs.non_argmax_invariant))


def _ahead(processors: Any, tokens: int) -> Any:
    """vLLM's LogitsProcessors after `tokens` more tokens of each request; only `min_tokens` depends on their number."""
    from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor

    def later(processor: Any) -> Any:
        if not isinstance(processor, MinTokensLogitsProcessor) or not processor.min_toks:
            return processor
        made: Any = copy(processor)
        made.min_toks = {row: (least - tokens, *rest) for row, (least, *rest) in processor.min_toks.items()}
        made.update_state(None)
        return made

    return LogitsProcessors(map(later, processors.all)) if tokens else processors
