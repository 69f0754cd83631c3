"""Recorded answers forced on an engine: at every row of logits, the recorded token gets a logit above all others.

A row's token is found by its request and its position, for draft tokens as for roots; in a tree the position is the
depth. The small kernels that do it run in every arm, plain too. Drafts of vLLM's EAGLE become recorded tokens and wrong
ones, so that random weights are right as often as is asked. The hooks are this benchmark's: vLLM's are set in this
process, SGLang's by a plugin in the process of its scheduler. Requests are named "NUMBER-...", by their text.
"""

import asyncio
import functools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

# variable with the folder of these files
FOLDER, TEXTS, HEAD, LOG = "FORCED_FOLDER", "texts.npy", "head.npy", "steps.jsonl"
HIGH, SLOTS, BEYOND = 1e4, 8192, 256  # logit; requests at most; positions behind the longest text that have rows
Text = tuple[list[int], list[int]]  # token ids of a prompt and of its answer


def save_texts(folder: Path, texts: Sequence[Text], head: Sequence[float] = ()) -> None:
    """Write the token ids of texts, by the position before each token, and how many drafted there by a head are right.
    head: the share of positions at which each of its tokens is accepted."""
    table = np.zeros((len(texts), max(len(p) + len(a) for p, a in texts) + BEYOND), np.int64)
    for row, (prompt, answer) in zip(table, texts, strict=True):
        row[: len(prompt) + len(answer) - 1] = [*prompt[1:], *answer]
    np.save(folder / TEXTS, table)
    np.save(folder / HEAD, (np.random.default_rng(0).random((*table.shape, 1)) < np.array(head)).sum(2))


