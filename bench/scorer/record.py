"""Record a model's answers and its 8 likeliest tokens at each position: what recycled logits are trained on.

    python -m bench.scorer.record build/model prompts.jsonl ... --answers 400 --out build/recorded.jsonl

The recording is what `python -m bench.scorer --recorded` reads: a JSON object per answer, with prompt and output
(token ids), top_tokens and top_log_probs (8 for each token of the output). Prompt files have a JSON object per line
with "prompt", "question" or "turns"; they take turns. Needs vLLM; answers are greedy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.lib.prompts import chats
from freedraft.step import TOP_TOKENS


def prompts_of(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row.get("prompt") or row.get("question") or row["turns"][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(str(arguments.model), max_model_len=arguments.prompt_tokens + arguments.tokens, max_num_seqs=32)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*map(prompts_of, arguments.prompts)))
    texts = [text for text in in_turn if text]
    short = [prompt for prompt in chats(arguments.model, texts) if len(prompt) <= arguments.prompt_tokens]
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in short[: arguments.answers]]
    outputs = llm.generate(requests, SamplingParams(temperature=0, max_tokens=arguments.tokens, logprobs=TOP_TOKENS))
    with arguments.out.open("w") as file:
        for output in outputs:
            answer = output.outputs[0]
            assert answer.logprobs is not None
            likeliest = [
                sorted(((p.logprob, token) for token, p in at.items()), reverse=True)[:TOP_TOKENS]
                for at in answer.logprobs
            ]
            row = {
                "prompt": output.prompt_token_ids,
                "output": list(answer.token_ids),
                "top_tokens": [[token for _, token in at] for at in likeliest],
                "top_log_probs": [[round(p, 4) for p, _ in at] for at in likeliest],
            }
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
