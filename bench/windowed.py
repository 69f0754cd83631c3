"""Windows at long contexts, without an engine: how often a pass over 16 sinks and the newest tokens says what the whole
model says. Answers are to questions about documents and modules of Python's own library, cut to 3,500 tokens.

    python bench/windowed.py --model build/model --json bench/results/windowed-acceptance.json
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.lib.machine import rounded
from bench.lib.prompts import long_chats
from bench.lib.results import write_json

CONTEXT, SINKS = 3500, 16
WINDOWS, LENGTHS = (128, 256, 512, 1024, 2048), (1, 2, 4, 6)


@torch.inference_mode()
def agreement(model: Any, prompt: list[int], tokens: int) -> dict[int, list[bool]]:
    """By window: whether its pass says the token of the model's greedy answer, for each of its `tokens` tokens."""
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    whole, answer = out.past_key_values, [int(out.logits[0, -1].argmax())]
    for _ in range(tokens):
        out = model(torch.tensor([answer[-1:]]), past_key_values=whole, use_cache=True)
        answer.append(int(out.logits[0, -1].argmax()))
    n, keys = len(prompt), torch.arange(len(prompt) + tokens)
    position = torch.arange(n, n + tokens)[:, None]
    found = {}
    for window in WINDOWS:
        cache = DynamicCache()
        for i, layer in enumerate(whole.layers):
            cache.update(layer.keys[:, :, :n].clone(), layer.values[:, :, :n].clone(), i)
        seen = (keys <= position) & ((keys < SINKS) | (keys > position - window + SINKS))
        how = {"attention_mask": torch.where(seen, 0.0, float("-inf"))[None, None], "position_ids": position.T}
        logits = model(torch.tensor([answer[:-1]]), past_key_values=cache, **how).logits[0]
        found[window] = [a == b for a, b in zip(logits.argmax(-1).tolist(), answer[1:], strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    by_document = [agreement(model, prompt, args.tokens) for prompt in long_chats(args.model, CONTEXT)]
    rows = []
    for window in WINDOWS:
        right = [found[window] for found in by_document]
        row: dict[str, Any] = {"context": CONTEXT, "window": window, "documents": len(right)}
        row["by_document"] = [sum(one) / len(one) for one in right]
        for length in LENGTHS:
            places = [one[i : i + length] for one in right for i in range(len(one) - length + 1)]
            row[f"next {length}"] = sum(map(all, places)) / len(places)
        rows.append(rounded(row))
        print(rows[-1], flush=True)
    write_json(args.json, {"model": args.model.name, "tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
