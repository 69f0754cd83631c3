"""Windowed drafts at long contexts: what a window costs in acceptance, and what `window: auto` brings over plain.

    python bench/windowed.py acceptance --model build/model --json bench/results/windowed-acceptance.json
    python bench/windowed.py sglang --model build/model --cells 1:3000 4:3000 2:7000 --json ...
    python bench/windowed.py vllm --model build/model --cells 1:3000 4:3000 --json ...

Prompts are documents and modules of Python's own library, cut to the context, with a question behind them.

- acceptance: without an engine, fp32. The share of tokens of the model's own answers that a pass over 16 sinks and the
  newest tokens says too, and of places from which it says the next 2, 4 and 6 (with the whole model's KV in between,
  where a real draft finds its own).
- sglang (freedraft's CPU platform), vllm (its CPU build): plain and windowed decoding take turns in one engine, group
  by group, prompts read before. By cell of batch and context: ms of a plain step and of a draft pass, verification in
  plain steps, M, alpha over all draft tokens, the ratio of speeds and its spread, whether all tokens are the same; and
  what the measured times allow: the best (1 + a + ... + a^d) / (d c + v(d)) over lengths d, verification v growing
  linearly with d as measured; 1 where nothing is drafted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.layer_skip_sglang import BASELINE, DRAFTING, KINDS, engine_in_turns, figures
from bench.lib.machine import cores, cpu, rounded, versions
from bench.lib.results import write_json
from bench.lib.switch import Call, calls_in

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
Generate = Callable[[list[list[int]], str, int], list[list[int]]]


def long_prompts(model: Path, context: int, count: int, documents: int) -> list[list[int]]:
    """Token ids of `count` prompts of `context` tokens: one of so many texts, and a question behind it."""
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(model), []
    for i in range(count):
        name, question = SOURCES[i % documents][0], SOURCES[i % len(SOURCES)][1]
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8", errors="replace")
        chat = [{"role": "user", "content": f"TEXT\n\n{question}"}]
        templated = str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        ends = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in templated.split("TEXT")]
        ids = tokenizer(text[: 12 * context], add_special_tokens=False)["input_ids"]
        prompts.append([*ends[0], *ids[: context - len(ends[0]) - len(ends[1])], *ends[1]])
    return prompts


# -- acceptance ------------------------------------------------------------------------------------------------------


def acceptance(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    rows = []
    for context in args.contexts:
        right: dict[int, list[list[bool]]] = {window: [] for window in WINDOWS}
        for prompt in long_prompts(args.model, context, args.documents, args.documents):
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


# -- engines ---------------------------------------------------------------------------------------------------------


def sglang(args: argparse.Namespace, cells: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    longest, most = max(context for _, context in cells), max(batch for batch, _ in cells)
    settings = {"FREEDRAFT_WINDOW": args.window, "FREEDRAFT_TREE": "0"}
    options = {
        "speculative_num_draft_tokens": args.length + 1,
        "dtype": args.dtype,
        "max_running_requests": most,
        # Prompts stay in the prefix cache, so that only the first of each is read.
        "max_total_tokens": sum(batch * (context + 512) for batch, context in set(cells)) + 4 * longest,
        "chunked_prefill_size": 2048,
        "skip_tokenizer_init": True,
    }
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "calls.jsonl"
        with engine_in_turns(args.model, log, settings, **options) as engine:

            def generate(prompts: list[list[int]], label: str, tokens: int) -> list[list[int]]:
                sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
                ids = [f"{label}-{i}" for i in range(len(prompts))]
                return [o["output_ids"] for o in engine.generate(input_ids=prompts, sampling_params=sampling, rid=ids)]

            yield from in_turns(args, cells, generate, lambda: calls_in(log))


def vllm(args: argparse.Namespace, cells: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    from bench.lib.engine import Engine
    from bench.lib.servers import in_process_environment

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")  # GiB: prompts stay in the prefix cache
    os.environ.update(in_process_environment())
    most, longest = max(batch for batch, _ in cells), max(context for _, context in cells)
    speculative = {"method": "layerskip", "num_speculative_tokens": args.length, "window": args.window}
    engine = Engine(
        args.model, speculative, max_num_seqs=most, exact=args.dtype == "float32", max_model_len=longest + 512,
        prefix_caching=True,
    )  # fmt: skip
    calls: list[Call] = []

    def generate(prompts: list[list[int]], label: str, tokens: int) -> list[list[int]]:
        run = engine.generate(prompts, tokens, drafting=label.startswith(DRAFTING))
        calls.extend(replace(call, ids=[f"{label}-{i}" for i in range(call.batch)]) for call in run.calls)
        return run.tokens

    yield from in_turns(args, cells, generate, lambda: calls)


def in_turns(
    args: argparse.Namespace, cells: Iterable[tuple[int, int]], generate: Generate, calls: Callable[[], Sequence[Call]]
) -> Iterator[dict[str, Any]]:
    """Plain and windowed decoding of each cell by turns; a row for each."""
    for batch, context in cells:
        prompts = long_prompts(args.model, context, batch, args.documents)
        for turn in range(args.settle):  # the controller learns what steps and passes take, and what is accepted
            for kind in KINDS:
                generate(prompts, f"{kind}-warm{turn}-{batch}-{context}", args.tokens)
        answers: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        for turn in range(args.rounds):
            for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
                answers[kind].append(generate(prompts, f"{kind}-{batch}-{context}-{turn}", args.tokens))
        mine = [call for call in calls() if call.ids and f"-{batch}-{context}-" in call.ids[0]]
        row = {"context": context} | figures(mine, batch) | {"same": answers[BASELINE] == answers[DRAFTING]}
        row["allowed"] = allowed(row)
        row["share_of_allowed"] = row["ratio"] / row["allowed"]
        del row["formula"], row["share"]
        print(json.dumps(rounded(row)), flush=True)
        yield row


def allowed(row: dict[str, Any], longest: int = 16) -> float:
    """What the measured times allow; see above. alpha is of each token if those before were accepted."""
    if not row["drafted_per_step"]:
        return 1.0
    lengths = row["drafted_per_step"] / max(row["drafting_share"], 1e-9)
    a, c, more = row["alpha_given"], row["c"], (row["verify"] - 1) / lengths
    rates = [sum(a**i for i in range(d + 1)) / (d * c + 1 + more * d) for d in range(longest)]
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("acceptance", "sglang", "vllm"))
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[3500], help="of part acceptance")
    parser.add_argument("--documents", type=int, default=len(SOURCES), help="different texts")
    parser.add_argument("--cells", nargs="+", default=["1:3000", "4:3000"], help="batch:context, of an engine")
    parser.add_argument("--window", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=5, help="most draft tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--settle", type=int, default=2, help="turns before the clock starts")
    parser.add_argument("--rounds", type=int, default=3, help="turns that are measured")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = {"machine": f"{cpu()}, {cores()} cores", "model": args.model.name}
    if args.part == "acceptance":
        write_json(args.json, rounded(about | acceptance(args)))
    else:
        cells = [(int(batch), int(context)) for batch, context in (cell.split(":") for cell in args.cells)]
        settings = {
            name: getattr(args, name) for name in ("window", "dtype", "length", "tokens", "rounds", "documents")
        }
        run = sglang if args.part == "sglang" else vllm
        result: dict[str, Any] = about | versions(args.part) | settings | {"rows": []}
        for row in run(args, cells):
            result["rows"].append(row)
            write_json(args.json, rounded(result))


if __name__ == "__main__":
    main()
