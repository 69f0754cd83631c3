"""Answers that are sampled together, as in reinforcement learning: what drafts from siblings and from last epoch bring.

    python -m bench.rollouts --model build/model --questions gsm8k.jsonl --answers build/rollouts.json --json OUT

A model answers each prompt several times per epoch, without drafts; the answers are kept in `--answers`. They are then
replayed, token by token and all requests of an epoch together, as `bench/replay.py` does. The weights stay the same
between epochs, which favours last epoch's answers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib import jsonl
from bench.lib.results import write_json
from bench.lib.rivals import LIMITS, Tokens
from freedraft.step import EngineContext, Step
from sssd_plugin.method import SssdMethod
from sssd_plugin.options import SssdOptions

PROMPTS, SAMPLES, TOKENS = 16, 8, 192
EPOCHS = {"1.0": 3, "0.7": 1}  # by temperature
WIDTH, VOCABULARY = 16, 49152  # nodes of a chain, its root included; of the model
Text = tuple[str, Tokens, Tokens]  # name of the prompt, prompt and answer


def sampled(model: Path, questions: Path) -> dict[str, Any]:
    """Token ids of the prompts, and of the answers by temperature, epoch, prompt and sample."""
    from vllm import LLM, SamplingParams

    asked = jsonl.read(questions, 'an object with "question"', lambda _, row: str(row["question"]))[:PROMPTS]
    room: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": PROMPTS * SAMPLES, "gpu_memory_utilization": 0.3}
    room["max_num_batched_tokens"] = 1 << 15  # vLLM cannot go on with a seed behind a part of a prompt
    llm = LLM(str(model), enforce_eager=True, disable_log_stats=True, **room)
    chats: list[Any] = [[{"role": "user", "content": text}] for text in asked for _ in range(SAMPLES)]
    found: dict[str, Any] = {"answers": {}}
    for temperature, epochs in EPOCHS.items():
        of_epochs = found["answers"][temperature] = []
        for epoch in range(epochs):
            parameters = [
                SamplingParams(temperature=float(temperature), max_tokens=TOKENS, seed=epoch * len(chats) + number)
                for number in range(len(chats))
            ]
            outputs = llm.chat(chats, parameters)
            ids = [list(output.outputs[0].token_ids) for output in outputs]
            of_epochs.append([ids[i : i + SAMPLES] for i in range(0, len(ids), SAMPLES)])
            found["prompts"] = [list(output.prompt_token_ids or ()) for output in outputs[::SAMPLES]]
    return found


class Sssd:
    """Drafts as a server does: answers that are running are shown unless `finished`; each prompt has its own salt if
    `salted`."""

    def __init__(self, live: Any = "memory", *, finished: bool = False, salted: bool = False) -> None:
        context = EngineContext(vocab_size=VOCABULARY, max_draft_tokens=WIDTH - 1)
        options = SssdOptions(policy="fixed", shape="chain", live=live, recycle="off")
        self.method, self.salted = SssdMethod(options, context), salted
        if finished:
            self.method._running = None

    def begin(self, name: str, text: Text) -> None:
        self.method.begin(name, text[1], text[0] if self.salted else None, {})

    def draft(self, names: Sequence[str], gained: Sequence[Tokens], known: Sequence[Tokens]) -> list[list[int]]:
        ends = np.cumsum([len(tokens) for tokens in gained])
        fill = np.full(len(names), WIDTH - 1, np.int32)
        contexts = np.array([len(tokens) for tokens in known], np.int32)
        step = Step(
            list(names), np.concatenate(gained), ends - [len(tokens) for tokens in gained], ends, contexts, fill,
            0 * fill, None, lambda row: known[row], fill < 0,
        )  # fmt: skip
        found = self.method.draft(step)
        return [row[1:count].tolist() for row, count in zip(found.tokens, found.counts.tolist(), strict=True)]

    def finish(self, name: str, answer: Tokens) -> None:
        self.method.finish(name, answer)


class Suffix:
    """ArcticInference's suffix decoding, in whose tree running answers are from their first token on."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._depth, factor, probability = LIMITS["suffix"]
        self._how = {"max_spec_tokens": WIDTH - 1, "max_spec_factor": factor, "min_token_prob": probability}
        self._cache = SuffixDecodingCache(max_tree_depth=self._depth, max_cached_requests=-1)

    def begin(self, name: str, text: Text) -> None:
        self._cache.start_request(name, text[1].tolist())

    def draft(self, names: Sequence[str], gained: Sequence[Tokens], known: Sequence[Tokens]) -> list[list[int]]:
        for name, tokens in zip(names, gained, strict=True):
            self._cache.add_active_response(name, tokens.tolist())
        found = (
            self._cache.speculate(name, tokens[-self._depth :].tolist(), **self._how)
            for name, tokens in zip(names, known, strict=True)
        )
        return [list(draft.token_ids) for draft in found]

    def finish(self, name: str, answer: Tokens) -> None:
        self._cache.stop_request(name)