class Forcing:
    """Forces texts on an engine, and logs its steps: time, requests, those of them that decode, rows of logits.

    Attributes:
        on: whether answers are forced. scores: whether the log-probability of each forced token is logged, too.
        which: int64 [slots], number of the text of each slot's request.
    """

    def __init__(self, folder: Path) -> None:
        self.on, self.scores, self._log = True, False, (folder / LOG).open("a", buffering=1)
        self.which = torch.zeros(SLOTS, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Take the texts that were saved last."""
        tables = (torch.from_numpy(np.load(folder / name)).to(self.which.device) for name in (TEXTS, HEAD))
        self._texts, self._right = tables

    def begin(self, slot: int, request: str) -> None:
        """Note which text a request has. An engine's own requests, as for its warm-up, have other names."""
        if self.on and (number := request.partition("-")[0]).isdigit():
            self.which[slot] = int(number)

    def force(self, logits: Any, texts: Any, at: Any, inputs: Any, counts: Sequence[int]) -> None:
        """Set the logits of next tokens, float [R, V]. texts: int64 [R], number of each row's text; at, inputs: int
        [R], position and input token (None: the text's own); counts: requests, and those of them that decode."""
        if not self.on:
            return
        tokens = self._texts[texts, at][:, None]
        if self.scores:
            scores = torch.log_softmax(logits.float(), -1).gather(1, tokens)[:, 0]
            right = slice(None) if inputs is None else self._texts[texts, (at - 1).clamp(min=0)] == inputs
            rows = zip(*(x[right].tolist() for x in (texts, at, scores)), strict=True)
            print(json.dumps({"scores": list(rows)}), file=self._log)
        logits.scatter_(1, tokens, HIGH)
        print(json.dumps({"step": [time.perf_counter(), *counts, len(logits)]}), file=self._log)

    def draft(self, drafts: Any, slots: Any, lengths: Any) -> None:
        """Replace a head's drafts, int [B, K]. slots, lengths: int [B], of the requests, and tokens that they have."""
        if not self.on:
            return
        texts, last = self.which[slots.long()], lengths.long() - 1
        nodes = torch.arange(drafts.shape[1], device=drafts.device)
        tokens = self._texts[texts[:, None], last[:, None] + nodes]
        drafts.copy_(torch.where(nodes < self._right[texts, last][:, None], tokens, (tokens - 1).abs()))


def logged(folder: Path, kind: str) -> list[list[Any]]:
    """Return what is logged of steps, and empty the log. kind: "step" (time, requests, those that decode, rows) or
    "scores"."""
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    os.truncate(folder / LOG, 0)
    return [line[kind] for line in lines if kind in line]


def last_scores(scores: Sequence[Sequence[tuple[int, int, float]]]) -> dict[tuple[int, int], float]:
    """Return the log-probabilities by number of the text and position.

    The last step that has a row for a position is the one that accepted it. If it has several such rows with the right
    input token, which differ in the path before it, none is returned."""
    found: dict[tuple[int, int], float] = {}
    for line in scores:
        rows = Counter((text, at) for text, at, _ in line)
        found |= {(text, at): score if rows[text, at] == 1 else np.nan for text, at, score in line}
    return {key: score for key, score in found.items() if not np.isnan(score)}


def before(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call` have the arguments of a method first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (call(*args, **kwargs), original(*args, **kwargs))[1])


def hook_vllm(llm: Any, folder: Path) -> Forcing:
    """Force texts on vLLM's model runner in this process, V2 or V1. Called after plugins have set their hooks: then
    positions of a tree are still depths here."""
    forcing = Forcing(folder)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    if not hasattr(runner, "req_states"):
        before(type(runner), "_sample", functools.partial(_force_v1, forcing))
        return forcing
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    def begin(runner: Any, scheduled: Any) -> None:
        for request in scheduled.scheduled_new_reqs:
            forcing.begin(runner.req_states.req_id_to_index[request.req_id], request.req_id)

    def force(sampler: Any, logits: torch.Tensor, batch: Any, *args: Any) -> None:
        at, decoding = batch.logits_indices, ~batch.is_prefilling_np[: batch.num_reqs]
        texts, counts = forcing.which[batch.expanded_idx_mapping], (batch.num_reqs, int(decoding.sum()))
        forcing.force(logits, texts, batch.positions[at], batch.input_ids[at], counts)

    if getattr(llm.llm_engine.vllm_config.speculative_config, "method", None) == "eagle":
        _hook_head(forcing, runner)
    before(type(runner), "update_requests", begin)  # called once new requests have slots
    for owner in (Sampler, RejectionSampler):
        before(owner, "__call__", force)
    return forcing


def _hook_head(forcing: Forcing, runner: Any) -> None:
    from freedraft.engines.vllm.v2.install import SPECULATOR

    ours = getattr(runner.speculator, SPECULATOR, None)  # with n-grams on top, which has the head's own `propose`
    owner, name = (runner.speculator, "propose") if ours is None else (ours, "_propose")
    original = getattr(owner, name)

    def propose(batch: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any) -> Any:
        drafts = original(batch, *args, num_speculative_tokens=num_speculative_tokens, **kwargs)
        slots = batch.idx_mapping[: len(drafts)]
        forcing.draft(drafts[:, :num_speculative_tokens], slots, runner.req_states.total_len.gpu[slots.long()])
        return drafts

    setattr(owner, name, propose)


def _force_v1(forcing: Forcing, runner: Any, logits: torch.Tensor, drafts: Any) -> None:
    batch, n = runner.input_batch, runner.input_batch.num_reqs
    at, rows = runner.query_start_loc.gpu[1 : n + 1] - 1, [1] * n
    if drafts is not None:
        at, rows = drafts.logits_indices, [1 + drafted for drafted in drafts.num_draft_tokens]
    numbers = np.repeat([int(request.partition("-")[0]) for request in batch.req_ids[:n]], rows)
    decoding = int((batch.num_computed_tokens_cpu[:n] >= batch.num_prompt_tokens[:n]).sum())
    texts = torch.from_numpy(numbers).to(logits.device)
    forcing.force(logits, texts, runner.positions[at], runner.input_ids.gpu[at], (n, decoding))


def hook_sglang() -> None:
    """Entry point of `sglang.srt.plugins`, called in SGLang's processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    @functools.cache
    def forcing() -> Forcing:
        return Forcing(Path(os.environ[FOLDER]))

    def begin(result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        for request, slot in zip(batch.reqs, batch.req_pool_indices_cpu.tolist(), strict=True):
            forcing().begin(slot, request.rid)

    def force(result: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        logits, mode, n = result.logits_output.next_token_logits, batch.forward_mode, len(batch.req_pool_indices)
        if logits is None or mode.is_idle() or not n:
            return
        texts = forcing().which[batch.req_pool_indices]
        if mode.is_decode() or mode.is_target_verify():
            texts = texts.repeat_interleave(len(logits) // n)
            forcing().force(logits, texts, batch.positions, batch.input_ids, (n, n))
        else:
            forcing().force(logits, texts, batch.seq_lens - 1, None, (n, 0))

    HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend", begin)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", force)


@dataclass
class Answer:
    """An answer to a text, and when how many tokens of it had come."""

    text: int
    sent: float
    tokens: list[int] = field(default_factory=list)
    came: list[tuple[float, int]] = field(default_factory=list)
    passes: int | None = None  # of the model for it, after its prompt; None: one for each arrival after the first

    def note(self, tokens: Sequence[int]) -> None:
        if len(tokens) > len(self.tokens):
            self.tokens = list(tokens)
            self.came.append((time.perf_counter(), len(tokens)))


class Vllm:
    """vLLM with random weights of the configuration in the folder of the texts, or with those of a model."""

    def __init__(self, folder: Path, texts: Sequence[Text], *, model: Path | None = None, **options: Any) -> None:
        from vllm import LLM

        options |= {"seed": 0, "skip_tokenizer_init": True, "disable_log_stats": True, "enable_prefix_caching": False}
        self.llm = LLM(str(model or folder), load_format="auto" if model else "dummy", **options)
        self.texts, self._sent, self.forcing = texts, 0, hook_vllm(self.llm, folder)

    def answers(self, numbers: Sequence[int], at_once: int, **sampling: Any) -> list[Answer]:
        """Send texts, the next one when an answer ends. sampling: parameters; the seed is the number. None: greedy."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine: Any = self.llm.llm_engine
        waiting, found, running = list(numbers)[::-1], list[Answer](), dict[str, Answer]()
        while waiting or running:
            while waiting and len(running) < at_once:
                number, self._sent = waiting.pop(), self._sent + 1
                prompt, answer = self.texts[number]
                how: dict[str, Any] = {"max_tokens": len(answer), "ignore_eos": True, "detokenize": False}
                how |= sampling | {"seed": number} if sampling else {"temperature": 0.0}
                found.append(Answer(number, time.perf_counter()))
                running[name := f"{number}-{self._sent}"] = found[-1]
                engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), SamplingParams(**how))
            for output in engine.step():
                running[output.request_id].note(output.outputs[0].token_ids)
                if output.finished:
                    del running[output.request_id]
        return found


class Sglang:
    """SGLang with random weights. The variable `FOLDER` tells its processes the folder."""

    def __init__(self, folder: Path, texts: Sequence[Text], **options: Any) -> None:
        import sglang

        options |= {"load_format": "dummy", "skip_tokenizer_init": True, "disable_radix_cache": True}
        self.engine = sglang.Engine(model_path=str(folder), random_seed=0, log_level="warning", **options)
        self.texts, self._sent = texts, 0

    def answers(self, numbers: Sequence[int], at_once: int) -> list[Answer]:
        """See `Vllm.answers`."""
        found: list[Answer] = []

        async def ask(waiting: Iterator[int]) -> None:
            for number in waiting:
                self._sent += 1
                prompt, recorded = self.texts[number]
                found.append(answer := Answer(number, time.perf_counter()))
                sampling = {"temperature": 0.0, "max_new_tokens": len(recorded), "ignore_eos": True}
                of_one = {"input_ids": prompt, "sampling_params": sampling, "rid": f"{number}-{self._sent}"}
                async for chunk in await self.engine.async_generate(**of_one, stream=True):
                    answer.note(chunk["output_ids"])
                answer.passes = chunk["meta_info"].get("spec_verify_ct", len(recorded) - 1)

        async def ask_all(waiting: Iterator[int]) -> None:
            await asyncio.gather(*(ask(waiting) for _ in range(at_once)))

        self.engine.loop.run_until_complete(ask_all(iter(numbers)))
        return found


def check(answers: Sequence[Answer], texts: Sequence[Text]) -> None:
    """Raises AssertionError, one line with the first difference: an answer is not the recorded one."""
    for answer in answers:
        pairs = enumerate(zip_longest(answer.tokens, texts[answer.text][1]))
        if (wrong := next(((at, *pair) for at, pair in pairs if pair[0] != pair[1]), None)) is not None:
            raise AssertionError("text {}, token {}: {}, {} is recorded".format(answer.text, *wrong))


def figures(answers: Sequence[Answer], at_once: int, steps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the speed of answers and steps. steps: as `logged`.

    Tokens per second are those that came while `at_once` requests were in flight, from the first that took a freed
    place. The time of a step is the median of those in which, as in the one before, all these decoded."""
    begin, end = answers[at_once].sent, answers[-1].sent
    came = [(at, n - m) for a in answers for (_, m), (at, n) in pairwise([(a.sent, 0), *a.came])]
    times = [1e3 * (now[0] - last[0]) for last, now in pairwise(steps) if {*last[1:3], *now[1:3]} == {at_once}]
    decoded, drafted = sum(len(a.tokens) - 1 for a in answers), sum(rows - n for _, n, _, rows in steps)
    passes = sum(len(a.came) - 1 if a.passes is None else a.passes for a in answers)
    waits = [(a.came[-1][0] - a.came[0][0]) / (len(a.tokens) - a.came[0][1]) for a in answers if len(a.came) > 1]
    found: dict[str, Any] = {"batch": at_once, "requests": len(answers), "steps": len(times), "drafted": drafted}
    found["tokens_per_s"] = sum(n for at, n in came if begin < at <= end) / (end - begin)
    found |= {"step_ms": median(times) if times else None, "tpot_ms": 1e3 * mean(waits)}
    return found | {"tokens_per_step": decoded / passes, "accepted": (decoded - passes) / drafted if drafted else None}
