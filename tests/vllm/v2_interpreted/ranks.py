"""An engine on several tensor-parallel ranks, or stages of a pipeline: its answers to the same prompts, asked twice, as
a line of JSON.

python ranks.py MODEL RANKS '{"prompts": ..., "speculative_config": ..., "skip_sets": one for each prompt,
    "temperature": 0 by default, "stages": 1 by default, of one rank each}'
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main():
    given = json.loads(sys.argv[3])
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in given.pop("prompts")]
    skip_sets = given.pop("skip_sets", [None] * len(prompts))
    temperature = given.pop("temperature", 0)
    stages = given.pop("stages", 1)
    room = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "block_size": 32}
    options = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    options |= {"enable_prefix_caching": False, "disable_log_stats": False}
    ranks = {"tensor_parallel_size": int(sys.argv[2]) // stages, "pipeline_parallel_size": stages}
    llm = LLM(sys.argv[1], **ranks | options | room | given)
    asked = {"temperature": temperature, "seed": 5, "max_tokens": 30, "ignore_eos": True, "detokenize": False}
    parameters = [SamplingParams(**asked, extra_args={"skip_set": name} if name else None) for name in skip_sets]
    answers, accepted = list[list[list[int]]](), list[float]()
    for _ in range(2):
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        figures = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        accepted.append(figures.get("vllm:spec_decode_num_accepted_tokens", 0))
    print("\n" + json.dumps({"answers": answers, "accepted": accepted[-1], "at first": accepted[0]}))


if __name__ == "__main__":
    main()
