"""Load on a server by `vllm bench serve`: a fixed number of requests at a time, greedy, of given lengths."""

import asyncio
import hashlib
import io
import urllib.request
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

CHAT = "/v1/chat/completions"
Request = tuple[list[dict[str, str]], int]
"""Messages of "role" and "content", and how many tokens to answer with."""


@dataclass(frozen=True)
class Outcome:
    """The results of some requests."""

    seconds: float  # under full load, see `full_load`
    left: float  # tokens that left in it
    tokens: list[int]  # that each request generated
    latency_s: list[float]  # of each request, nan where it failed
    ttft_s: list[float]
    answers: list[str | None]  # fingerprint of each, special tokens included; None where it failed
    drafted: int | None  # tokens of all requests; None where the server does not say (SGLang)
    accepted: int | None
    errors: list[str]  # last line of each different one


def ask(url: str, model: str, asked: Sequence[Request], concurrency: int, template: dict[str, Any] | None) -> Outcome:
    """Put requests to the server in their order, with arguments of the model's chat template; wait for all answers. The
    end of a sequence is ignored, so that arms do equal work. Nothing else is sent: arms learn from traffic."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    requests = [SampleRequest(prompt=chat, prompt_len=0, expected_output_len=length) for chat, length in asked]
    body = {"temperature": 0.0, "skip_special_tokens": False} | ({"chat_template_kwargs": template} if template else {})
    how: dict[str, Any] = {"endpoint_type": "openai-chat", "api_url": url + CHAT, "base_url": url, "extra_body": body}
    how |= {"model_id": model, "model_name": model, "tokenizer": None, "lora_modules": None, "extra_headers": None}
    how |= {"ignore_eos": True, "logprobs": None, "num_warmups": 0, "ready_check_timeout_sec": 0}
    how |= {"request_rate": float("inf"), "burstiness": 1.0, "max_concurrency": concurrency}
    how |= {"disable_tqdm": True, "profile": False, "goodput_config_dict": {}}
    how |= {"selected_percentile_metrics": [], "selected_percentiles": []}
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        call = benchmark(task_type=TaskType.GENERATION, input_requests=requests, **how)
        verifications = sglang_verifications(url)
        result: dict[str, Any] = asyncio.run(call)
    lengths, nan, accepted = result["output_lens"], float("nan"), result.get("spec_decode_accepted_tokens")
    # A stream that breaks off in the middle is no error to vLLM's client.
    failed = [bool(e) or n < most for e, n, (_, most) in zip(result["errors"], lengths, asked, strict=True)]
    short = "an answer is too short"

    def of_each(name: str, otherwise: Any) -> list[Any]:
        return [otherwise if bad else value for bad, value in zip(failed, result[name], strict=True)]

    if verifications is not None:  # each, and each prompt, brought a token of the model's own
        passes = (sglang_verifications(url) or 0) - verifications + len(failed) - sum(failed)
        accepted = sum(lengths) - passes
    said = [text and hashlib.sha256(text.encode()).hexdigest()[:12] for text in of_each("generated_texts", None)]
    errors = sorted({(error.strip() or short).splitlines()[-1] for error in compress(result["errors"], failed)})
    times, drafted = (of_each("latencies", nan), of_each("ttfts", nan)), result.get("spec_decode_draft_tokens")
    return Outcome(*full_load(result, concurrency), list(lengths), *times, said, drafted, accepted, errors)


def full_load(result: dict[str, Any], concurrency: int) -> tuple[float, float]:
    """Seconds in which `concurrency` requests were under way all the time, and the tokens that left in them: from the
    request that took the first free place to the last one that was sent, so that as many prompts as answers count. The
    chunks of an answer have equally many of its tokens, but for the first one, which only names the role."""
    each = zip(*(result[name] for name in ("start_times", "ttfts", "itls")), strict=True)
    times = [start + ttft + np.cumsum(gaps or [0.0]) for start, ttft, gaps in each]
    begin, end = sorted(result["start_times"])[min(concurrency, len(times) - 1)], max(result["start_times"])
    shares = [float(np.mean((begin < at) & (at <= end))) for at in times]
    return float(end - begin), float(np.dot(shares, result["output_lens"]))


def sglang_verifications(url: str) -> int | None:
    """How often requests that have ended were verified, by the metrics of an SGLang; None for other servers, and where
    nothing was verified so far."""
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
    except (OSError, ValueError):
        return None
    counts = [s.value for f in families for s in f.samples if s.name == "sglang:spec_verify_calls_total"]
    return int(sum(counts)) if counts else None
