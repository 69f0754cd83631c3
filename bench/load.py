"""Load on a server from the generator of `vllm bench serve`: so many requests at a time, greedy, of fixed length."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Outcome:
    """What became of some requests.

    Attributes:
        seconds: from the first request to the last answer.
        tokens: generated, of every request. latency_s, ttft_s: of every request; nan where it failed.
        answers: fingerprint of every answer, special tokens included; None where it failed.
        drafted, accepted: tokens, over all; None when the server does not tell.
        errors: of requests that failed, the last line of each.
    """

    seconds: float
    tokens: list[int]
    latency_s: list[float]
    ttft_s: list[float]
    answers: list[str | None]
    drafted: int | None
    accepted: int | None
    errors: list[str]


def ask(url: str, model: str, texts: Sequence[str], concurrency: int, max_tokens: int) -> Outcome:
    """Put the texts to the server as chats and wait for all answers.

    The end of a sequence is ignored, so that every answer has `max_tokens` tokens and arms do equal work. Nothing else
    is sent: a trial request would teach the arms that learn from traffic an answer.
    """
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    requests = [SampleRequest(prompt=text, prompt_len=0, expected_output_len=max_tokens) for text in texts]
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        result: dict[str, Any] = asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type="openai-chat",
                api_url=url + CHAT,
                base_url=url,
                model_id=model,
                model_name=model,
                tokenizer=None,
                input_requests=requests,
                logprobs=None,
                request_rate=float("inf"),
                burstiness=1.0,
                disable_tqdm=True,
                num_warmups=0,
                profile=False,
                selected_percentile_metrics=[],
                selected_percentiles=[],
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=concurrency,
                lora_modules=None,
                extra_headers=None,
                extra_body={"temperature": 0.0, "skip_special_tokens": False},
                ready_check_timeout_sec=0,
            )
        )
    failed = [bool(error) or not tokens for error, tokens in zip(result["errors"], result["output_lens"], strict=True)]
    nan = float("nan")
    return Outcome(
        seconds=result["duration"],
        tokens=list(result["output_lens"]),
        latency_s=[nan if bad else x for bad, x in zip(failed, result["latencies"], strict=True)],
        ttft_s=[nan if bad else x for bad, x in zip(failed, result["ttfts"], strict=True)],
        answers=[
            None if bad else hashlib.sha256(text.encode()).hexdigest()[:12]
            for bad, text in zip(failed, result["generated_texts"], strict=True)
        ],
        drafted=result.get("spec_decode_draft_tokens"),
        accepted=result.get("spec_decode_accepted_tokens"),
        errors=sorted({(error.strip() or "no answer").splitlines()[-1] for error in _bad(result["errors"], failed)}),
    )


def _bad(errors: Sequence[str], failed: Sequence[bool]) -> list[str]:
    return [error for error, bad in zip(errors, failed, strict=True) if bad]
