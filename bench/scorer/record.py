"""Record a model's answers and its 8 likeliest tokens at each position, as training data for recycled logits.

    python -m bench.scorer.record build/model prompts.jsonl ... --answers 400 --out build/recorded.jsonl

`python -m bench.scorer --recorded` reads the recording: a JSON object per answer, with prompt and output (token ids),
top_tokens and top_log_probs (8 for each token of the output). Prompt files have a JSON object per line with "prompt",
"question" or "turns"; files alternate. Needs vLLM; answers are greedy.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.lib import jsonl
from bench.lib.prompts import chats
from freedraft.step import TOP_TOKENS
from layerskip_plugin.calibrate.prompts import Prompts

MAX_PROMPT = 1024  # tokens; longer prompts are left out


class Recording(NamedTuple):
    """An answer with the likeliest tokens at each of its positions, at temperature 1, the likeliest first."""

    prompt: NDArray[np.int32]  # [P]
    output: NDArray[np.int32]  # [T]
    top_tokens: NDArray[np.int32]  # [T, TOP_TOKENS]
    top_log_probs: NDArray[np.float32]  # [T, TOP_TOKENS]


def load_recordings(path: Path) -> list[Recording]:
    """Read recordings. Raises ValueError: the file is missing or malformed; the message names the line."""

    def parse(number: int, row: Any) -> Recording:
        prompt, output, tokens = (np.array(row[name], np.int32) for name in ("prompt", "output", "top_tokens"))
        recording = Recording(prompt, output, tokens, np.array(row["top_log_probs"], np.float32))
        if any(array.shape != (len(output), TOP_TOKENS) for array in recording[2:]) or prompt.ndim != 1:
            raise ValueError("other shapes")
        return recording

    return jsonl.read(path, "as bench.scorer.record writes it", parse)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(str(arguments.model), max_model_len=MAX_PROMPT + arguments.tokens, max_num_seqs=32)
    of_files = (Prompts.load(path).texts for path in arguments.prompts)
    texts = [text for text in itertools.chain.from_iterable(itertools.zip_longest(*of_files)) if text]
    short = [prompt for prompt in chats(arguments.model, texts) if len(prompt) <= MAX_PROMPT]
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in short[: arguments.answers]]
    outputs = llm.generate(requests, SamplingParams(temperature=0, max_tokens=arguments.tokens, logprobs=TOP_TOKENS))
    with arguments.out.open("w") as file:
        for output in outputs:
            answer = output.outputs[0]
            probable = ([(p.logprob, token) for token, p in at.items()] for at in answer.logprobs or ())
            likeliest = [sorted(at, reverse=True)[:TOP_TOKENS] for at in probable]
            row: dict[str, Any] = {"prompt": output.prompt_token_ids, "output": list(answer.token_ids)}
            row["top_tokens"] = [[token for _, token in at] for at in likeliest]
            row["top_log_probs"] = [[round(p, 4) for p, _ in at] for at in likeliest]
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