ARMS: dict[str, Callable[[], Any]] = {
    "sssd, nothing learnt": lambda: Sssd("off"),
    "sssd, finished answers": lambda: Sssd(finished=True),
    "sssd": Sssd,
    "sssd, a salt per prompt": lambda: Sssd(salted=True),
    "suffix": Suffix,
}


def together(drafter: Any, name: str, texts: Sequence[Text]) -> tuple[int, int]:
    """Write all texts at the same time; return their tokens and steps, summed over requests. Each text begins with a
    token of the model's own, behind its prefill."""
    written, steps, running = [1] * len(texts), [0] * len(texts), [*range(len(texts))]
    new = [answer[:1] for _, _, answer in texts]
    for i, text in enumerate(texts):
        drafter.begin(f"{name} {i}", text)
    while running:
        known = [np.concatenate([texts[i][1], texts[i][2][: written[i]]]) for i in running]
        drafts = drafter.draft([f"{name} {i}" for i in running], [new[i] for i in running], known)
        for i, draft in zip(running, drafts, strict=True):
            left = texts[i][2][written[i] :].tolist()
            right = next((n for n, pair in enumerate(zip(draft, left, strict=False)) if pair[0] != pair[1]), None)
            right = min(len(draft), len(left)) if right is None else right
            new[i] = texts[i][2][written[i] : written[i] + right + 1]
            written[i], steps[i] = written[i] + len(new[i]), steps[i] + 1
        for i in [i for i in running if written[i] >= len(texts[i][2])]:
            running.remove(i)
            drafter.finish(f"{name} {i}", texts[i][2])
    return sum(len(answer) - 1 for _, _, answer in texts), sum(steps)


def texts_of(name: str, prompt: Tokens, answers: Sequence[Sequence[int]]) -> list[Text]:
    return [(name, prompt, np.array(answer, np.int32)) for answer in answers if len(answer) > 1]


def replayed(found: dict[str, Any]) -> dict[str, Any]:
    """Tokens per step, by arm: of each epoch at once, and of one prompt's samples after those of the others."""
    prompts = [np.array(ids, np.int32) for ids in found["prompts"]]
    table: dict[str, Any] = {"epochs": {}, "samples": {}}
    for arm, make in ARMS.items():
        drafter, table["epochs"][arm], table["samples"][arm] = make(), [], {}
        for temperature, epochs in found["answers"].items():
            alone, counted = make(), []
            for i, answers in enumerate(epochs[0]):
                counted.append(together(alone, f"{temperature} {i}", texts_of(str(i), prompts[i], answers)))
            table["samples"][arm][temperature] = per_step(counted)
        for number, epoch in enumerate(found["answers"]["1.0"]):
            texts = [text for i, answers in enumerate(epoch) for text in texts_of(str(i), prompts[i], answers)]
            table["epochs"][arm].append(per_step([together(drafter, str(number), texts)]))
        print(arm, table["epochs"][arm], table["samples"][arm], flush=True)
    return table


def per_step(counted: Sequence[tuple[int, int]]) -> float:
    tokens, steps = np.sum(counted, 0)
    return round(float(tokens / steps), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.answers.exists():
        arguments.answers.write_text(json.dumps(sampled(arguments.model, arguments.questions)))
    sys.path.append("build/arctic")  # built by bench/arctic.sh
    found = json.loads(arguments.answers.read_text())
    lengths = [len(answer) for epoch in found["answers"]["1.0"] for answers in epoch for answer in answers]
    figures = {"prompts": PROMPTS, "samples": SAMPLES, "answer_tokens": round(sum(lengths) / len(lengths), 1)}
    write_json(arguments.json, figures | replayed(found))


if __name__ == "__main__":
    main()
