"""Windowed drafts at long contexts: what a window costs in acceptance, and what `window: auto` brings over plain.

    python bench/windowed.py acceptance --model build/model --json bench/results/windowed-acceptance.json
    python bench/windowed.py sglang --model build/model --cells 1:3000 4:3000 2:7000 --json ...
    python bench/windowed.py vllm --model build/model --cells 1:3000 4:3000 --json ...

Prompts are documents and modules of Python's own library, cut to the context, with a question behind them.

- acceptance, without an engine: how often a pass over 16 sinks and the newest tokens says what the whole model says.
- sglang, vllm (CPU): drafting is off and on in turns of 4 steps within the same requests. The ratio of speeds of each
  turn to those beside it, and what the measured times allow: the best (1 + a + ... + a^d) / (d c + v(d)) over windows
  and lengths d; 1 where nothing beats plain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.engine import Call, Run, Turns, engine_of
from bench.lib.machine import cores, cpu, rounded, versions
from bench.lib.results import write_json
from bench.lib.servers import in_process_environment

SOURCES = (
    ("pydoc_data/topics.py", "Which statements of Python does this text describe? Explain the first one."),
    ("doctest.py", "Explain what this module is for and how its parts work together."),
    ("turtle.py", "List the classes of this module and what each is for."),
    ("email/_header_value_parser.py", "Summarise how this code parses a header."),
    ("asyncio/base_events.py", "Which methods does the main class have, and what do they do?"),
    ("_pydecimal.py", "Write a short introduction to this module for a user."),
)
WINDOWS = (128, 256, 512, 1024, 2048)
SINKS = 16
LENGTHS = (1, 2, 4, 6)
FEWEST_ROUNDS, FEWEST_DRAFTS = 3, 10
"""From how many of a window it is judged: rounds for its times, drafts of a request for what is accepted."""
TURN, SETTLE = 4, 2
"""Steps of a turn; answers before the clock starts."""
LONGEST, WINDOW = 5, "auto"
"""Of drafts in engines."""


def long_prompts(model: Path, context: int, count: int) -> list[list[int]]:
    """Token ids of `count` prompts of `context` tokens: a text, and a question behind it."""
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(model), []
    for i in range(count):
        name, question = SOURCES[i % len(SOURCES)]
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8", errors="replace")
        chat = [{"role": "user", "content": f"TEXT\n\n{question}"}]
        templated = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        ends = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in templated.split("TEXT")]
        ids = tokenizer(text[: 12 * context], add_special_tokens=False)["input_ids"]
        prompts.append([*ends[0], *ids[: context - len(ends[0]) - len(ends[1])], *ends[1]])
    return prompts


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    rows = []
    for context in args.contexts:
        right: dict[int, list[list[bool]]] = {window: [] for window in WINDOWS}
        for prompt in long_prompts(args.model, context, len(SOURCES)):
            with torch.inference_mode():
                out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
                whole, answer = out.past_key_values, [int(out.logits[0, -1].argmax())]
                for _ in range(args.tokens):
                    out = model(torch.tensor([answer[-1:]]), past_key_values=whole, use_cache=True)
                    answer.append(int(out.logits[0, -1].argmax()))
                n, keys = len(prompt), torch.arange(len(prompt) + args.tokens)
                place = torch.arange(n, n + args.tokens)[:, None]
                for window in WINDOWS:
                    cache = DynamicCache()
                    for i, layer in enumerate(whole.layers):
                        cache.update(layer.keys[:, :, :n].clone(), layer.values[:, :, :n].clone(), i)
                    seen = (keys <= place) & ((keys < SINKS) | (keys > place - window + SINKS))
                    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
                    logits = model(
                        torch.tensor([answer[:-1]]), past_key_values=cache, attention_mask=mask, position_ids=place.T
                    ).logits[0]
                    drafted = logits.argmax(-1).tolist()
                    right[window].append([a == b for a, b in zip(drafted, answer[1:], strict=True)])
        for window, documents in right.items():
            row: dict[str, Any] = {"context": context, "window": window, "documents": len(documents)}
            row["by_document"] = [sum(one) / len(one) for one in documents]
            for length in LENGTHS:
                places = [one[i : i + length] for one in documents for i in range(len(one) - length + 1)]
                row[f"next {length}"] = sum(map(all, places)) / len(places)
            rows.append(row)
            print(row, flush=True)
    return {"tokens": args.tokens, "rows": rows}


Steps = list[tuple[Call, Call]]
"""Steps of one run, each as the calls of the drafter before and after it, which run from one to the other."""


def in_turns(args: argparse.Namespace, cells: Iterable[tuple[int, int]], engine: Any) -> Iterator[dict[str, Any]]:
    """A row for each cell."""
    for batch, context in cells:
        generate: Callable[..., Run] = partial(engine.generate, long_prompts(args.model, context, batch), args.tokens)
        # The controller learns what steps and passes take, and what is accepted.
        runs = [generate(drafting=on) for on in (False, *[True] * SETTLE)]
        before, began = len(runs), time.perf_counter()
        while len(runs) < before + args.rounds or time.perf_counter() < began + args.seconds:
            runs.append(generate(drafting=Turns(TURN)))
        steps = [[(a, b) for a, b in pairwise(run.calls) if a.batch == b.batch == batch] for run in runs]
        row = {"context": context, "batch": batch} | figures(steps[before:]) | allowed(steps)
        row["same"] = all(run.tokens == runs[0].tokens for run in runs)
        print(json.dumps(rounded(row)), flush=True)
        yield row


def figures(answers: Sequence[Steps]) -> dict[str, Any]:
    """Of runs in turns."""
    ratios, measured = [], [step for steps in answers for step in steps]
    for steps in answers:
        turns = [list(turn) for _, turn in groupby(steps, lambda step: step[0].on)]
        speeds = [sum(sum(b.gained) for _, b in turn) / sum(b.began - a.began for a, b in turn) for turn in turns]
        for i, turn in enumerate(turns):
            beside = [speeds[j] for j in (i - 1, i + 1) if 0 <= j < len(turns)]
            if turn[0][0].on and beside and len(turn) >= TURN:
                ratios.append(speeds[i] / statistics.mean(beside))
    low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    drafting = [a for a, _ in measured if a.on]
    found = {"drafting_share": sum(any(a.drafted) for a in drafting) / len(drafting), "turns": len(ratios)}
    found["plain_ms"] = 1e3 * statistics.median(b.began - a.began for a, b in measured if not a.on)
    return found | {"ratio": ratio, "ratio_quartiles": [low, high]}


def allowed(answers: Sequence[Steps]) -> dict[str, Any]:
    """What the times of all rounds allow, in plain steps of the same answers."""
    rounds = []
    for of_answer in answers:
        plain = [b.began - a.began for a, b in of_answer if not any(a.drafted)]
        if plain:
            rounds += [(a, b, statistics.median(plain)) for a, b in of_answer if any(a.drafted)]
    verify = verification(rounds)
    best: dict[str, Any] = {"c": 0.0, "alpha": 0.0, "allowed": 1.0}
    for kind in sorted({k for a, _, _ in rounds for k in a.kinds if k}):
        mine = [(a, b, plain) for a, b, plain in rounds if set(a.kinds) <= {0, kind}]
        drafts = [(d, g) for a, b, _ in mine for d, g in zip(a.drafted, b.gained, strict=True) if d]
        if len(mine) < FEWEST_ROUNDS or len(drafts) < FEWEST_DRAFTS:
            continue
        c = statistics.median((a.pass_seconds or 0.0) / plain for a, _, plain in mine)
        # Tokens behind a rejected one have no verdict of their own.
        alpha = sum(g - 1 for _, g in drafts) / sum(min(d, g) for d, g in drafts)
        rates = [sum(alpha**i for i in range(d + 1)) / (d * c + v) for d, v in enumerate(verify[: LONGEST + 1])]
        if max(rates) > best["allowed"] or not best["alpha"]:
            best = {"c": c, "alpha": alpha, "allowed": max(rates)}
    return best | {"rounds": len(rounds), "verify": verify[1:]}


def verification(rounds: Sequence[tuple[Call, Call, float]]) -> list[float]:
    """Seconds of a step by draft tokens of each request (0, 1, ...), in plain steps: medians of the lengths of which
    there are rounds enough, in between by interpolation, and none beyond."""
    times: dict[int, list[float]] = {}
    for a, b, plain in rounds:
        times.setdefault(round(statistics.mean(a.drafted)), []).append((b.began - a.ended) / plain)
    known = {0: 1.0} | {n: statistics.median(each) for n, each in times.items() if n and len(each) >= FEWEST_ROUNDS}
    measured = sorted(known)
    return np.interp(range(measured[-1] + 1), measured, [known[n] for n in measured]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("acceptance", "sglang", "vllm"))
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[3500], help="of part acceptance")
    parser.add_argument("--cells", nargs="+", default=["1:3000", "4:3000"], help="batch:context, of an engine")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers that are measured at least")
    parser.add_argument("--seconds", type=float, default=30.0, help="as long as which further ones are")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = {"machine": f"{cpu()}, {cores()} cores", "model": args.model.name}
    if args.part == "acceptance":
        write_json(args.json, rounded(about | acceptance(args)))
    else:
        cells = [(int(batch), int(context)) for batch, context in (cell.split(":") for cell in args.cells)]
        settings = {name: getattr(args, name) for name in ("dtype", "tokens", "rounds", "seconds")}
        result: dict[str, Any] = about | versions(args.part) | {"window": WINDOW, "length": LONGEST} | settings
        result["rows"] = []
        if args.part == "vllm":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")  # GiB
            os.environ |= in_process_environment()
        speculative = {"method": "layerskip", "num_speculative_tokens": LONGEST, "window": WINDOW}
        sizes = [max(each) for each in zip(*cells, strict=True)]
        how = {"requests": sizes[0], "length": sizes[1] + 512, "exact": args.dtype == "float32", "prefixes": True}
        with engine_of(args.part, args.model, speculative, **how) as engine:
            for row in in_turns(args, cells, engine):
                result["rows"].append(row)
                write_json(args.json, rounded(result))


if __name__ == "__main__":
    main()
